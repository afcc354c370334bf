// docs/sampling.md in JavaScript: doubles and 32-bit integers only. Reads cases as JSON on standard input, writes what it computes:
// of each case with logits the token, else the noise. Seeds are strings: a 64-bit number is no double.

import { readFileSync } from "node:fs";

const LN2 = 0.6931471805599453;
const SQRT_HALF = 0.7071067811865476;

// Both halves of a product of two 32-bit words.
function product(a, b) {
  const low = Math.imul(a, b) >>> 0;
  const aLow = a & 0xffff, aHigh = a >>> 16, bLow = b & 0xffff, bHigh = b >>> 16;
  const middle = aHigh * bLow + Math.floor((aLow * bLow) / 65536);
  const carry = aLow * bHigh + (middle % 65536);
  return [aHigh * bHigh + Math.floor(middle / 65536) + Math.floor(carry / 65536), low];
}

function philox(counter, key) {
  let [c0, c1, c2, c3] = counter;
  let [k0, k1] = key;
  for (let round = 0; round < 10; round++) {
    const [aHigh, aLow] = product(0xd2511f53, c0);
    const [bHigh, bLow] = product(0xcd9e8d57, c2);
    [c0, c1, c2, c3] = [(bHigh ^ c1 ^ k0) >>> 0, bLow, (aHigh ^ c3 ^ k1) >>> 0, aLow];
    k0 = (k0 + 0x9e3779b9) >>> 0;
    k1 = (k1 + 0xbb67ae85) >>> 0;
  }
  return [c0, c1, c2, c3];
}

function log(x) {
  let m = x, e = 0;
  while (m < SQRT_HALF) { m *= 2; e -= 1; }
  while (m >= 2 * SQRT_HALF) { m *= 0.5; e += 1; }
  const s = (m - 1) / (m + 1);
  const square = s * s;
  let series = 1 / 21;
  for (let k = 19; k > 0; k -= 2) series = series * square + 1 / k;
  return e * LN2 + 2 * s * series;
}

function exp(x) {
  if (x < -700) return 0;
  const n = Math.floor(x / LN2 + 0.5);
  const r = x - n * LN2;
  const factorials = [1];
  for (let k = 1; k <= 13; k++) factorials.push(factorials[k - 1] * k);
  let series = 1 / factorials[13];
  for (let k = 12; k >= 0; k--) series = series * r + 1 / factorials[k];
  for (let i = 0; i < -n; i++) series *= 0.5;
  return series;
}

function noise(seed, position, token) {
  const key = [Number(seed & 0xffffffffn), Number(seed >> 32n)];
  const bits = philox([token >>> 2, position, 0, 0], key)[token & 3];
  return -log(-log((bits + 0.5) / 4294967296));
}

function smallestAllowed(y, { top_k: topK, top_p: topP, min_p: minP }) {
  const descending = Float64Array.from(y).sort().reverse();
  const largest = descending[0];
  let bound = -Infinity;
  if (topK > 0 && topK < y.length) bound = descending[topK - 1];
  if (topP < 1) {
    let total = 0;
    for (const value of y) if (value >= bound) total += exp(value - largest);
    let reached = 0;
    for (const value of descending) {
      if (value < bound) break;
      reached += exp(value - largest);
      if (reached >= topP * total) { bound = value; break; }
    }
  }
  if (minP > 0) bound = Math.max(bound, largest + log(minP));
  return bound;
}

function sample(logits, position, prompt, generated, s) {
  let y = logits.slice();
  if (s.repetition_penalty !== 1) {
    for (const token of new Set([...prompt, ...generated])) {
      y[token] = y[token] > 0 ? y[token] / s.repetition_penalty : y[token] * s.repetition_penalty;
    }
  }
  if (s.presence_penalty !== 0 || s.frequency_penalty !== 0) {
    for (const token of new Set(generated)) {
      const count = generated.filter((other) => other === token).length;
      y[token] = y[token] - count * s.frequency_penalty - s.presence_penalty;
    }
  }
  let bound = -Infinity;
  if (s.temperature > 0) {
    y = y.map((x) => x / s.temperature);
    bound = smallestAllowed(y, s);
  }
  const seed = BigInt(s.seed);
  let best = -1, bestScore = -Infinity;
  y.forEach((value, token) => {
    if (value < bound) return;
    const score = s.temperature > 0 ? value + noise(seed, position, token) : value;
    if (score > bestScore) { best = token; bestScore = score; }
  });
  return best;
}

const cases = JSON.parse(readFileSync(0, "utf8"));
const results = cases.map((c) =>
  c.logits === undefined
    ? noise(BigInt(c.seed), c.position, c.token)
    : sample(c.logits, c.position, c.prompt, c.generated, c.sampling),
);
console.log(JSON.stringify(results));
