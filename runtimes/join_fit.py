"""Fits the weights that join draft sources, to recorded texts. Token ids and probabilities; NumPy only, so a device can do it.

The model is the conditional logit of :class:`specstream.runtimes.joined.JoinWeights`; its likelihood is concave, so Newton's method
from any start finds the one best fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from specstream.models.errors import UserError
from specstream.runtimes.drafters import DraftContext, remaining_streams
from specstream.runtimes.joined import LARGEST_WEIGHT, LOOKUP, NGRAMS, PRIOR_WEIGHTS, SMALLEST_REST, STREAMS, JoinWeights, stream_odds
from specstream.runtimes.lookup import LONGEST_MATCH, Matches, SuffixIndex
from specstream.runtimes.ngrams import NgramTable
from specstream.runtimes.replay import Recording

DEEPEST: Final = 12  # levels below a root that are fitted
_REACHED: Final = 0.01  # nodes whose path is less likely seldom enter a tree
_RIDGE: Final = 2.0  # pull to the starting weights, in units of one observation's information

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class JoinFit:
    """Fitted weights and how well they predict.

    Attributes:
        nodes: that they were fitted to.
        loss: mean -log p of what followed, in nats.
        loss_before: the same with the weights that the fit started from.
    """

    weights: JoinWeights
    nodes: int
    loss: float
    loss_before: float


def fit_join(
    recordings: Sequence[Recording],
    *,
    fold: Sequence[int] | None = None,
    use_lookup: bool = True,
    ngrams: NgramTable | None = None,
    temperatures: tuple[float, ...] = (),
    start: JoinWeights = PRIOR_WEIGHTS,
) -> JoinFit:
    """Weights under which what really followed is likeliest, at nodes of the true path that a tree would reach.

    Args:
        recordings: texts with their streams, of prompts like those to come. An n-gram table must not have been built from them.
        fold: see :class:`specstream.runtimes.lookup.SuffixIndex`.
        use_lookup: whether prompt lookup is among the sources.
        ngrams: the task's table, if it is.
        start: weights that a source keeps about which the recordings say nothing.

    Raises:
        UserError: no recorded tokens.
    """
    gamma = max((len(s.ids) for r in recordings for s in r.streams if s is not None), default=len(start.streams))
    order = ngrams.order if ngrams is not None else len(start.ngrams)
    layout = _Layout(gamma, order)
    vector = layout.vector(start)
    nodes: list[_Node] = []
    for recording in recordings:
        nodes += _nodes(recording, layout, fold, use_lookup, ngrams, temperatures)
    if not nodes:
        raise UserError("there are no recorded tokens to fit draft sources to; give more prompts or longer texts")
    first = vector
    loss_before = 0.0
    for _ in range(2):  # which nodes a tree reaches depends on the weights
        reached = _reached(nodes, vector)
        batch = _batch([node for node, is_reached in zip(nodes, reached, strict=True) if is_reached], len(vector))
        loss_before = _loss(batch, first)
        vector = _newton(batch, first)
    return JoinFit(layout.weights(vector), len(batch.truth), _loss(batch, vector), loss_before)


class _Layout:
    """Where each weight is in a vector."""

    def __init__(self, gamma: int, order: int) -> None:
        self.gamma, self.order = gamma, order
        self.ngrams = gamma
        self.lookup = gamma + order
        self.share = self.lookup + LONGEST_MATCH
        self.no_stream, self.no_ngram, self.bias = self.share + 1, self.share + 2, self.share + 3

    def vector(self, weights: JoinWeights) -> Array:
        def stretched(values: tuple[float, ...], count: int) -> list[float]:
            return [values[min(i, len(values) - 1)] for i in range(count)]

        streams, ngrams = stretched(weights.streams, self.gamma), stretched(weights.ngrams, self.order)
        return np.array([*streams, *ngrams, *weights.lookup, weights.share, weights.no_stream, weights.no_ngram, *weights.bias])

    def weights(self, vector: Array) -> JoinWeights:
        values = [round(float(v), 4) for v in np.clip(vector, -LARGEST_WEIGHT, LARGEST_WEIGHT)]
        return JoinWeights(
            streams=tuple(values[: self.ngrams]),
            ngrams=tuple(values[self.ngrams : self.lookup]),
            lookup=tuple(values[self.lookup : self.share]),
            share=values[self.share],
            no_stream=values[self.no_stream],
            no_ngram=values[self.no_ngram],
            bias=tuple(values[self.bias :]),
        )


@dataclass(frozen=True)
class _Node:
    """A node of the true path: features of each candidate (position in the weights, value), which candidate followed (-1: none of
    them), and levels below the root."""

    features: list[dict[int, float]]
    truth: int
    depth: int


def _nodes(
    recording: Recording,
    layout: _Layout,
    fold: Sequence[int] | None,
    use_lookup: bool,
    ngrams: NgramTable | None,
    temperatures: tuple[float, ...],
) -> list[_Node]:
    index = SuffixIndex(fold) if use_lookup else None
    text = list(recording.prompt_ids)
    nodes = []
    for root, streams in enumerate(recording.streams):
        text.append(recording.tokens[root])
        context = DraftContext(text, streams, 2, DEEPEST)
        remaining = remaining_streams(context)
        levels: list[list[int]] = []
        candidate, used = None, 0
        if remaining is not None:
            levels, candidate, used = remaining.ids.tolist(), remaining.root_candidate, remaining.used
            free, given = stream_odds(remaining, temperatures)
        matches: Matches = []
        if index is not None:
            index.update(text)
            matches = index.root_matches()
        following = recording.tokens[root + 1 : root + 1 + DEEPEST]
        for depth, token in enumerate(following):
            features: dict[int, dict[int, float]] = {}
            grams = None if ngrams is None else ngrams.following((*text[-ngrams.order :], *following[:depth]))
            found = index.continuations(matches) if index is not None else []
            has_streams = depth < len(levels)
            if has_streams:
                scores = (free[depth] if given is None or candidate is None else given[depth][candidate]).tolist()
                for name, score in zip(levels[depth], scores, strict=True):
                    if np.isfinite(score):
                        features[name] = {depth + used: score}
            if grams is not None:
                rest = np.log(max(grams.rest, SMALLEST_REST))
                for name, logprob in zip(grams.tokens, grams.logprobs, strict=True):
                    features.setdefault(name, {})[layout.ngrams + grams.order - 1] = logprob - rest
            for continuation in found:
                own = features.setdefault(continuation.token, {})
                own[layout.lookup + continuation.length - 1] = 1.0
                own[layout.share] = float(np.log(continuation.share))
            sources = has_streams * STREAMS + (grams is not None) * NGRAMS + bool(found) * LOOKUP
            for own in features.values():
                own[layout.bias + sources - 1] = 1.0
                if has_streams and not any(i < layout.ngrams for i in own):
                    own[layout.no_stream] = -1.0
                if grams is not None and not any(layout.ngrams <= i < layout.lookup for i in own):
                    own[layout.no_ngram] = -1.0
            names = list(features)
            nodes.append(_Node(list(features.values()), names.index(token) if token in features else -1, depth))
            if not names:
                break  # nothing can grow below
            candidate = levels[depth].index(token) if has_streams and token in levels[depth] else None
            if index is not None:
                matches = index.child_matches(matches, following[: depth + 1])
    return nodes


@dataclass(frozen=True)
class _Batch:
    """Nodes as arrays: features float32 [nodes, candidates + 1, weights] (the last candidate is the rest, all zeros), which candidates
    there are, and which followed."""

    features: npt.NDArray[np.float32]
    there: npt.NDArray[np.bool_]
    truth: npt.NDArray[np.int64]


def _batch(nodes: list[_Node], size: int) -> _Batch:
    width = max(len(node.features) for node in nodes) + 1
    features = np.zeros((len(nodes), width, size), dtype=np.float32)
    there = np.zeros((len(nodes), width), dtype=np.bool_)
    truth = np.zeros(len(nodes), dtype=np.int64)
    for i, node in enumerate(nodes):
        for c, own in enumerate(node.features):
            for weight, value in own.items():
                features[i, c, weight] = value
        there[i, : len(node.features)] = True
        truth[i] = node.truth if node.truth >= 0 else width - 1
    there[:, -1] = True
    return _Batch(features, there, truth)


def _probabilities(batch: _Batch, vector: Array) -> Array:
    scores = batch.features @ vector.astype(np.float32)
    scores[~batch.there] = -np.inf
    odds = np.exp(scores.astype(np.float64) - scores.max(axis=1, keepdims=True))
    shares: Array = odds / odds.sum(axis=1, keepdims=True)
    return shares


def _loss(batch: _Batch, vector: Array) -> float:
    p = _probabilities(batch, vector)[np.arange(len(batch.truth)), batch.truth]
    return float(-np.log(np.maximum(p, 1e-12)).mean())


def _newton(batch: _Batch, start: Array, steps: int = 12) -> Array:
    """Minimises the loss's sum + ridge · |w - start|² / 2."""
    vector = start.copy()
    rows = np.arange(len(batch.truth))
    for _ in range(steps):
        p = _probabilities(batch, vector).astype(np.float32)
        mean = np.einsum("nc,ncf->nf", p, batch.features)
        gradient = (mean - batch.features[rows, batch.truth]).sum(axis=0, dtype=np.float64) + _RIDGE * (vector - start)
        flat = batch.features.reshape(-1, batch.features.shape[2])
        hessian = (flat * p.reshape(-1, 1)).T @ flat - mean.T @ mean + _RIDGE * np.eye(len(vector))
        step = np.linalg.solve(hessian.astype(np.float64), gradient)
        # Far from the optimum a whole step can overshoot.
        step *= min(1.0, 2.0 / max(float(np.abs(step).max()), 1e-12))
        vector = vector - step
        if np.abs(step).max() < 1e-3:
            break
    return vector


def _reached(nodes: list[_Node], vector: Array) -> list[bool]:
    """Whether the true path to each node is likely enough to be in a tree."""
    reached: list[bool] = []
    path: Any = 1.0
    for node in nodes:
        if node.depth == 0:
            path = 1.0
        reached.append(path >= _REACHED)
        if node.truth < 0 or path < _REACHED:
            path = 0.0
            continue
        scores = np.array([sum(vector[w] * v for w, v in own.items()) for own in node.features])
        largest = max(0.0, scores.max())
        path *= np.exp(scores[node.truth] - largest) / (np.exp(-largest) + np.exp(scores - largest).sum())
    return reached
