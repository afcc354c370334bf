"""One tree from several draft sources that cost no rows of the network: streams, prompt lookup, task n-grams.

At every node the sources say what may follow it; a conditional logit joins them into one distribution, by which the tree grows.
Knows token ids and probabilities; nothing of text.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from specstream.models.errors import UserError
from specstream.runtimes.drafters import DraftContext, RemainingStreams, remaining_streams
from specstream.runtimes.lookup import LONGEST_MATCH, Matches, SuffixIndex
from specstream.runtimes.ngrams import NgramTable
from specstream.runtimes.tree import FloatArray, TokenTree, grown_tree

SMALLEST_REST: Final = 0.01  # so that odds stay finite when a source is sure
LARGEST_WEIGHT: Final = 20.0
STREAMS, NGRAMS, LOOKUP = 1, 2, 4  # bits that say which sources have something to say at a node
_NARROW: Final = 1e-3  # children less likely than this are not worth a row
_LARGEST: Final = 50.0  # of a score, so that its exponential stays a number
_MEMO: Final = 4096  # entries of the n-gram table remembered


@dataclass(frozen=True)
class JoinWeights:
    """How much each source's word counts: the coefficients of a conditional logit (McFadden 1974).

    The candidates at a node are those that any source names; what none of them names is one more outcome with the score 0. A
    candidate's score is the sum of

    - ``bias[sources]``, which depends on which sources have anything to say here;
    - streams, if there is one for this depth: ``streams[number] · log(p / rest)``, or ``-no_stream`` if it does not name the candidate;
    - n-grams, if the table knows the context: ``ngrams[order] · log(p / rest)``, or ``-no_ngram``;
    - lookup, if it names the candidate: ``lookup[length] + share · log(share of the matches)``.

    ``rest`` is the probability that the source leaves for what it does not name, at least ``SMALLEST_REST``. The probabilities are the
    softmax of the scores, so they and the rest sum to 1. Fitted by :func:`specstream.runtimes.join_fit.fit_join`.

    Attributes:
        streams: by the stream's number, from 1; the last one also for later streams.
        ngrams: by the context's tokens, from 1; the last one also for longer contexts.
        lookup: by the match's length, 1 to ``LONGEST_MATCH``.
        share: of a continuation among those of its node.
        no_stream: penalty of a candidate that the streams do not name.
        no_ngram: the same for the n-grams.
        bias: by sources: streams, n-grams, both, lookup, lookup and streams, lookup and n-grams, all three.
    """

    streams: tuple[float, ...]
    ngrams: tuple[float, ...]
    lookup: tuple[float, ...]
    share: float
    no_stream: float
    no_ngram: float
    bias: tuple[float, ...]

    def __post_init__(self) -> None:
        problems = []
        if not self.streams:
            problems.append("streams has no entry")
        if not self.ngrams:
            problems.append("ngrams has no entry")
        if len(self.lookup) != LONGEST_MATCH:
            problems.append(f"lookup has {len(self.lookup)} entries ({LONGEST_MATCH} expected)")
        if len(self.bias) != 7:
            problems.append(f"bias has {len(self.bias)} entries (7 expected)")
        numbers = (*self.streams, *self.ngrams, *self.lookup, self.share, self.no_stream, self.no_ngram, *self.bias)
        if not all(abs(number) <= LARGEST_WEIGHT for number in numbers):
            problems.append(f"numbers outside -{LARGEST_WEIGHT:g} to {LARGEST_WEIGHT:g}")
        if problems:
            raise UserError(f"weights of draft sources: {'; '.join(problems)}")


# The streams as they are.
UNIT_WEIGHTS: Final = JoinWeights((1.0,), (1.0,), (0.0,) * LONGEST_MATCH, 1.0, 0.0, 0.0, (0.0,) * 7)

# Rounded from fits to texts of a SQL task and of open questions, with and without n-grams. Those fitted to one's own texts are better.
PRIOR_WEIGHTS: Final = JoinWeights(
    streams=(0.8,),
    ngrams=(0.7, 1.1, 0.9, 1.2),
    lookup=(3.0, 3.8, 4.1, 4.4, 4.5, 4.6, 4.7, 5.5),
    share=0.65,
    no_stream=2.9,
    no_ngram=2.6,
    bias=(0.0, -1.0, 2.0, -0.9, 0.4, 0.2, 1.8),
)


@dataclass(eq=False)
class JoinedDrafter:
    """Grows the likeliest tree under the budget from any of three sources; below γ levels the other two go on alone.

    Keeps an index of the text between calls; a new text starts it anew.

    Attributes:
        use_streams: whether calls carry streams for it.
        lookup: an index to look in, or None.
        ngrams: a task's table, or None.
        weights: how the sources are joined.
        temperatures: of the streams, see :func:`specstream.runtimes.drafters.calibrate`.
    """

    use_streams: bool = True
    lookup: SuffixIndex | None = None
    ngrams: NgramTable | None = None
    weights: JoinWeights = PRIOR_WEIGHTS
    temperatures: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        w = self.weights
        # Scores become factors once, here; a node's candidates are then a few products each.
        self._other = [math.exp((w.no_ngram if sources & NGRAMS else 0.0) - w.bias[sources - 1]) for sources in range(1, 8)]
        self._no_stream = math.exp(-w.no_stream)
        self._lookup_factors = [math.exp(score) for score in w.lookup]
        self._temperatures = np.asarray(self.temperatures, dtype=np.float32)
        self._stream_weights: dict[tuple[int, int], FloatArray] = {}  # a column, by the first stream and the one behind the last
        self._ngram_factors: dict[int, list[tuple[int, float]]] = {}

    @property
    def uses_streams(self) -> bool:
        return self.use_streams

    def propose(self, context: DraftContext) -> TokenTree:
        streams = remaining_streams(context) if self.use_streams else None
        ids: list[list[int]] = []
        free: list[list[float]] = []
        given: FloatArray | None = None
        candidate = None  # which of a depth's stream candidates a node is
        if streams is not None:
            ids, free, given = self._stream_factors(streams)
            candidate = streams.root_candidate
        index, width = self.lookup, 0 if self.ngrams is None else self.ngrams.order
        matches: Matches = []
        if index is not None:
            index.update(context.tokens)
            matches = index.root_matches()
        budget, max_depth, levels, least = context.budget, context.max_depth, len(ids), context.least or [0.0] * context.budget

        tokens, parents, paths, depths = [context.root], [-1], [1.0], [0]
        # What the sources know of each node: the last tokens and their matches.
        tail = tuple(context.tokens[-width:]) if width else ()
        tails, found = [tail], [matches]
        children: list[list[tuple[float, int]]] = []  # (probability, token), the likeliest first
        # (-probability of the path, order of pushing, parent, rank among its children)
        heap: list[tuple[float, int, int, int]] = []
        row = depth = 0
        while True:
            own: list[tuple[float, int]] = []
            if depth < max_depth:
                level: Sequence[int] = ()
                factors: list[float] = []
                if depth < levels:
                    level = ids[depth]
                    factors = free[depth] if given is None or candidate is None else given[depth, candidate].tolist()
                # Children that are too unlikely in whatever place are never reached; a little less, so that rounding decides nothing.
                lowest = min(least[len(tokens) :], default=1.0)
                own = self._children(level, factors, tail, matches, max(_NARROW, 0.999 * lowest / paths[row]))
                if own:
                    heapq.heappush(heap, (-paths[row] * own[0][0], 2 * row, row, 0))
            children.append(own)
            if not heap or len(tokens) >= budget or -heap[0][0] < least[len(tokens)]:
                break
            negative, _, parent, rank = heapq.heappop(heap)
            siblings = children[parent]
            token = siblings[rank][1]
            if rank + 1 < len(siblings):
                heapq.heappush(heap, (-paths[parent] * siblings[rank + 1][0], 2 * len(tokens) + 1, parent, rank + 1))
            row, depth = len(tokens), depths[parent]
            tokens.append(token)
            parents.append(parent)
            paths.append(-negative)
            if len(tokens) >= budget:
                break  # the last node needs no children
            candidate = ids[depth].index(token) if given is not None and depth < levels and token in ids[depth] else None
            depth += 1
            depths.append(depth)
            if width:
                tail = (*tails[parent], token)[-width:]
                tails.append(tail)
            if index is not None:
                matches = index.longer_matches(found[parent], token) or index.path_matches(_path(row, tokens, parents))
                found.append(matches)
        return grown_tree(tokens, parents, [math.log(path) for path in paths])

    def _children(
        self, ids: Sequence[int], factors: Sequence[float], tail: tuple[int, ...], matches: Matches, least: float
    ) -> list[tuple[float, int]]:
        """(probability, token) of a node's children, the likeliest first, down to ``least``; see :class:`JoinWeights`.

        ``ids`` and ``factors`` are of the stream for this depth, if there is one.
        """
        grams = self._scored_ngrams(tail) if tail else None
        following = self.lookup.continuations(matches) if matches and self.lookup is not None else ()
        sources = (STREAMS if ids else 0) + (NGRAMS if grams is not None else 0) + (LOOKUP if following else 0)
        if not sources:
            return []
        unnamed = self._no_stream if ids else 1.0
        joint = dict(zip(ids, factors, strict=True))
        if grams is not None:
            for token, factor in grams:
                joint[token] = joint.get(token, unnamed) * factor
        for token, length, share in following:
            joint[token] = joint.get(token, unnamed) * (self._lookup_factors[length - 1] * share**self.weights.share)
        total = self._other[sources - 1] + sum(joint.values())
        least *= total
        children = [(factor / total, token) for token, factor in joint.items() if factor > least]
        children.sort(reverse=True)
        return children

    def _stream_factors(self, streams: RemainingStreams) -> tuple[list[list[int]], list[list[float]], FloatArray | None]:
        """Candidates by depth, their factors, and those below each candidate of the depth above."""
        free, given = stream_odds(streams, self._temperatures)
        depths = streams.used, streams.used + len(free)
        weight = self._stream_weights.get(depths)
        if weight is None:
            numbers = np.minimum(np.arange(*depths), len(self.weights.streams) - 1)
            weight = self._stream_weights[depths] = np.asarray(self.weights.streams, dtype=np.float32)[numbers][:, None]
        factors = np.exp(np.minimum(free * weight, _LARGEST)).tolist()
        return streams.ids.tolist(), factors, None if given is None else np.exp(np.minimum(given * weight[:, None], _LARGEST))

    def _scored_ngrams(self, tail: tuple[int, ...]) -> list[tuple[int, float]] | None:
        """Candidates of the table with their factors, remembered by entry: many contexts are known by the same last tokens."""
        assert self.ngrams is not None
        found = self.ngrams.find(tail)
        if found is None:
            return None
        scored = self._ngram_factors.get(found[1])
        if scored is None:
            following = self.ngrams.entry(*found)
            weight = self.weights.ngrams[min(following.order, len(self.weights.ngrams)) - 1]
            rest = math.log(max(following.rest, SMALLEST_REST))
            # Those that it does not name have the factor 1 instead of exp(-no_ngram).
            scored = [
                (token, math.exp(weight * (p - rest) + self.weights.no_ngram))
                for token, p in zip(following.tokens, following.logprobs, strict=True)
            ]
            if len(self._ngram_factors) >= _MEMO:
                self._ngram_factors.clear()
            self._ngram_factors[found[1]] = scored
        return scored


def _path(row: int, tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
    """Tokens from below the root to a row."""
    path = []
    while row:
        path.append(tokens[row])
        row = parents[row]
    return path[::-1]


def lookup_drafter(fold: Sequence[int] | None = None, weights: JoinWeights = PRIOR_WEIGHTS) -> JoinedDrafter:
    """Prompt lookup alone."""
    return JoinedDrafter(use_streams=False, lookup=SuffixIndex(fold), weights=weights)


def ngram_drafter(ngrams: NgramTable, weights: JoinWeights = PRIOR_WEIGHTS) -> JoinedDrafter:
    """A task's n-grams alone."""
    return JoinedDrafter(use_streams=False, ngrams=ngrams, weights=weights)


def stream_odds(streams: RemainingStreams, temperatures: npt.ArrayLike = ()) -> tuple[FloatArray, FloatArray | None]:
    """log(p / rest) of every candidate, and of every candidate below every candidate of the depth above.

    At another temperature the logarithm of the odds is divided by it, and a pair's score adds to it: the normalisations of
    :func:`specstream.runtimes.drafters.calibrate` and :func:`specstream.runtimes.tree.condition` cancel out.

    Returns:
        float32 [depths, k] and, with pairs, float32 [depths, k, k]; impossible candidates are -inf.
    """
    p = np.fmax(np.exp(streams.logprobs), 0.0)  # what is no number is impossible
    rest = np.maximum(1.0 - np.add.reduce(p, axis=1, keepdims=True), SMALLEST_REST)
    with np.errstate(divide="ignore"):
        free: FloatArray = np.log(p / rest)
    left = np.asarray(temperatures, dtype=np.float32)[streams.used :]
    if len(left):
        free = free / left[:, None]
    return free, None if streams.pairs is None else free[:, None, :] + streams.pairs
