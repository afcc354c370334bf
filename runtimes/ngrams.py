"""A table of what follows what in a task's outputs: n-grams with back-off, in a few hundred KB.

Token ids and probabilities; knows nothing of prompts, trees or tokenizers.
"""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

from specstream.models.errors import UserError

NGRAM_FILE: Final = "ngrams.npz"  # in an adapter's folder and in a bundle
NGRAM_FORMAT: Final = 1
_MULTIPLIER: Final = 0x9E3779B97F4A7C15  # odd, so that a context's hash depends on every token in it
_MASK: Final = (1 << 64) - 1
_STEP: Final = 1 / 16  # of stored log-probabilities: 8 bits reach down to e^-16
_MEMO: Final = 4096  # contexts remembered


@dataclass(frozen=True)
class Following:
    """What may follow a context.

    Attributes:
        order: tokens of the context that the table knew, 1 or more.
        tokens: ids, the likeliest first.
        logprobs: of each; natural logarithm.
        rest: probability of everything else.
    """

    order: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    rest: float


class NgramTable:
    """Candidates after the longest known context. Made by :func:`build_ngrams` or :meth:`load`.

    Attributes:
        order: tokens of the longest context.
        contexts: how many there are.
        vocab_size: token ids are below it.
    """

    def __init__(self, arrays: dict[str, npt.NDArray[Any]]) -> None:
        """``arrays``: as stored, see :meth:`save`."""
        self._arrays = arrays
        self.vocab_size, self.order = int(arrays["header"][1]), int(arrays["header"][2])
        self.contexts = len(arrays["keys"])
        ends = np.cumsum(arrays["counts"], dtype=np.int64)
        self._starts: list[int] = [0, *ends.tolist()]
        self._index: list[dict[int, int]] = []
        first = 0
        for size in arrays["sizes"].tolist():
            keys: list[int] = arrays["keys"][first : first + size].tolist()
            self._index.append(dict(zip(keys, range(first, first + size), strict=True)))
            first += size
        self._memo: dict[tuple[int, ...], tuple[int, int] | None] = {}

    def following(self, context: tuple[int, ...]) -> Following | None:
        """What may follow the tokens ``context`` (the last one last; those before the longest order do not matter).

        None when not even the last token is known.
        """
        found = self.find(context)
        return None if found is None else self.entry(*found)

    def find(self, context: tuple[int, ...]) -> tuple[int, int] | None:
        """How many of the last tokens of ``context`` are the longest known context, and its number among all of the table's."""
        context = context[-self.order :]
        if context in self._memo:
            return self._memo[context]
        hashes = []
        value = 0
        for token in reversed(context):
            value = ((value + token + 1) * _MULTIPLIER) & _MASK
            hashes.append(value >> 32)
        found = None
        for order in range(len(hashes), 0, -1):
            number = self._index[order - 1].get(hashes[order - 1])
            if number is not None:
                found = order, number
                break
        if len(self._memo) >= _MEMO:
            self._memo.clear()
        self._memo[context] = found
        return found

    def entry(self, order: int, number: int) -> Following:
        """What may follow a context that :meth:`find` found."""
        start, end = self._starts[number], self._starts[number + 1]
        logprobs = [steps * -_STEP for steps in self._arrays["logprobs"][start:end].tolist()]
        rest = max(0.0, 1.0 - sum(map(math.exp, logprobs)))
        return Following(order, tuple(self._arrays["tokens"][start:end].tolist()), tuple(logprobs), rest)

    def save(self, file: str | Path | BinaryIO) -> None:
        """Write the table: an .npz of plain arrays.

        ``header`` int64 [3]: format, vocabulary, longest context. ``sizes`` int64 [order]: contexts of each length. ``keys`` uint32
        [contexts]: hashes, by length. ``counts`` uint8 [contexts]: candidates of each. ``tokens`` uint16 or uint32, and ``logprobs``
        uint8 (in steps of -1/16), of all candidates in turn.
        """
        np.savez_compressed(file, allow_pickle=False, **self._arrays)

    @classmethod
    def load(cls, file: Path, vocab_size: int | None = None) -> NgramTable:
        """Read what :meth:`save` wrote.

        Args:
            vocab_size: of the model it is for.

        Raises:
            UserError: no such file, another format, damaged, or made for another vocabulary.
        """
        try:
            with open(file, "rb") as opened, np.load(opened, allow_pickle=False) as stored:
                arrays = {name: stored[name] for name in stored.files}
        except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else "not an n-gram table"
            raise UserError(f"{file}: {reason}; build it again from the task's outputs") from error
        problem = _problem_with(arrays)
        if problem is None and vocab_size is not None and int(arrays["header"][1]) != vocab_size:
            problem = f"made for a vocabulary of {int(arrays['header'][1])} tokens, the model has {vocab_size}"
        if problem is not None:
            raise UserError(f"{file}: not an n-gram table of this model ({problem}); build it again from the task's outputs")
        return cls(arrays)


def build_ngrams(
    sequences: Iterable[Sequence[int]],
    vocab_size: int,
    *,
    order: int = 4,
    candidates: int = 6,
    min_count: int = 2,
    max_contexts: int = 50_000,
) -> NgramTable:
    """Count a task's outputs.

    A context's probabilities are interpolated with those of the context one token shorter, in proportion to how many different
    tokens followed it (Witten and Bell 1991; Chen and Goodman 1999, section 2.3): p_c(b) = (n_c(b) + u p_c-1(b)) / (n_c + u) with u
    different followers. A longer context is kept when its counts gain most bits over the shorter one's probabilities.

    Args:
        sequences: token ids of each output, the stop token included; the last few tokens of the prompt before them help to predict
            the first ones.
        vocab_size: ids are below it.
        order: tokens of the longest context.
        candidates: kept after a context at most.
        min_count: a context that occurs less often is not kept.
        max_contexts: kept at most.

    Raises:
        UserError: no tokens, or ids outside the vocabulary.
    """
    texts = [np.asarray(sequence, dtype=np.int64) for sequence in sequences if len(sequence) > 1]
    if not texts:
        raise UserError("there are no outputs to count; give texts of two tokens or more")
    flat = np.concatenate(texts)
    if flat.min() < 0 or flat.max() >= vocab_size:
        raise UserError(f"the outputs have token {int(flat.min() if flat.min() < 0 else flat.max())}, the vocabulary has {vocab_size}")
    within = np.concatenate([np.arange(len(text)) for text in texts])  # tokens before each one in its own text
    grams = _interpolated(flat, within, vocab_size, order)

    # Single tokens are the back-off of everything and always stay; of longer contexts those that gain most.
    room = max(max_contexts - len(grams[0].starts()), 0)
    gains = np.concatenate([np.where(g.total >= min_count, g.gain, 0.0)[g.starts()] for g in grams[1:]] or [np.zeros(0)])
    least = 1e-9
    if room < np.count_nonzero(gains >= least):
        least = np.nextafter(np.sort(gains)[-room - 1], np.inf)  # of equal ones, none
    packed = [
        _packed(g, (g.gain >= least) & (g.total >= min_count) if length else g.gain > -np.inf, candidates) for length, g in enumerate(grams)
    ]
    arrays: dict[str, npt.NDArray[Any]] = {
        "header": np.array([NGRAM_FORMAT, vocab_size, order], dtype=np.int64),
        "sizes": np.array([len(keys) for keys, _, _, _ in packed], dtype=np.int64),
        "keys": np.concatenate([keys for keys, _, _, _ in packed]),
        "counts": np.concatenate([counts for _, counts, _, _ in packed]),
        "tokens": np.concatenate([tokens for _, _, tokens, _ in packed]).astype(np.uint16 if vocab_size <= 1 << 16 else np.uint32),
        "logprobs": np.concatenate([logprobs for _, _, _, logprobs in packed]),
    }
    return NgramTable(arrays)


@dataclass(frozen=True)
class _Grams:
    """All (context, next token) of one context length, by context: its hash, the token, p(token | context), and of the context how
    often it occurred and how many nats its counts gain over the shorter context's probabilities."""

    context: npt.NDArray[np.uint64]
    token: npt.NDArray[np.int64]
    probability: npt.NDArray[np.float64]
    total: npt.NDArray[np.float64]
    gain: npt.NDArray[np.float64]

    def starts(self) -> npt.NDArray[np.int64]:
        """Where each context's entries begin."""
        return _run_starts(self.context)


def _interpolated(flat: npt.NDArray[np.int64], within: npt.NDArray[np.int64], vocab_size: int, order: int) -> list[_Grams]:
    """Grams with contexts of 1 to ``order`` tokens."""
    hashes = np.zeros(len(flat), dtype=np.uint64)  # of the tokens before each one
    shorter = np.full(len(flat), 1.0 / vocab_size)  # p of each token after one token less, where it stands
    grams = []
    for length in range(order + 1):
        if length:
            before = np.roll(flat, length)  # wraps around only where `within` says that there is no such context
            hashes = (hashes + before.astype(np.uint64) + np.uint64(1)) * np.uint64(_MULTIPLIER)
        valid = np.flatnonzero(within >= length)
        by = valid[np.lexsort((flat[valid], hashes[valid]))]
        context, token = hashes[by], flat[by]
        first = np.unique(np.concatenate((_run_starts(context), _run_starts(token))))  # of runs of equal (context, token)
        count = np.diff(np.append(first, len(by))).astype(np.float64)
        context, token = context[first], token[first]
        starts = _run_starts(context)
        members = np.diff(np.append(starts, len(first)))
        different = np.repeat(members, members).astype(np.float64)
        total = np.repeat(np.add.reduceat(count, starts), members) if len(starts) else count
        lower = shorter[by[first]]  # all occurrences of a gram share their shorter context
        probability = (count + different * lower) / (total + different)
        gain = np.repeat(np.add.reduceat(count * np.log(probability / lower), starts), members) if len(starts) else count
        if length:
            grams.append(_Grams(context, token, probability, total, gain))
        shorter = shorter.copy()
        shorter[by] = np.repeat(probability, count.astype(np.int64))
    return grams


def _packed(
    grams: _Grams, stays: npt.NDArray[np.bool_], candidates: int
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8], npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """Keys, candidates of each, tokens and stored log-probabilities of the contexts that stay, the likeliest tokens first."""
    rows = np.flatnonzero(stays)
    rows = rows[np.lexsort((-grams.probability[rows], grams.context[rows]))]
    context, token, probability = grams.context[rows], grams.token[rows], grams.probability[rows]
    starts = _run_starts(context)
    members = np.diff(np.append(starts, len(context)))
    rank = np.arange(len(context)) - np.repeat(starts, members)
    # A context's best candidate is kept whatever its probability, others when they may matter.
    good = (rank < candidates) & ((probability >= 0.01) | (rank == 0))
    counts = np.bincount(np.repeat(np.arange(len(starts)), members)[good], minlength=len(starts)).astype(np.uint8)
    # Rounded so that candidates never sum to more than 1.
    steps = np.clip(np.ceil(-np.log(probability[good]) / _STEP), 0, 255).astype(np.uint8)
    return (context[starts] >> np.uint64(32)).astype(np.uint32), counts, token[good], steps


def _run_starts(values: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Where runs of equal values begin."""
    if not len(values):
        return np.zeros(0, dtype=np.int64)
    return np.flatnonzero(np.concatenate(([True], values[1:] != values[:-1]))).astype(np.int64)


def _problem_with(arrays: dict[str, npt.NDArray[Any]]) -> str | None:
    kinds = {"header": "i", "sizes": "i", "keys": "u", "counts": "u", "tokens": "u", "logprobs": "u"}
    if set(arrays) != set(kinds):
        return f"it has the arrays {', '.join(sorted(arrays))}; {', '.join(kinds)} expected"
    wrong = [name for name, kind in kinds.items() if arrays[name].ndim != 1 or arrays[name].dtype.kind != kind]
    if wrong:
        return f"{', '.join(wrong)} of another type"
    header = arrays["header"].tolist()
    if len(header) != 3 or header[0] != NGRAM_FORMAT:
        return f"its format is {header[0] if header else 'missing'}; {NGRAM_FORMAT} expected"
    sizes, tokens = arrays["sizes"], arrays["tokens"]
    if header[2] < 1 or len(sizes) != header[2] or (sizes < 0).any() or int(sizes.sum()) != len(arrays["keys"]):
        return "its contexts do not add up"
    if len(arrays["counts"]) != len(arrays["keys"]) or int(arrays["counts"].sum()) != len(tokens) or len(tokens) != len(arrays["logprobs"]):
        return "its candidates do not add up"
    if len(tokens) and int(tokens.max()) >= header[1]:
        return "it names tokens outside its vocabulary"
    return None
