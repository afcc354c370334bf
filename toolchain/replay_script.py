"""The speculative loop with nothing but ONNX Runtime and NumPy: drives this package's model and compares with golden.json.

    python replay.py                drive every trace; exit code 0 when all agree
    python replay.py --traces 1     the first one only
    python replay.py --form onnx    with the ONNX graphs, where the package has .ort ones beside them

This is the loop to port to an app: read it from `generate` on, downwards for what it calls. A loop in another language is right when it
gives the tokens, rows and trees of golden.json. On another processor sums are rounded otherwise: where the two best tokens are closer than
about 0.001 (the margin that a difference is printed with), another one may win without any fault in the loop.

It knows this folder's files and token ids; nothing of text.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import json
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

# ---------------------------------------------------------------- the loop


def generate(model: Model, golden: dict[str, Any], trace: dict[str, Any], check: Check) -> list[int]:
    """Token ids after a prompt. ``check`` compares every call with the recorded one and says whether to go on."""
    prompt, budget, stop_ids = trace["prompt_ids"], trace["budget"], set(golden["stop_ids"])
    end = len(prompt) + trace["max_new_tokens"]
    wants_streams = trace["draft"] in ("streams", "joined") and golden["num_streams"] > 0 and budget > 1
    choose = Chooser(trace["sampling"], prompt)
    model.length = 0

    # 1. The prompt, in chunks. Only its last row is scored, and carries streams (fused placement).
    while model.length < len(prompt):
        chunk = prompt[model.length : model.length + golden["prompt_chunk"]]
        last = [len(chunk) - 1]
        is_last = model.length + len(chunk) == len(prompt)
        carries = is_last and wants_streams and not model.delayed and trace["max_new_tokens"] > 1
        carries = carries and len(prompt) + model.gamma <= model.capacity
        positions = list(range(model.length, model.length + len(chunk)))
        out = model.run(chunk, positions, np.tri(len(chunk), dtype=bool), last, last if carries else [])
        model.commit(list(range(len(chunk))))
    text = [*prompt, choose(out, 0, prompt, [])]
    streams = None
    if "stream_ids" in out:
        streams = (out["stream_ids"][0], out["stream_logprobs"][0], None, len(prompt) - 1)
    finished = finish_reason(text, end, stop_ids, model)
    drafted = None
    if not finished and wants_streams and model.delayed:
        streams = drafted = draft(model, text, end)
    if not check.prefill(model, out, text[len(prompt) :], drafted):
        return text[len(prompt) :]

    number = 0
    while not finished:
        # 2. A tree of guesses below the last token, which is in the text and not yet in the cache.
        past, left, room = model.length, end - len(text), model.capacity - model.length
        rows, depth = min(budget, room), left - 1
        tree = Tree([text[-1]], [-1], [0.0])
        if rows > 1:
            if trace["draft"] == "streams":
                tree = stream_tree(text, streams, rows, depth, golden["temperatures"])
            elif trace["draft"] != "none":  # lookup and n-grams are other sources: here their trees are taken as they were recorded
                tree = check.recorded_tree(number, tree)
        stream_rows: list[int] = []
        if wants_streams and left > 1 and not model.delayed:
            stream_rows = likeliest_last(tree)[: (room - len(tree.tokens)) // model.gamma]

        # 3. One call scores all rows.
        positions = [past + d for d in tree.depths]
        out = model.run(tree.tokens, positions, tree.mask(), list(range(len(tree.tokens))), stream_rows)

        # 4. The longest path on which every token is what the model itself says after its parent; a stop token cuts it.
        accepted, emitted = [0], [choose(out, 0, text, [])]
        for row in range(1, len(tree.tokens)):
            if emitted[-1] in stop_ids:
                break
            if tree.parents[row] == accepted[-1] and tree.tokens[row] == emitted[-1]:
                accepted.append(row)
                emitted.append(choose(out, row, text, tree.path(row)))

        # 5. Accepted rows move together in the cache; the others are forgotten.
        model.commit(accepted)
        text += emitted
        carrying = [i for i, row in enumerate(stream_rows) if row in accepted]
        if carrying:
            i = carrying[-1]
            streams = (out["stream_ids"][i], out["stream_logprobs"][i], None, positions[stream_rows[i]])

        # 6. Delayed streams: a pass of their own for the last accepted row, about what comes after the new last token.
        finished = finish_reason(text, end, stop_ids, model)
        drafted = None
        if wants_streams and model.delayed:
            streams = drafted = draft(model, text, end) if not finished else None
        if not check.step(number, model, past, tree, positions, stream_rows, out, accepted, emitted, drafted):
            break
        number += 1
    check.end(finished, text[len(prompt) :])
    return text[len(prompt) :]


def finish_reason(text: list[int], end: int, stop_ids: set[int], model: Model) -> str:
    if text[-1] in stop_ids:
        return "stop"
    return "length" if len(text) >= end or model.length >= model.capacity else ""


def draft(model: Model, text: list[int], end: int) -> tuple[Any, ...] | None:
    """Delayed streams, where a draft can still be used and the cache has room for their scratch rows."""
    if end - len(text) < 2 or model.length + model.gamma > model.capacity:
        return None
    ids, logprobs, pairs = model.draft(text[-1])
    return ids, logprobs, pairs, len(text) - 2


# ---------------------------------------------------------------- trees


class Tree:
    """Tokens, the row of each one's parent, and the log-probability of each one's path. The root comes first, parents before children."""

    def __init__(self, tokens: list[int], parents: list[int], logprob: list[float]) -> None:
        self.tokens, self.parents, self.logprob = tokens, parents, logprob
        self.depths = [0]
        for parent in parents[1:]:
            self.depths.append(self.depths[parent] + 1)

    def mask(self) -> Any:
        """bool [M, M]: a row sees its ancestors and itself."""
        mask = np.eye(len(self.tokens), dtype=bool)
        for row, parent in enumerate(self.parents[1:], 1):
            mask[row] |= mask[parent]
        return mask

    def path(self, row: int) -> list[int]:
        """Tokens from below the root to the row."""
        found: list[int] = []
        while row:
            found.append(self.tokens[row])
            row = self.parents[row]
        return found[::-1]


def stream_tree(text: list[int], streams: Any, budget: int, max_depth: int, temperatures: list[float]) -> Tree:
    """The likeliest ``budget`` nodes when depth d draws from stream d, best first; then the likeliest chain moves to the front."""
    root = text[-1]
    if streams is None:
        return Tree([root], [-1], [0.0])
    ids, logprobs, pairs, position = streams
    used = len(text) - 2 - position  # streams that the text has gone past since they were computed
    if used >= len(ids):
        return Tree([root], [-1], [0.0])
    candidate = None
    if pairs is not None and used > 0:
        before = ids[used - 1].tolist()
        candidate = before.index(root) if root in before else None
    ids, logprobs, temperatures = ids[used:], logprobs[used:], temperatures[used:]
    if any(t != 1.0 for t in temperatures):
        logprobs = calibrated(logprobs, temperatures)
    free = logprobs.tolist()
    given = None if pairs is None else conditioned(logprobs, pairs[used:]).tolist()
    names, levels = ids.tolist(), min(max_depth, len(ids))
    tokens, parents, paths, depths, chosen = [root], [-1], [0.0], [0], [candidate]
    order: dict[tuple[int, int | None], tuple[list[float], list[int]]] = {}
    heap: list[tuple[float, int, int, int]] = []

    def children(parent: int) -> tuple[list[float], list[int]]:
        key = (depths[parent], None if given is None else chosen[parent])
        if key not in order:
            scores = free[key[0]] if given is None or key[1] is None else given[key[0]][key[1]]
            possible = [b for b, score in enumerate(scores) if math.isfinite(score)]
            order[key] = scores, sorted(possible, key=lambda b: -scores[b])
        return order[key]

    def push(parent: int, rank: int) -> None:
        if depths[parent] < levels:
            scores, ranked = children(parent)
            if rank < len(ranked):
                heapq.heappush(heap, (-(paths[parent] + scores[ranked[rank]]), 2 * len(tokens) + (rank > 0), parent, rank))

    push(0, 0)
    while heap and len(tokens) < budget:  # a node's next sibling and its first child are both no likelier than it
        negative, _, parent, rank = heapq.heappop(heap)
        row, b = len(tokens), children(parent)[1][rank]
        tokens.append(names[depths[parent]][b])
        parents.append(parent)
        paths.append(-negative)
        depths.append(depths[parent] + 1)
        chosen.append(b)
        push(row, 0)
        push(parent, rank + 1)

    best: dict[int, int] = {}
    for row in range(1, len(tokens)):
        if parents[row] not in best or paths[row] > paths[best[parents[row]]]:
            best[parents[row]] = row
    rows = [0]
    while rows[-1] in best:
        rows.append(best[rows[-1]])
    rows += [row for row in range(1, len(tokens)) if row not in set(rows)]
    new = {row: i for i, row in enumerate(rows)}
    return Tree([tokens[r] for r in rows], [-1] + [new[parents[r]] for r in rows[1:]], [float(np.float32(paths[r])) for r in rows])


def conditioned(logprobs: Any, pairs: Any) -> Any:
    """[γ, k, k]: log-probability of candidate b below candidate a; what no candidate names is one more outcome, with a score of 0."""
    rest = np.maximum(1.0 - np.exp(logprobs).sum(axis=1), 0.0)[:, None, None]
    scores = logprobs[:, None, :] + pairs
    largest = np.maximum(scores.max(axis=2, keepdims=True), -60.0)
    return scores - (largest + np.log(np.exp(scores - largest).sum(axis=2, keepdims=True) + rest * np.exp(-largest)))


def calibrated(logprobs: Any, temperatures: list[float]) -> Any:
    """[γ, k] at other temperatures, one for each stream."""
    p = np.exp(logprobs.astype(np.float64))
    rest = np.clip(1.0 - p.sum(axis=1, keepdims=True), 0.0, None)
    inverse = 1.0 / np.array(temperatures)[:, None]
    p, rest = p**inverse, rest**inverse
    return np.log(p / (p.sum(axis=1, keepdims=True) + rest)).astype(np.float32)


def likeliest_last(tree: Tree) -> list[int]:
    """The row that is likeliest to be the last accepted one: P(its path) minus that of its children."""
    last = [math.exp(np.float32(p)) for p in tree.logprob]
    for row, parent in enumerate(tree.parents[1:], 1):
        last[parent] -= math.exp(np.float32(tree.logprob[row]))
    return [int(np.argmax(last))]


# ---------------------------------------------------------------- choosing a token


class Chooser:
    """The token after a row: the graph's argmax, or the keyed sample that docs/sampling.md of specstream spells out."""

    def __init__(self, sampling: dict[str, Any] | None, prompt: list[int]) -> None:
        self.sampling, self.prompt_length = sampling, len(prompt)
        self.fetches_logits = sampling is not None

    def __call__(self, out: dict[str, Any], row: int, text: list[int], path: list[int]) -> int:
        """``path`` are the row's tokens below the last one of ``text``."""
        if self.sampling is None:
            return int(out["next_ids"][row])
        history = [*text, *path]
        return self.sample(out["logits"][row], len(history), history[: self.prompt_length], history[self.prompt_length :])

    def sample(self, logits: Any, position: int, prompt: list[int], generated: list[int]) -> int:
        s = self.sampling
        assert s is not None
        y = logits.astype(np.float64)
        if s["repetition_penalty"] != 1:
            seen = np.unique(np.array([*prompt, *generated], dtype=np.int64))
            y[seen] = np.where(y[seen] > 0, y[seen] / s["repetition_penalty"], y[seen] * s["repetition_penalty"])
        if s["presence_penalty"] or s["frequency_penalty"]:
            seen, counts = np.unique(np.array(generated, dtype=np.int64), return_counts=True)
            y[seen] = y[seen] - counts * s["frequency_penalty"] - s["presence_penalty"]
        if s["temperature"] == 0:
            return int(y.argmax())
        y /= s["temperature"]
        largest, least = float(y.max()), -math.inf
        if 0 < s["top_k"] < len(y):
            least = float(np.sort(y)[-s["top_k"]])
        if s["top_p"] < 1:
            left = y[y >= least]
            share = s["top_p"] * float(np.cumsum(exponential(left - largest))[-1])
            left = -np.sort(-left, kind="stable")
            reached = np.flatnonzero(np.cumsum(exponential(left - largest)) >= share)
            least = max(least, float(left[reached[0]])) if len(reached) else least
        if s["min_p"] > 0:
            least = max(least, largest + float(logarithm(np.array(s["min_p"]))))
        ids = np.flatnonzero(y >= least)
        return int(ids[(y[ids] + gumbel(s["seed"], position, ids)).argmax()])


def gumbel(seed: int, position: int, ids: Any) -> Any:
    """Noise of each token id: word id mod 4 of Philox4x32-10 with counter (id div 4, position, 0, 0) and the seed as key."""
    counter = np.zeros((len(ids), 4), dtype=np.uint64)
    counter[:, 0], counter[:, 1] = ids >> 2, position
    c0, c1, c2, c3 = counter.T
    low, shift, k0, k1 = np.uint64(0xFFFFFFFF), np.uint64(32), seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        product0, product1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1 = (product1 >> shift) ^ c1 ^ np.uint64(k0), product1 & low
        c2, c3 = (product0 >> shift) ^ c3 ^ np.uint64(k1), product0 & low
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    words = np.stack((c0, c1, c2, c3))[ids & 3, np.arange(len(ids))]
    return -logarithm(-logarithm((words.astype(np.float64) + 0.5) * 2.0**-32))


def logarithm(x: Any) -> Any:
    """Made of + - * / alone, so that every platform has the same last bit."""
    m, e = np.frexp(x)
    small = m < 0.7071067811865476
    m, e = np.where(small, 2.0 * m, m), e - small
    s = (m - 1.0) / (m + 1.0)
    series = np.full_like(m, 1.0 / 21.0)
    for k in range(19, 0, -2):
        series = series * (s * s) + 1.0 / k
    return e * 0.6931471805599453 + 2.0 * s * series


def exponential(x: Any) -> Any:
    inside = np.maximum(x, -700.0)
    n = np.floor(inside / 0.6931471805599453 + 0.5)
    r = inside - n * 0.6931471805599453
    series = np.full_like(r, 1.0 / math.factorial(13))
    for k in range(12, -1, -1):
        series = series * r + 1.0 / math.factorial(k)
    return np.where(x < -700.0, 0.0, np.ldexp(series, n.astype(np.int32)))


# ---------------------------------------------------------------- the model


class Model:
    """The graphs and the cache. The cache is one array; each layer's tensor is a part of it, both input and output of every call."""

    def __init__(
        self, folder: Path, golden: dict[str, Any], graphs: list[str], threads: int, capacity: int | None, cache_dtype: str
    ) -> None:
        self.capacity, self.length, self.gamma = capacity or golden["capacity"], 0, golden["num_streams"]
        self.delayed, self.layers, self.top_k = golden["placement"] == "delayed", golden["num_layers"], golden["top_k"]
        self.hidden, self.vocab, self.pads = golden["hidden_size"], golden["vocab_size"], golden["pad_single"]
        self.logits = False  # whether calls fetch them
        shape = (self.layers, 2, 1, golden["num_kv_heads"], self.capacity, golden["head_dim"])
        self.cache = np.empty(shape, dtype=cache_dtype)
        self.cache.fill(0)  # rows that no mask lets through still meet a product with 0, and 0 times NaN is NaN
        self.main = session(folder / graphs[0], threads)
        self.streams = session(folder / graphs[1], threads) if len(graphs) > 1 else None
        self.entry: Any = None
        self.last = 0

    def run(self, tokens: list[int], positions: list[int], mask: Any, scored: list[int], stream_rows: list[int]) -> dict[str, Any]:
        assert self.length + len(tokens) + len(stream_rows) * self.gamma <= self.capacity
        if self.pads and len(tokens) == 1 and not stream_rows and self.length + 2 <= self.capacity:
            # Kernels for one row round 8-bit activations in another way than those for several: take a copy of the row along.
            out = self.run(tokens * 2, positions * 2, np.eye(2, dtype=bool), [0, 1], [])
            return {name: array[:1] for name, array in out.items()}
        inputs = {
            "input_ids": np.array([tokens], dtype=np.int64),
            "position_ids": np.array([positions], dtype=np.int64),
            "tree_mask": np.ascontiguousarray(mask),
            "past_length": np.array([self.length], dtype=np.int32),
            "logit_rows": np.array(scored, dtype=np.int64),
        }
        if self.gamma and not self.delayed:
            inputs["stream_rows"] = np.array(stream_rows, dtype=np.int64)
        outputs: dict[str, Any] = {"next_ids": np.empty(len(scored), dtype=np.int64)}
        if self.logits:
            outputs["logits"] = np.empty((len(scored), self.vocab), dtype=np.float32)
        if self.delayed:
            outputs["entry_states"] = self.entry = np.empty((len(tokens), self.hidden), dtype=np.float32)
        if stream_rows:
            outputs["stream_ids"] = np.empty((len(stream_rows), self.gamma, self.top_k), dtype=np.int64)
            outputs["stream_logprobs"] = np.empty((len(stream_rows), self.gamma, self.top_k), dtype=np.float32)
        self.call(self.main, inputs, outputs, range(self.layers))
        return outputs

    def commit(self, rows: list[int]) -> None:
        first = self.length
        self.cache[..., first : first + len(rows), :] = self.cache[..., [first + row for row in rows], :]
        self.length += len(rows)
        self.last = rows[-1]

    def draft(self, root: int) -> tuple[Any, Any, Any]:
        assert self.streams is not None
        inputs = {
            "entry_state": self.entry[self.last : self.last + 1],
            "root_id": np.array([root], dtype=np.int64),
            "past_length": np.array([self.length], dtype=np.int32),
        }
        names = [output.name for output in self.streams.get_outputs()]
        shape = (1, self.gamma, self.top_k)
        outputs: dict[str, Any] = {"stream_ids": np.empty(shape, dtype=np.int64), "stream_logprobs": np.empty(shape, dtype=np.float32)}
        if "stream_pairs" in names:
            outputs["stream_pairs"] = np.empty((*shape, self.top_k), dtype=np.float32)
        top = sorted(int(name.split(".")[1]) for name in names if name.startswith("present.") and name.endswith(".key"))
        self.call(self.streams, inputs, outputs, top)
        pairs = outputs["stream_pairs"][0] if "stream_pairs" in outputs else None
        return outputs["stream_ids"][0], outputs["stream_logprobs"][0], pairs

    def call(self, graph: Any, inputs: dict[str, Any], outputs: dict[str, Any], layers: Any) -> None:
        binding = graph.io_binding()
        for name, array in inputs.items():
            binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
        for name, array in outputs.items():
            binding.bind_ortvalue_output(name, ort.OrtValue.ortvalue_from_numpy(array))
        for layer in layers:
            for which, name in enumerate(("key", "value")):
                memory = ort.OrtValue.ortvalue_from_numpy(self.cache[layer, which])
                binding.bind_ortvalue_input(f"past_key_values.{layer}.{name}", memory)
                binding.bind_ortvalue_output(f"present.{layer}.{name}", memory)
        graph.run_with_iobinding(binding)


def session(file: Path, threads: int) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.enable_mem_pattern = False  # shapes repeat while the past grows, which no pattern knows
    if file.suffix == ".ort":  # weights are used where they lie in the mapped file, not copied
        options.add_session_config_entry("session.use_memory_mapped_ort_model", "1")
        options.add_session_config_entry("session.use_ort_model_bytes_for_initializers", "1")
    # Attention a head at a time, as when the traces were recorded: ONNX Runtime's tiles round otherwise and are slower for few rows.
    os.environ.setdefault("ORT_GQA_DISABLE_FLASH_ATTENTION", "1")
    return ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


# ---------------------------------------------------------------- comparing


class Check:
    """Compares each call with the recorded one. After the first difference of a text the rest would differ anyway, so it stops there."""

    def __init__(self, trace: dict[str, Any], tolerance: float) -> None:
        self.trace, self.tolerance = trace, tolerance
        self.difference = ""
        self.largest = 0.0  # of log-probabilities

    def recorded_tree(self, number: int, root: Tree) -> Tree:
        if number >= len(self.trace["steps"]):
            return root
        step = self.trace["steps"][number]
        return Tree(step["tokens"], step["parents"], step["logprob"])

    def prefill(self, model: Model, out: dict[str, Any], emitted: list[int], drafted: Any) -> bool:
        recorded = self.trace["prefill"]
        margins = recorded["margins"] if recorded["choice_margins"] is None else recorded["choice_margins"]
        self.same("prefill", "next_ids", out["next_ids"].tolist(), recorded["next_ids"], recorded["margins"])
        self.same("prefill", "emitted", emitted, recorded["emitted"], margins)
        self.same("prefill", "length", [model.length], [recorded["length"]])
        self.streams("prefill", out, drafted, recorded["streams"])
        return not self.difference

    def step(
        self,
        number: int,
        model: Model,
        past: int,
        tree: Tree,
        positions: list[int],
        stream_rows: list[int],
        out: dict[str, Any],
        accepted: list[int],
        emitted: list[int],
        drafted: Any,
    ) -> bool:
        where = f"step {number}"
        if number >= len(self.trace["steps"]):
            self.difference = self.difference or f"{where}: one more than recorded"
            return False
        recorded = self.trace["steps"][number]
        self.same(where, "past", [past], [recorded["past"]])
        self.same(where, "tree", tree.tokens, recorded["tokens"])
        self.same(where, "parents", tree.parents, recorded["parents"])
        self.same(where, "positions", positions, recorded["positions"])
        self.same(where, "stream_rows", stream_rows, recorded["stream_rows"])
        self.near(where, "logprob", np.array(tree.logprob), recorded["logprob"])
        self.same(where, "next_ids", out["next_ids"].tolist(), recorded["next_ids"], recorded["margins"])
        margins = recorded["choice_margins"] or [recorded["margins"][row] for row in recorded["accepted"]]
        self.same(where, "emitted", emitted, recorded["emitted"], margins)
        self.same(where, "accepted", accepted, recorded["accepted"])
        self.same(where, "length", [model.length], [recorded["length"]])
        self.streams(where, out, drafted, recorded["streams"])
        return not self.difference

    def end(self, reason: str, token_ids: list[int]) -> None:
        self.same("end", "token_ids", token_ids, self.trace["token_ids"])
        if reason != self.trace["finish_reason"] and not self.difference:
            self.difference = f"end: finished by {reason or 'nothing'}, recorded {self.trace['finish_reason']}"

    def streams(self, where: str, out: dict[str, Any], drafted: Any, recorded: list[dict[str, Any]]) -> None:
        found = [drafted[:3]] if drafted is not None else []
        if "stream_ids" in out:
            found = [(ids, logprobs, None) for ids, logprobs in zip(out["stream_ids"], out["stream_logprobs"], strict=True)]
        self.same(where, "number of streams' rows", [len(found)], [len(recorded)])
        for (ids, logprobs, pairs), expected in zip(found, recorded, strict=False):
            self.same(where, "stream ids", ids.reshape(-1).tolist(), [token for level in expected["ids"] for token in level])
            self.near(where, "stream log-probabilities", logprobs, expected["logprobs"])
            if pairs is not None and expected["pairs"] is not None:
                self.near(where, "stream pairs", pairs, expected["pairs"])

    def same(self, where: str, what: str, found: list[int], recorded: list[int], margins: list[float] | None = None) -> None:
        if found == recorded or self.difference:
            return
        self.difference = f"{where}: {what} {found}, recorded {recorded}"
        place = next((i for i, (a, b) in enumerate(zip(found, recorded, strict=False)) if a != b), None)
        if margins is not None and place is not None:
            self.difference += f" (margin {margins[place]:.2g})"

    def near(self, where: str, what: str, found: Any, recorded: Any) -> None:
        largest = float(np.abs(np.asarray(found, dtype=np.float32) - np.array(recorded, dtype=np.float32)).max(initial=0.0))
        self.largest = max(self.largest, largest)
        if not largest <= self.tolerance and not self.difference:
            self.difference = f"{where}: {what} differ by {largest:.2g}"


def check_files(folder: Path) -> dict[str, Any]:
    """The manifest, when every file is the one that was packaged."""
    manifest: dict[str, Any] = json.loads((folder / "specstream.json").read_text(encoding="utf-8"))
    for entry in manifest["files"]:
        file = folder / entry["path"]
        if not file.is_file():
            raise ValueError(f"{entry['path']} is missing")
        with open(file, "rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != entry["sha256"]:
                raise ValueError(f"{entry['path']} is not the file that was packaged (another sha256)")
    return manifest


def peak_memory() -> int:
    """Bytes this process has held at most; 0 where the system does not say."""
    status = Path("/proc/self/status")
    if status.is_file() and (match := re.search(r"VmHWM:\s+(\d+) kB", status.read_text(encoding="ascii", errors="replace"))):
        return int(match[1]) * 1024
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def main() -> int:
    parser = argparse.ArgumentParser(description="Drive the package's model and compare with golden.json.")
    parser.add_argument("package", type=Path, nargs="?", default=Path(__file__).resolve().parent)
    parser.add_argument("--traces", type=int, help="drive the first ones only")
    parser.add_argument("--form", choices=["ort", "onnx"], help="of the graphs; left out, the package's own")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--capacity", type=int, help="rows of cache; left out, the package's")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="between log-probabilities")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args()
    try:
        manifest = check_files(given.package)
        golden = json.loads((given.package / "golden.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError) as error:
        print(f"error: {given.package}: {error}", file=sys.stderr)
        return 2
    graphs = [manifest["graph"]]
    if manifest["streams"] and manifest["streams"]["graph"]:
        graphs.append(manifest["streams"]["graph"])
    if given.form:
        graphs = [f"{Path(name).stem}.{given.form}" for name in graphs]
    model = Model(given.package, golden, graphs, given.threads, given.capacity, manifest["contract"]["cache_dtype"])
    results, peak = [], 0
    for trace in golden["traces"][: given.traces]:
        model.logits = trace["sampling"] is not None
        check = Check(trace, given.tolerance)
        generate(model, golden, trace, check)
        peak = peak or peak_memory()
        results.append({"name": trace["name"], "difference": check.difference, "largest": check.largest})
        if not given.json:
            print(f"{trace['name']}: {check.difference or 'same'}")
    if given.json:
        print(json.dumps({"traces": results, "peak_rss_bytes": peak, "onnxruntime": ort.__version__}))
    return 1 if any(result["difference"] for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
