"""Drafters that stand for every way of being right, wrong or broken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specstream.runtimes.drafters import DraftContext
from specstream.runtimes.tree import TokenTree, chain, root_only


@dataclass(frozen=True)
class Knowing:
    """Knows the true text: ``prompt`` and what follows."""

    truth: Sequence[int]
    uses_streams: bool = False

    def ahead(self, context: DraftContext, count: int) -> list[int]:
        assert list(context.tokens) == list(self.truth[: len(context.tokens)])
        return list(self.truth[len(context.tokens) : len(context.tokens) + count])


class AlwaysRight(Knowing):
    def propose(self, context: DraftContext) -> TokenTree:
        return chain(context.root, self.ahead(context, min(context.budget - 1, context.max_depth)))


class AlwaysWrong(Knowing):
    def propose(self, context: DraftContext) -> TokenTree:
        wrong = [token ^ 1 for token in self.ahead(context, min(context.budget - 1, context.max_depth))]
        return chain(context.root, wrong)


class OverBudget(Knowing):
    """The right chain, but longer than allowed, beside a crowd of others."""

    def propose(self, context: DraftContext) -> TokenTree:
        right = self.ahead(context, context.budget + 5)
        tree = chain(context.root, right)
        crowd = 3 * context.budget
        return TokenTree(
            tokens=np.append(tree.tokens, np.arange(crowd) % 7),
            parents=np.append(tree.parents, np.arange(crowd) % len(tree)).astype(np.int32),
            logprob=np.append(tree.logprob, np.full(crowd, -1.0)).astype(np.float32),
        )


@dataclass(frozen=True)
class Randomly(Knowing):
    """Random trees in which the true next tokens are often among the nodes, at any row."""

    seed: int = 0
    uses_streams: bool = False

    def propose(self, context: DraftContext) -> TokenTree:
        rng = np.random.default_rng([self.seed, len(context.tokens)])
        ahead = self.ahead(context, 8)
        rows = int(rng.integers(1, context.budget + 1))
        parents, depth = [-1], [0]
        for row in range(1, rows):
            parents.append(int(rng.integers(max(0, row - 3), row)))
            depth.append(depth[parents[-1]] + 1)
        tokens = [context.root] + [ahead[d - 1] if d <= len(ahead) and rng.random() < 0.6 else int(rng.integers(0, 40)) for d in depth[1:]]
        logprob = -np.cumsum(rng.random(rows))
        return TokenTree(np.array(tokens), np.array(parents, dtype=np.int32), logprob.astype(np.float32))


@dataclass(frozen=True)
class Empty:
    uses_streams: bool = False

    def propose(self, context: DraftContext) -> TokenTree:
        return root_only(context.root)


@dataclass(frozen=True)
class Broken(Knowing):
    """A right chain, then spoilt by ``spoil``."""

    spoil: Callable[[dict[str, Any]], None] = lambda arrays: None
    uses_streams: bool = False

    def propose(self, context: DraftContext) -> TokenTree:
        tree = chain(context.root, [*self.ahead(context, 4), 1, 2])
        arrays: dict[str, Any] = {"tokens": tree.tokens.copy(), "parents": tree.parents.copy(), "logprob": tree.logprob.copy()}
        self.spoil(arrays)
        return TokenTree(**arrays)


def _outside(arrays: dict[str, Any]) -> None:
    arrays["tokens"][2:] = [-1, 40, 2**40, -(2**50), 41][: len(arrays["tokens"]) - 2]


def _forward_parents(arrays: dict[str, Any]) -> None:
    arrays["parents"][1:] = np.arange(2, len(arrays["parents"]) + 1)


def _cycle(arrays: dict[str, Any]) -> None:
    arrays["parents"][1:] = np.arange(1, len(arrays["parents"]))


def _negative_parents(arrays: dict[str, Any]) -> None:
    arrays["parents"][1:] = -1


def _other_root(arrays: dict[str, Any]) -> None:
    arrays["tokens"][0] += 1


def _short_parents(arrays: dict[str, Any]) -> None:
    arrays["parents"] = arrays["parents"][:-1]


def _nothing(arrays: dict[str, Any]) -> None:
    arrays.update(tokens=np.zeros(0, dtype=np.int64), parents=np.zeros(0, dtype=np.int32), logprob=np.zeros(0, dtype=np.float32))


def _floats(arrays: dict[str, Any]) -> None:
    arrays["tokens"] = arrays["tokens"] + 0.5


def _two_dimensions(arrays: dict[str, Any]) -> None:
    arrays.update({name: array[None] for name, array in arrays.items()})


def _no_numbers(arrays: dict[str, Any]) -> None:
    arrays["logprob"][:] = np.nan


def _impossible_probabilities(arrays: dict[str, Any]) -> None:
    arrays["logprob"] = np.linspace(500, 1000, len(arrays["logprob"]))


def _twins(arrays: dict[str, Any]) -> None:
    for name in arrays:
        arrays[name] = np.repeat(arrays[name], 2)[1:]
    arrays["parents"][:] = [-1, *(0,) * (len(arrays["parents"]) - 1)]


SPOILS = (
    _outside,
    _forward_parents,
    _cycle,
    _negative_parents,
    _other_root,
    _short_parents,
    _nothing,
    _floats,
    _two_dimensions,
    _no_numbers,
    _impossible_probabilities,
    _twins,
)
