"""Exact seeded sampling: which token follows is a function of the logits, the seed and the token's position, and of nothing else.

The token at absolute position p is the argmax of scaled logits + Gumbel noise over the tokens that the filters leave (Gumbel-max; Maddison
et al., arXiv 1411.0030), and the noise belongs to (seed, p, token id). So any drafter gives the text of plain decoding: a drafted token is
accepted when it is the one that would have been sampled in its place.

``docs/sampling.md`` says the same for one token at a time, so that a loop in another language agrees bit for bit. For that, all is float64
arithmetic of +, -, ·, / alone: the logarithm and the exponential of the platform differ in their last bits from one to another.

Knows logits and token ids; nothing of trees, sessions or text.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from specstream.models.errors import UserError
from specstream.runtimes.manifest import decode

Float64Array = npt.NDArray[np.float64]
WordArray = npt.NDArray[np.uint32]

LOWEST_TEMPERATURE: Final = 1e-4  # below it, scaled logits are so large that noise drowns in their rounding
_LN2: Final = 0.6931471805599453
_SQRT_HALF: Final = 0.7071067811865476
_SLACK: Final = 1e-6  # of bounds, against rounding
NOISE_SPREAD: Final = 26.01  # the largest noise less the smallest: 33 · log 2 + log(33 · log 2) = 26.004


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. The steps come in this order; the defaults of all but the temperature change nothing.

    Attributes:
        repetition_penalty: divides positive logits of tokens in the prompt or the text, multiplies negative ones; 1: none.
        frequency_penalty: subtracted from a token's logit as often as it was generated; 0: none.
        presence_penalty: subtracted once if it was generated; 0: none.
        temperature: divides logits. 0: the largest logit wins, without filters and noise.
        top_k: keep the k largest logits, and those equal to the smallest of them; 0: all.
        top_p: keep the smallest number of likeliest tokens whose probabilities sum to this share, and those as likely as the last.
        min_p: keep tokens at least this likely, in relation to the likeliest; 0: all.
        seed: of the noise, 64 bits. The same seed gives the same text.

    Raises:
        UserError: values outside their ranges, all problems at once.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        # (name, expected, whether it is so); no comparison with NaN holds. The outer bounds keep scaled logits finite.
        rules: tuple[tuple[str, str, Callable[[float], bool]], ...] = (
            ("temperature", f"0 for greedy, or {LOWEST_TEMPERATURE} to 10000", lambda x: x == 0 or LOWEST_TEMPERATURE <= x <= 1e4),
            ("top_k", "a whole number, 0 for no limit", lambda x: isinstance(x, int) and x >= 0),
            ("top_p", "above 0, at most 1", lambda x: 0 < x <= 1),
            ("min_p", "0 to 1", lambda x: 0 <= x <= 1),
            ("repetition_penalty", "0.01 to 100, 1 for none", lambda x: 0.01 <= x <= 100),
            ("presence_penalty", "-100 to 100, 0 for none", lambda x: -100 <= x <= 100),
            ("frequency_penalty", "-100 to 100, 0 for none", lambda x: -100 <= x <= 100),
            ("seed", "a whole number of 64 bits, from 0", lambda x: isinstance(x, int) and 0 <= x < 1 << 64),
        )
        problems = []
        for name, expected, holds in rules:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not holds(value):
                problems.append(f"{name} is {value!r}, expected {expected}")
        if problems:
            raise UserError(f"sampling: {'; '.join(problems)}")

    @property
    def penalises(self) -> bool:
        """Whether the choice depends on the tokens before it."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def is_greedy(self) -> bool:
        """Whether this is the argmax of the model's own logits, which the graph computes."""
        return self.temperature == 0 and not self.penalises

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Any, source: str = "sampling") -> Sampling:
        """Read what :meth:`to_json` gave.

        Raises:
            UserError: unknown or missing keys, wrong types, or values outside their ranges.
        """
        problems: list[str] = []
        sampling = decode(cls, data, source, problems)
        if problems:
            raise UserError("; ".join(problems))
        assert isinstance(sampling, cls)
        return sampling


def random_seed() -> int:
    """A new seed, of 32 bits: short enough to type again, and exact in JSON read by JavaScript."""
    return secrets.randbits(32)


@dataclass(frozen=True, eq=False)
class History:
    """Tokens before the one to choose, for the penalties: the prompt, and all after it, drafted tokens of its own path included."""

    prompt: Sequence[int] = ()
    generated: Sequence[int] = ()


NO_HISTORY: Final = History()


def pick(logits: npt.ArrayLike, position: int, history: History, sampling: Sampling) -> int:
    """The token at ``position``.

    Args:
        logits: float [V], of the row before it.
        position: absolute, from the beginning of the prompt, of the token that is chosen (one more than the row's own).
        history: may be empty when nothing is penalised.

    Raises:
        ValueError: no logit is a finite number, or one is NaN or infinitely large.
    """
    scaled = scale(logits, history, sampling)
    if sampling.temperature == 0:
        return int(scaled.argmax())
    allowed = np.flatnonzero(scaled >= smallest_allowed(scaled, sampling))
    return _winner(allowed, scaled[allowed], position, sampling.seed)


def scores(logits: npt.ArrayLike, position: int, history: History, sampling: Sampling) -> Float64Array:
    """float64 [V]: what :func:`pick` takes the argmax of; -inf for tokens that a filter drops. Arguments as there."""
    scaled = scale(logits, history, sampling)
    if sampling.temperature == 0:
        return scaled
    noise = gumbel_noise(sampling.seed, position, np.arange(len(scaled)))
    return np.where(scaled >= smallest_allowed(scaled, sampling), scaled + noise, -np.inf)


def scale(logits: npt.ArrayLike, history: History, sampling: Sampling) -> Float64Array:
    """float64 [V]: logits with penalties, divided by the temperature (not by 0).

    The repetition penalty is that of Keskar et al. (arXiv 1909.05858) with the sign rule that transformers and vLLM share; presence and
    frequency are OpenAI's, and count what was generated, not the prompt.

    Raises:
        ValueError: as :func:`pick`.
    """
    scaled = np.array(logits, dtype=np.float64)
    if sampling.repetition_penalty != 1:
        seen = np.unique(np.array([*history.prompt, *history.generated], dtype=np.int64))
        own = scaled[seen]
        scaled[seen] = np.where(own > 0, own / sampling.repetition_penalty, own * sampling.repetition_penalty)
    if sampling.presence_penalty or sampling.frequency_penalty:
        seen, counts = np.unique(np.array(history.generated, dtype=np.int64), return_counts=True)
        scaled[seen] = scaled[seen] - counts * sampling.frequency_penalty - sampling.presence_penalty
    if sampling.temperature != 0:
        scaled /= sampling.temperature
    if not math.isfinite(scaled.max()):
        raise ValueError(f"the largest logit is {scaled.max()}: the network's output is broken")
    return scaled


def smallest_allowed(scaled: Float64Array, sampling: Sampling) -> float:
    """The scaled logit from which on top-k, then top-p of what that left, then min-p keep tokens.

    Every filter keeps the largest logits, so all of them together are one bound, and the order of equal logits plays no part.
    """
    largest = float(scaled.max())
    least = -math.inf
    if 0 < sampling.top_k < len(scaled):
        least = float(np.partition(scaled, -sampling.top_k)[-sampling.top_k])
    if sampling.top_p < 1:
        left = scaled[scaled >= least]
        weights = exponential(left - largest)
        least = max(least, _nucleus(left, weights, largest, sampling.top_p * float(np.cumsum(weights)[-1])))
    if sampling.min_p > 0:
        least = max(least, largest + float(logarithm(np.array(sampling.min_p))))
    return least


def _nucleus(scaled: Float64Array, weights: Float64Array, largest: float, share: float) -> float:
    """The scaled logit at which the sum of weights, added up from the largest down, reaches ``share``; -inf when it never does."""
    for depth in (4.0, 16.0, math.inf):  # few tokens make most of the sum: a bound spares sorting the vocabulary
        near = np.flatnonzero(scaled >= largest - depth)
        order = near[np.argsort(-scaled[near], kind="stable")]
        reached = np.flatnonzero(np.cumsum(weights[order]) >= share)
        if len(reached):
            return float(scaled[order[reached[0]]])
    return -math.inf


def _winner(ids: npt.NDArray[np.int64], scaled: Float64Array, position: int, seed: int) -> int:
    """The argmax of ``scaled`` + noise; of equal ones, the lowest id. Noise is computed where it can matter only.

    The likeliest token's score s is a lower bound of the best. A token with scaled logit y needs noise of at least s - y, that is
    -log u <= e^(y - s); since -log u >= 1 - u, it is out when 1 - u > e^(y - s), which its random bits say without a logarithm. As many
    as Σ e^(y - s) are left on average: a handful.
    """
    left = scaled >= scaled.max() - NOISE_SPREAD
    ids, scaled = ids[left], scaled[left]
    bits = random_bits(seed, position, ids)
    top = int(scaled.argmax())
    bound = float(scaled[top]) + float(gumbel(bits[top : top + 1])[0])
    left = 1.0 - uniform(bits) <= np.exp(scaled - bound) * (1.0 + _SLACK)
    ids, scaled, bits = ids[left], scaled[left], bits[left]
    return int(ids[(scaled + gumbel(bits)).argmax()])


def gumbel_noise(seed: int, position: int, ids: npt.NDArray[np.int64]) -> Float64Array:
    """float64 [n]: the noise of each token id at this position."""
    return gumbel(random_bits(seed, position, ids))


def random_bits(seed: int, position: int, ids: npt.NDArray[np.int64]) -> WordArray:
    """uint32 [n]: of each token id, word ``id mod 4`` of Philox4x32-10 (id div 4, position, 0, 0; low and high half of the seed)."""
    blocks = ids >> 2
    used = np.zeros(int(blocks.max(initial=-1)) + 1, dtype=np.bool_)
    used[blocks] = True
    counter = np.zeros((np.count_nonzero(used), 4), dtype=np.uint32)
    counter[:, 0] = np.flatnonzero(used)
    counter[:, 1] = position
    words = philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32))
    found: WordArray = words[(np.cumsum(used) - 1)[blocks], ids & 3]
    return found


def philox4x32(counter: WordArray, key: tuple[int, int]) -> WordArray:
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

    Args:
        counter: uint32 [..., 4].
        key: two words of 32 bits.

    Returns:
        uint32 [..., 4].
    """
    # 64-bit lanes hold the products; every word in them stays below 2^32.
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    c0, c1, c2, c3 = (counter[..., word].astype(np.uint64) for word in range(4))
    k0, k1 = key
    for _ in range(10):
        product0, product1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1 = (product1 >> shift) ^ c1 ^ np.uint64(k0), product1 & low
        c2, c3 = (product0 >> shift) ^ c3 ^ np.uint64(k1), product0 & low
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack((c0, c1, c2, c3), axis=-1).astype(np.uint32)


def uniform(bits: WordArray) -> Float64Array:
    """(bits + 1/2) / 2^32: exact, and never 0 or 1."""
    return (bits.astype(np.float64) + 0.5) * 2.0**-32


def gumbel(bits: WordArray) -> Float64Array:
    """-log(-log u)."""
    return -logarithm(-logarithm(uniform(bits)))


def logarithm(x: Float64Array) -> Float64Array:
    """The natural logarithm of positive normal numbers, to about one unit in the last place.

    x = m · 2^e with m from √½ to √2, and log m = 2 artanh s = 2s (1 + s²/3 + s⁴/5 + ...) with s = (m - 1) / (m + 1): eleven terms.
    """
    m, e = np.frexp(x)
    small = m < _SQRT_HALF
    m, e = np.where(small, 2.0 * m, m), e - small
    s = (m - 1.0) / (m + 1.0)
    square, series = s * s, np.full_like(m, 1.0 / 21.0)
    for k in range(19, 0, -2):
        series = series * square + 1.0 / k
    found: Float64Array = e * _LN2 + 2.0 * s * series
    return found


def exponential(x: Float64Array) -> Float64Array:
    """e^x of numbers that are not positive; 0 below -700.

    x = n log 2 + r with |r| <= log 2 / 2, and e^r = Σ r^k / k! up to k = 13.
    """
    inside = np.maximum(x, -700.0)
    n = np.floor(inside / _LN2 + 0.5)
    r = inside - n * _LN2
    series = np.full_like(r, 1.0 / math.factorial(13))
    for k in range(12, -1, -1):
        series = series * r + 1.0 / math.factorial(k)
    return np.where(x < -700.0, 0.0, np.ldexp(series, n.astype(np.int32)))
