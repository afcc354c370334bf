"""How many rows a call should have while it runs: drafts as long as they pay, plain decoding where they do not.

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

_EARNED: Final = 0.03  # of a plain call's time: what each plain call may cost more, for trying drafts again
_AT_START: Final = 1.5  # plain calls' time that may be lost before drafts have gained anything
_LARGEST: Final = 8.0  # credit that gains pile up: a good text survives this much of a bad stretch
_CARRIED: Final = 4.0  # of it, for the next text
_FORGET: Final = 0.98  # weight of the past at each drafted call
_TRUST: Final = 4.0  # drafted tokens' worth of belief in a tree's own probabilities


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


def prior_costs(scheme: str) -> CallCosts:
    """Usual costs of bundles of a scheme; those of ``w8a8`` for one that has none of its own."""
    return _PRIORS.get(scheme, PRIOR_COSTS)


class BudgetController(Protocol):
    """What the speculative loop asks before each call, in this order, and tells after it.

    ``budget``: rows at most; 1 is plain decoding, for which no streams are computed. ``least``: where rows come from the likeliest
    down, the probability of a path below which ``trim`` keeps no row that has n before it (entry n; empty: it keeps all), so that
    growing may end there. ``trim``: the part of a tree that is worth its rows. ``record``: what the call
    gave.
    """

    def budget(self) -> int: ...
    def least(self) -> Sequence[float]: ...
    def trim(self, tree: TokenTree) -> TokenTree: ...
    def record(self, rows: int, emitted: int, expected: float) -> None: ...


@dataclass(frozen=True)
class FixedBudget:
    """Always the same, and whole trees."""

    rows: int

    def budget(self) -> int:
        return self.rows

    def least(self) -> Sequence[float]:
        return ()

    def trim(self, tree: TokenTree) -> TokenTree:
        return tree

    def record(self, rows: int, emitted: int, expected: float) -> None:
        pass


class AdaptiveBudget:
    """Follows the measured acceptance, over all texts of a session.

    Whether to draft is an account in units of a plain call's time. A drafted call that emits e tokens and costs c pays in e - c; a
    plain call pays in a little; a call is drafted when the account covers the loss if nothing of it is accepted (two such losses after
    a plain call). So time is never more than (1 + 0.03) x plain decoding's + 1.5 plain calls, over all texts and whatever the drafts
    do, if the costs are right (over one text, + 4, which earlier ones have gained). Where drafts fail, one call in a while tries
    again; where they are good, nothing stands in their way.

    How many rows: those that maximise expected tokens - rate x cost, where the rate is tokens per unit of time lately. This is the
    choice that makes the long-run rate largest (renewal reward; Dinkelbach 1967). The tree's probabilities are corrected by
    how many drafted tokens were accepted lately of those that trees expected.

    Args:
        costs: of calls on this device.
        most: rows of a call at most.
        uses_streams: whether drafts cost what streams cost.
    """

    def __init__(self, costs: CallCosts = PRIOR_COSTS, most: int = 16, uses_streams: bool = True) -> None:
        if most < 1:
            raise UserError(f"budget: {most} given, 1 or more expected")
        self.most = most
        self._costs: list[float] = costs.table(most).tolist()
        self._streams = costs.streams if uses_streams else 0.0
        # Of rows beyond the first n, what one costs on average where that is least.
        of = self._costs
        self._cheapest = [0.0] + [min((of[m] - of[n - 1]) / (m - n + 1) for m in range(n, most)) for n in range(1, most)]
        self._account = _AT_START
        self._accepted = self._promised = _TRUST
        # Tokens and time of drafted calls lately, the root's own token included.
        self._emitted, self._spent = 2.0, 1.0 + self._streams
        self._rows = float(min(4, most))
        self._drafting = True

    @property
    def account(self) -> float:
        """Plain calls' time that may be lost."""
        return self._account

    @property
    def rate(self) -> float:
        """Tokens of drafted calls lately, over their time in plain calls. Plain decoding's is 1."""
        return self._emitted / self._spent

    @property
    def correction(self) -> float:
        """Drafted tokens accepted lately, over those that the trees expected."""
        return self._accepted / self._promised

    def new_text(self) -> None:
        """A text begins. Of what earlier ones gained only so much may be lost in it; its prompt can carry streams."""
        self._account = min(self._account, _CARRIED)
        self._drafting = True

    def budget(self) -> int:
        """Rows of the next call at most; 1 when it should be plain."""
        usual = self._costs[round(self._rows) - 1]
        loss = usual + self._streams - 1.0
        # To begin takes two: streams beside rows serve the call after the one that carries them.
        self._drafting = self.most > 1 and self._account >= (loss if self._drafting else 2.0 * loss)
        return self.most if self._drafting else 1

    def least(self) -> Sequence[float]:
        """Behind n likelier rows, one that is less likely than entry n loses time, however many follow it.

        For :meth:`trim` to keep it and m - 1 others after it, correction · Σ p must exceed rate · Σ cost over these m rows; none of
        them is likelier than the first, so correction · p must exceed rate times the cost of one on average. A little lower, so that
        rounding decides nothing.
        """
        scale = 0.999 * max(self.rate, 1.0) / self._bounded_correction()
        return [scale * cost for cost in self._cheapest]

    def _bounded_correction(self) -> float:
        # Where nothing is accepted any more, a try still needs rows that could be.
        return min(max(self.correction, 0.4), 1.2)

    def trim(self, tree: TokenTree) -> TokenTree:
        """The likeliest rows of a tree, as many as are worth their time."""
        correction, rate = self._bounded_correction(), max(self.rate, 1.0)
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
        if not self._drafting:
            self._account = min(self._account + _EARNED, _LARGEST)
            return
        cost = self._costs[min(rows, self.most) - 1] + self._streams
        self._account = min(self._account + emitted - cost, _LARGEST)
        self._rows += 0.2 * (rows - self._rows)
        self._emitted = _FORGET * self._emitted + emitted
        self._spent = _FORGET * self._spent + cost
        self._accepted = _FORGET * self._accepted + emitted - 1
        self._promised = max(_FORGET * self._promised + expected - 1, 1e-6)
