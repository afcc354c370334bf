"""Where drafts come from. A drafter sees token ids and the streams of earlier calls, and returns a tree; it never decides what is right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from specstream.runtimes.tree import FloatArray, IntArray, TokenTree, best_first, root_only


@dataclass(frozen=True, eq=False)
class Streams:
    """The latest streams, as the row of the token at position ``position`` carried them.

    Stream j (from 1) predicts the token j positions after the one that the main stream predicts at that row: position + 1 + j.

    Attributes:
        ids: int64 [γ, k], best first.
        logprobs: float32 [γ, k].
        position: of the token whose row carried them.
        pairs: float32 [γ, k, k], or None: entry [j - 1, a, b] scores candidate b of stream j below candidate a of stream j - 1, see
            :func:`specstream.runtimes.tree.condition`. The first stream has no parent among the candidates: its entries mean nothing.
    """

    ids: IntArray
    logprobs: FloatArray
    position: int
    pairs: FloatArray | None = None


@dataclass(frozen=True, eq=False)
class DraftContext:
    """What a drafter may look at.

    Attributes:
        tokens: the prompt and all tokens emitted so far; the last one is the root of the tree. To be read only: it goes on growing.
        streams: the latest ones, or None when there were none yet.
        budget: rows that the tree may have, the root included.
        max_depth: levels below the root that can still be accepted (what is left to generate limits it).
        least: the probability of a path below which a row is of no use that n likelier ones come before (entry n, the root counted;
            none: all are of use). A drafter that grows its tree from the likeliest row down may end there.
    """

    tokens: Sequence[int]
    streams: Streams | None
    budget: int
    max_depth: int
    least: Sequence[float] = ()

    @property
    def root(self) -> int:
        return self.tokens[-1]

    @property
    def shift(self) -> int:
        """How many streams are used up: depth d draws from stream d + shift.

        0 when the streams come from the last accepted row, d when from its ancestor d levels up, more when from earlier calls.
        """
        # The root is at position len(tokens) - 1, so depth d is at len(tokens) - 1 + d = position + 1 + j.
        return 0 if self.streams is None else len(self.tokens) - 2 - self.streams.position


class Drafter(Protocol):
    """Proposes a tree whose root is ``context.root``. The loop drops what does not fit, so a drafter cannot spoil a text.

    ``uses_streams`` says whether calls should carry stream rows for it.
    """

    @property
    def uses_streams(self) -> bool: ...

    def propose(self, context: DraftContext) -> TokenTree: ...


@dataclass(frozen=True)
class NoDrafter:
    """Plain decoding through the same code."""

    uses_streams: bool = False

    def propose(self, context: DraftContext) -> TokenTree:
        return root_only(context.root)


@dataclass(frozen=True)
class StreamDrafter:
    """The likeliest nodes under the budget, by the streams' calibrated probabilities.

    When the last accepted row carried no streams, those of the nearest row before it that did are used, shifted by the distance;
    when they are used up, the draft is empty (and its root carries streams, so the next one is not).

    Attributes:
        temperatures: one for each stream, see :func:`calibrate`; empty: as they come.
    """

    temperatures: tuple[float, ...] = ()
    uses_streams: bool = True

    def propose(self, context: DraftContext) -> TokenTree:
        streams = remaining_streams(context)
        if streams is None:
            return root_only(context.root)
        temperatures, logprobs = self.temperatures[streams.used :], streams.logprobs
        if any(t != 1.0 for t in temperatures):
            logprobs = calibrate(logprobs, temperatures)
        budget, max_depth = context.budget, context.max_depth
        return best_first(
            context.root, streams.ids, logprobs, budget, max_depth, streams.pairs, streams.root_candidate, least=context.least
        )


@dataclass(frozen=True, eq=False)
class RemainingStreams:
    """Streams that serve the depths below a root: row d - 1 is for depth d. See :class:`Streams`.

    Attributes:
        root_candidate: which candidate of the stream before these the root was; None when there is none or it was none of them.
        used: streams before these, which the text has gone past.
    """

    ids: IntArray
    logprobs: FloatArray
    pairs: FloatArray | None
    root_candidate: int | None
    used: int


def remaining_streams(context: DraftContext) -> RemainingStreams | None:
    """The latest streams without those that are used up; None when nothing is left."""
    streams, shift = context.streams, context.shift
    if streams is None or shift >= len(streams.ids):
        return None
    pairs, root_candidate = streams.pairs, None
    if pairs is not None:
        pairs = pairs[shift:]
        if shift > 0:
            before: list[int] = streams.ids[shift - 1].tolist()
            root_candidate = before.index(context.root) if context.root in before else None
    return RemainingStreams(streams.ids[shift:], streams.logprobs[shift:], pairs, root_candidate, shift)


def calibrate(logprobs: npt.ArrayLike, temperatures: Sequence[float]) -> FloatArray:
    """Log-probabilities at another temperature, when only the top k of each stream are known.

    What is outside the top k counts as one more outcome: q_i = p_i^(1/τ) / (Σ p^(1/τ) + rest^(1/τ)). τ = 1 changes nothing.

    Args:
        logprobs: float [γ, k].
        temperatures: τ of each stream, above 0.
    """
    scaled = np.exp(np.asarray(logprobs, dtype=np.float64))
    rest = np.clip(1.0 - scaled.sum(axis=1, keepdims=True), 0.0, None)
    inverse = 1.0 / np.asarray(temperatures, dtype=np.float64)[:, None]
    scaled, rest = scaled**inverse, rest**inverse
    with np.errstate(divide="ignore"):  # a probability of 0 is -inf: never drafted
        calibrated: FloatArray = np.log(scaled / (scaled.sum(axis=1, keepdims=True) + rest)).astype(np.float32)
    return calibrated
