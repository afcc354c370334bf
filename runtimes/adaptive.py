"""How many rows a call should have while it runs, and whether streams pay: drafts as long as they do, plain decoding where they do not.

Pure arithmetic on what each call cost and gave, in units of a plain call's time; knows no clock, no session and no text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from specstream.models.errors import UserError
from specstream.runtimes.tree import TokenTree, likeliest_rows, path_probabilities

# Plain calls' time that streams and rows without streams may lose: before drafts have gained anything, of what earlier texts gained, and
# more for each call without streams, so that they are tried again.
_AT_START: Final = (1.5, 0.5)
_CARRIED: Final = (2.5, 1.0)
_EARNED: Final = (0.02, 0.01)
_LARGEST: Final = 8.0  # credit that gains pile up: a good text survives this much of a bad stretch
_FORGET: Final = 0.98  # weight of the past at each call
_TRUST: Final = 4.0  # drafted tokens' worth of belief in a tree's own probabilities
_STREAMS_AT_START: Final = (6.0, 3.0)  # tokens and time that stand for what streams give until they have shown it
_OTHERS_AT_START: Final = (3.0, 3.0)  # and for what other drafts give
_COMPARE: Final = (8, 64)  # calls of the better kind before the other one is tried: at first and, doubling, at most


@dataclass(frozen=True)
class CallCosts:
    """Time of a call relative to one with one row and no streams.

    Attributes:
        rows: numbers of rows that were measured, ascending from 1.
        costs: of a call with each, the first one 1; between them linear, beyond the last as between the last two.
        streams: what streams add to a call: their own pass, or rows beside it.
    """

    rows: tuple[int, ...]
    costs: tuple[float, ...]
    streams: float

    def __post_init__(self) -> None:
        problems = []
        if not self.rows or self.rows[0] != 1 or any(a >= b for a, b in zip(self.rows, self.rows[1:], strict=False)):
            problems.append(f"rows {list(self.rows)} do not ascend from 1")
        if len(self.costs) != len(self.rows):
            problems.append(f"{len(self.costs)} costs for {len(self.rows)} numbers of rows")
        if not all(0 < cost < float("inf") for cost in self.costs) or not 0 <= self.streams < float("inf"):
            problems.append("costs must be positive numbers")
        if problems:
            raise UserError(f"call costs: {'; '.join(problems)}")

    def table(self, most: int) -> npt.NDArray[np.float64]:
        """float64 [most]: cost of 1, 2, ... rows. More rows never cost less: measured dips are noise."""
        wanted = np.arange(1, most + 1, dtype=np.float64)
        known, costs = np.array(self.rows, dtype=np.float64), np.maximum.accumulate(np.array(self.costs) / self.costs[0])
        slope = (costs[-1] - costs[-2]) / (known[-1] - known[-2]) if len(known) > 1 else 0.0
        found: npt.NDArray[np.float64] = np.interp(wanted, known, costs) + np.maximum(wanted - known[-1], 0.0) * slope
        return found


# Of SmolLM2-135M on two x86-64 cores, for devices that were never measured: what a row costs depends on the kernels that a scheme uses.
_PRIOR_ROWS: Final = (1, 2, 4, 6, 8, 12, 16, 24)
_PRIORS: Final = {
    "fp32": CallCosts(_PRIOR_ROWS, (1.0, 1.07, 1.2, 1.3, 1.43, 1.6, 1.78, 2.11), streams=0.46),
    "int4": CallCosts(_PRIOR_ROWS, (1.0, 1.07, 1.39, 1.74, 2.05, 2.62, 3.16, 4.3), streams=0.68),
    "int8": CallCosts(_PRIOR_ROWS, (1.0, 1.15, 1.38, 1.6, 1.8, 2.2, 2.6, 3.4), streams=0.7),
    "w8a8": CallCosts(_PRIOR_ROWS, (1.0, 1.0, 1.15, 1.27, 1.42, 1.53, 1.7, 1.95), streams=0.43),
}
PRIOR_COSTS: Final = _PRIORS["w8a8"]


# What a row and the streams' pass add costs more by these with an int8 cache: its attention is slower for several rows.
_INT8_CACHE: Final = (1.6, 1.3)


def prior_costs(scheme: str, cache_dtype: str = "float32") -> CallCosts:
    """Usual costs of bundles of a scheme; those of ``w8a8`` for one that has none of its own."""
    known = _PRIORS.get(scheme, PRIOR_COSTS)
    if cache_dtype != "int8":
        return known
    rows, streams = _INT8_CACHE
    return CallCosts(known.rows, tuple(1.0 + rows * (cost - 1.0) for cost in known.costs), streams * known.streams)


class BudgetController(Protocol):
    """What the speculative loop asks before each call, in this order, and tells after it.

    ``budget``: rows at most; 1 is plain decoding. ``streams``: whether streams are to be computed for it, after ``budget``; without them a
    drafter has its other sources. ``least``: where rows come from the likeliest down, the probability of a path below which ``trim``
    keeps no row that has n before it (entry n; empty: it keeps all), so that growing may end there. ``trim``: the part of a tree that is
    worth its rows. ``record``: what the call gave.
    """

    def budget(self) -> int: ...
    def streams(self) -> bool: ...
    def least(self) -> Sequence[float]: ...
    def trim(self, tree: TokenTree) -> TokenTree: ...
    def record(self, rows: int, emitted: int, expected: float) -> None: ...


@dataclass(frozen=True)
class FixedBudget:
    """Always the same, and whole trees."""

    rows: int

    def budget(self) -> int:
        return self.rows

    def streams(self) -> bool:
        return self.rows > 1

    def least(self) -> Sequence[float]:
        return ()

    def trim(self, tree: TokenTree) -> TokenTree:
        return tree

    def record(self, rows: int, emitted: int, expected: float) -> None:
        pass


class _Kind:
    """What calls of one kind, with streams or without, gave lately."""

    def __init__(self, emitted: float, spent: float) -> None:
        self.accepted = self.promised = _TRUST
        # Tokens, the root's own included, and time.
        self.emitted, self.spent = emitted, spent

    @property
    def rate(self) -> float:
        """Tokens over time in plain calls. Plain decoding's is 1."""
        return self.emitted / self.spent

    @property
    def correction(self) -> float:
        """Drafted tokens accepted, over those that the trees expected."""
        return self.accepted / self.promised

    @property
    def bounded_correction(self) -> float:
        # Where nothing is accepted any more, a try still needs rows that could be.
        return min(max(self.correction, 0.4), 1.2)

    def record(self, emitted: int, cost: float, expected: float) -> None:
        self.emitted = _FORGET * self.emitted + emitted
        self.spent = _FORGET * self.spent + cost
        self.accepted = _FORGET * self.accepted + emitted - 1
        self.promised = max(_FORGET * self.promised + expected - 1, 1e-6)


class AdaptiveBudget:
    """Follows the measured acceptance, over all texts of a session.

    There are two kinds of calls. One has streams, which cost a pass or rows of their own. The other drafts from what costs nothing but the
    rows that are verified: the prompt, what was written so far, a table of n-grams; without rows that pay, it is plain decoding.

    Streams are used when they emit more tokens in their time than calls without them, lately. Once in a while calls of the other kind are
    tried, so that what they give is known.

    Two accounts, of streams and of rows without streams, in units of a plain call's time bound what can be lost. A call that emits e tokens
    and costs c pays e - c into its own; what one without streams gains is shared between both, and it pays a little into each. A call has
    streams only if their account covers the loss should nothing be accepted (two such losses once it did not), and without them no more
    rows than the other covers. So time is never more than 1.03 x plain decoding's + 2 plain calls, over all texts and whatever the drafts
    do, if the costs are right (over one text, + 3.5, which earlier ones have gained), beside what rows that are always allowed cost.
    Where drafts fail, one call in a while tries again; where they are good, nothing stands in their way.

    Which of the rows: those that maximise expected tokens - rate x cost, where the rate is tokens per unit of time lately of calls of this
    kind. This is the choice that makes the long-run rate largest (renewal reward; Dinkelbach 1967). The tree's probabilities are
    corrected by how many drafted tokens were accepted lately of those that trees expected.

    Args:
        costs: of calls on this device.
        most: rows of a call at most.
        uses_streams: whether the drafter has streams; else all calls are of the other kind.
        at_least: rows that a call may always have: one, or two where a second row costs little beside what a draft in it may find.
            Fewer are reckoned to cost as much, so they are never chosen to save time; a call for which nothing was drafted is cheaper.
    """

    def __init__(self, costs: CallCosts = PRIOR_COSTS, most: int = 16, uses_streams: bool = True, at_least: int = 1) -> None:
        if most < 1:
            raise UserError(f"budget: {most} given, 1 or more expected")
        self.most = most
        of: list[float] = costs.table(most).tolist()
        self._costs = [max(cost, of[min(at_least, most) - 1]) for cost in of]
        self._streams = costs.streams
        # Of rows beyond the first n, what one costs on average where that is least.
        of = self._costs
        self._cheapest = [0.0] + [min((of[m] - of[n - 1]) / (m - n + 1) for m in range(n, most)) for n in range(1, most)]
        self._uses_streams = uses_streams and most > 1
        self._account, self._other_account = _AT_START
        self._with, self._without = _Kind(*_STREAMS_AT_START), _Kind(*_OTHERS_AT_START)
        self._rows = float(min(4, most))
        self._streaming = self._covered = self._uses_streams
        self._since, self._compare = 0, _COMPARE[0]  # calls since the other kind was tried, and how many there may be
        self._trying = 0  # calls of the other kind still to come

    @property
    def account(self) -> float:
        """Plain calls' time that may be lost by streams."""
        return self._account

    @property
    def _kind(self) -> _Kind:
        return self._with if self._streaming else self._without

    @property
    def rate(self) -> float:
        """Tokens of calls of the present kind lately, over their time in plain calls. Plain decoding's is 1."""
        return self._kind.rate

    @property
    def correction(self) -> float:
        """Drafted tokens accepted lately, over those that the trees expected, in calls of the present kind."""
        return self._kind.correction

    def new_text(self) -> None:
        """A text begins. Of what earlier ones gained only so much may be lost in it; its prompt can carry streams."""
        self._account, self._other_account = min(self._account, _CARRIED[0]), min(self._other_account, _CARRIED[1])
        self._streaming = self._covered = self._uses_streams

    def budget(self) -> int:
        """Rows of the next call at most."""
        loss = self._costs[round(self._rows) - 1] + self._streams - self._costs[0]
        # To begin takes two: streams beside rows serve the call after the one that carries them.
        self._covered = self._account >= (loss if self._covered else 2.0 * loss)
        better = self._with.rate >= self._without.rate
        # The faster streams are, the less likely it is that others beat them.
        due = self._since >= self._compare * max(self._with.rate, 1.0) ** 2
        if not self._trying and due and (better or self._covered):
            self._trying = 2
            self._since, self._compare = 0, min(2 * self._compare, _COMPARE[1])
        self._streaming = self._uses_streams and self._covered and better != (self._trying > 0)
        if self._streaming:
            return self.most
        affordable = self._costs[0] + max(self._other_account, 0.0)
        return sum(cost <= affordable for cost in self._costs)

    def streams(self) -> bool:
        """Whether the next call's drafts are to have streams."""
        return self._streaming

    def least(self) -> Sequence[float]:
        """Behind n likelier rows, one that is less likely than entry n loses time, however many follow it.

        For :meth:`trim` to keep it and m - 1 others after it, correction · Σ p must exceed rate · Σ cost over these m rows; none of
        them is likelier than the first, so correction · p must exceed rate times the cost of one on average. A little lower, so that
        rounding decides nothing.
        """
        kind = self._kind
        scale = 0.999 * max(kind.rate, 1.0) / kind.bounded_correction
        return [scale * cost for cost in self._cheapest]

    def trim(self, tree: TokenTree) -> TokenTree:
        """The likeliest rows of a tree, as many as are worth their time."""
        kind = self._kind
        correction, rate = kind.bounded_correction, max(kind.rate, 1.0)
        rows, best, expected = 0, -math.inf, 0.0
        for row, (probability, cost) in enumerate(zip(sorted(path_probabilities(tree), reverse=True), self._costs, strict=False), 1):
            expected += probability
            gain = correction * expected - rate * cost
            if gain > best:
                rows, best = row, gain
        return tree if rows >= len(tree) else likeliest_rows(tree, rows)

    def record(self, rows: int, emitted: int, expected: float) -> None:
        """Tell what the call after :meth:`budget` gave.

        Args:
            rows: that it had.
            emitted: tokens, the correction included.
            expected: tokens, by the verified tree's own probabilities.
        """
        cost = self._costs[min(rows, self.most) - 1] + (self._streams if self._streaming else 0.0)
        # What rows that are always allowed cost more than one is neither saved nor lost here.
        gained = emitted - cost + self._costs[0] - 1.0
        if self._streaming:
            self._account = min(self._account + gained, _LARGEST)
            self._rows += 0.2 * (rows - self._rows)
        else:
            self._account = min(self._account + max(gained, 0.0) / 2 + _EARNED[0], _LARGEST)
            self._other_account = min(self._other_account + min(gained, gained / 2) + _EARNED[1], _LARGEST)
        self._since += not self._trying
        self._trying = max(self._trying - 1, 0)
        self._kind.record(emitted, cost, expected)
