"""Token trees: what a drafter proposes and one call verifies. Token ids and probabilities; nothing of sessions, caches or text.

A tree has few rows, and each call makes and reads one: where time counts, plain Python on lists beats NumPy, whose every function costs
some microseconds however short the array is.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class TokenTree:
    """A tree of tokens. Row 0, the root, is the last emitted token (the correction), whose row is not in the cache yet.

    Row order: root, then the primary chain (from the root, each time the likeliest child), then the rest; parents before
    children. The builders below keep to it. The class itself checks nothing: a drafter may return anything, and
    :func:`specstream.runtimes.speculate.sanitise` is what stands between it and the graph.

    Attributes:
        tokens: int64 [M].
        parents: int32 [M], row of each parent; -1 for the root.
        logprob: float32 [M], log-probability of the path from the root (root: 0).
    """

    tokens: IntArray
    parents: npt.NDArray[np.int32]
    logprob: FloatArray

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def depth(self) -> IntArray:
        """int64 [M]: distance from the root."""
        return np.array(self.positions(0), dtype=np.int64)

    def positions(self, root: int) -> list[int]:
        """Of each row's token in the text, when the root's is ``root``."""
        positions = [root] * len(self)
        for row, parent in enumerate(self.parents.tolist()):
            if row:
                positions[row] = positions[parent] + 1
        return positions

    def mask(self) -> BoolArray:
        """bool [M, M]: row i may see row j, that is its ancestors and itself; lower-triangular."""
        count = len(self)
        seen = bytearray(count * count)
        for row, parent in enumerate(self.parents.tolist()):
            begin = row * count
            if row:  # what the parent sees
                seen[begin : begin + parent + 1] = seen[parent * count : parent * count + parent + 1]
            seen[begin + row] = True
        return np.frombuffer(seen, dtype=np.bool_).reshape(count, count)

    def children(self, row: int) -> list[int]:
        """Rows whose parent is ``row``, in row order."""
        return np.flatnonzero(self.parents == row).tolist()

    def path(self, row: int) -> list[int]:
        """Rows from the root to ``row``, both included."""
        rows = [row]
        while rows[-1] != 0:
            rows.append(int(self.parents[rows[-1]]))
        return rows[::-1]


def root_only(root_token: int) -> TokenTree:
    """The empty draft: plain decoding."""
    return TokenTree(np.array([root_token], dtype=np.int64), np.array([-1], dtype=np.int32), np.zeros(1, dtype=np.float32))


def chain(root_token: int, tokens: Sequence[int], logprobs: Sequence[float] | None = None) -> TokenTree:
    """A single path below the root; ``logprobs`` are each token's own (given its parent), certain when left out."""
    own = np.zeros(len(tokens)) if logprobs is None else np.asarray(logprobs, dtype=np.float64)
    return TokenTree(
        tokens=np.array([root_token, *tokens], dtype=np.int64),
        parents=np.arange(-1, len(tokens), dtype=np.int32),
        logprob=np.concatenate(([0.0], np.cumsum(own))).astype(np.float32),
    )


def best_first(
    root_token: int,
    stream_ids: npt.ArrayLike,
    stream_logprobs: npt.ArrayLike,
    budget: int,
    max_depth: int | None = None,
    pairs: npt.ArrayLike | None = None,
    root_candidate: int | None = None,
    least: Sequence[float] = (),
) -> TokenTree:
    """The ``budget`` likeliest nodes, when depth j draws from the candidates of stream j.

    A path's probability is the product of its tokens' given their parents (see :func:`condition`). Without ``pairs`` a token's
    probability is the same below every parent: streams never see which tokens were picked (arXiv 2402.11131). A node's next
    sibling and its first child are both no likelier than itself, so popping the likeliest known node, and pushing those two,
    visits all nodes from the likeliest down.

    Args:
        stream_ids: int [γ, k]: row j - 1 has the candidates at depth j.
        stream_logprobs: float [γ, k].
        budget: rows at most, the root included.
        max_depth: depth at most; γ when left out.
        pairs: float [γ, k, k]: entry [j - 1, a, b] scores candidate b at depth j below candidate a at depth j - 1.
        root_candidate: which candidate of the stream before the first one the root is, for ``pairs[0]``; left out, depth 1 does
            not depend on the root.
        least: entry n is the probability of a path below which there is no node number n, the root being number 0; the tree ends
            there.
    """
    lowest = [math.log(p) if p > 0 else -math.inf for p in least] if least else [-math.inf] * budget
    ids: list[list[int]] = np.asarray(stream_ids).tolist()
    logprobs = np.asarray(stream_logprobs, dtype=np.float32)
    free: list[list[float]] = logprobs.tolist()
    given: list[list[list[float]]] | None = None if pairs is None else condition(logprobs, pairs).tolist()
    levels = len(ids) if max_depth is None else min(max_depth, len(ids))
    # (depth of the parent, its candidate or None) -> log-probabilities of its children and their order, the likeliest first.
    below: dict[tuple[int, int | None], tuple[list[float], list[int]]] = {}
    tokens, parents, paths, depths = [root_token], [-1], [0.0], [0]
    candidates: list[int | None] = [root_candidate]
    # (-path log-probability, order of pushing, parent row, rank among its children)
    heap: list[tuple[float, int, int, int]] = []

    def children(parent: int) -> tuple[list[float], list[int]]:
        key = (depths[parent], None if given is None else candidates[parent])
        if key not in below:
            depth, candidate = key
            scores = free[depth] if given is None or candidate is None else given[depth][candidate]
            possible = [b for b, score in enumerate(scores) if math.isfinite(score)]
            below[key] = scores, sorted(possible, key=lambda b: -scores[b])
        return below[key]

    def push(parent: int, rank: int) -> None:
        if depths[parent] < levels:
            scores, order = children(parent)
            if rank < len(order):
                heapq.heappush(heap, (-(paths[parent] + scores[order[rank]]), len(tokens) * 2 + (rank > 0), parent, rank))

    push(0, 0)
    while heap and len(tokens) < budget and -heap[0][0] >= lowest[len(tokens)]:
        negative, _, parent, rank = heapq.heappop(heap)
        row, depth = len(tokens), depths[parent]
        candidate = children(parent)[1][rank]
        tokens.append(ids[depth][candidate])
        parents.append(parent)
        paths.append(-negative)
        depths.append(depth + 1)
        candidates.append(candidate)
        push(row, 0)
        push(parent, rank + 1)
    return grown_tree(tokens, parents, paths)


def condition(logprobs: npt.ArrayLike, pairs: npt.ArrayLike) -> FloatArray:
    """Log-probability of every candidate below every candidate of the stream before it.

    p(b | a) = exp(l_b + s_ab) / (Σ exp(l_b' + s_ab') + rest), rest = 1 - Σ exp(l_b'): what is outside the top k counts as one more
    outcome with a score of 0.

    Args:
        logprobs: float [γ, k], l.
        pairs: float [γ, k, k], s: entry [j, a, b] for candidate b of stream j and a of stream j - 1.

    Returns:
        float32 [γ, k, k].
    """
    own = np.asarray(logprobs, dtype=np.float32)
    rest = np.maximum(1.0 - np.exp(own).sum(axis=1), 0.0)[:, None, None]
    scores = own[:, None, :] + np.asarray(pairs, dtype=np.float32)
    # Against overflow; the lower bound is for parents below which nothing is possible.
    largest = np.maximum(scores.max(axis=2, keepdims=True), -60.0)
    total = np.exp(scores - largest).sum(axis=2, keepdims=True) + rest * np.exp(-largest)
    given: FloatArray = scores - (largest + np.log(total))
    return given


def cartesian(root_token: int, stream_ids: npt.ArrayLike, stream_logprobs: npt.ArrayLike, widths: Sequence[int]) -> TokenTree:
    """The paper's tree (arXiv 2402.11131, section 3.2): below every node of depth j - 1, the top ``widths[j - 1]`` of stream j.

    ``(k,) * γ`` gives 1 + Σ k^g rows: 40 for γ = k = 3.

    Args:
        stream_ids: int [γ, k], best first.
        stream_logprobs: float [γ, k].
        widths: candidates at each depth; at most γ of them.
    """
    ids: list[list[int]] = np.asarray(stream_ids).tolist()
    scores: list[list[float]] = np.asarray(stream_logprobs, dtype=np.float32).tolist()
    tokens, parents, paths = [root_token], [-1], [0.0]
    level = [0]
    for depth, width in enumerate(widths):
        below = []
        for parent in level:
            for token, score in zip(ids[depth][:width], scores[depth][:width], strict=True):
                below.append(len(tokens))
                tokens.append(token)
                parents.append(parent)
                paths.append(paths[parent] + score)
        level = below
    return grown_tree(tokens, parents, paths)


def merge(trees: Sequence[TokenTree], budget: int) -> TokenTree:
    """One tree from several drafters' with the same root: equal paths fall together, the likeliest ``budget`` rows stay.

    A path that several propose gets the highest of their probabilities, which must be calibrated to be comparable.

    Raises:
        ValueError: no tree, or different roots.
    """
    if len({int(tree.tokens[0]) for tree in trees}) != 1:
        raise ValueError("trees to merge need one common root")
    tokens, parents, paths = [int(trees[0].tokens[0])], [-1], [0.0]
    known: dict[tuple[int, int], int] = {}
    for tree in trees:
        row_of = [0]
        for token, parent, path in zip(tree.tokens.tolist()[1:], tree.parents.tolist()[1:], tree.logprob.tolist()[1:], strict=True):
            above = row_of[parent]
            row = known.setdefault((above, token), len(tokens))
            if row == len(tokens):
                tokens.append(token)
                parents.append(above)
                paths.append(path)
            paths[row] = max(paths[row], path)
            row_of.append(row)
    # Each path is no likelier than its parent's, so the likeliest rows contain their ancestors; the stable sort keeps ties so.
    kept = sorted(sorted(range(len(tokens)), key=lambda row: -paths[row])[:budget])
    new = {row: i for i, row in enumerate(kept)}
    return grown_tree([tokens[r] for r in kept], [new.get(parents[r], -1) for r in kept], [paths[r] for r in kept])


def grown_tree(tokens: list[int], parents: list[int], paths: list[float]) -> TokenTree:
    """The tree of these rows with its primary chain moved to the front; parents stay before children.

    Why the order matters: with quantized activations only rows whose mask has no gaps are bit-equal to plain decoding.
    """
    likeliest: dict[int, int] = {}
    for row in range(1, len(tokens)):
        best = likeliest.get(parents[row])
        if best is None or paths[row] > paths[best]:
            likeliest[parents[row]] = row
    order = [0]
    while order[-1] in likeliest:
        order.append(likeliest[order[-1]])
    primary = set(order)
    order += [row for row in range(1, len(tokens)) if row not in primary]
    return _rows_of(order, tokens, parents, paths)


def _rows_of(kept: Sequence[int], tokens: list[int], parents: list[int], paths: list[float]) -> TokenTree:
    """The tree of some rows, the root first and parents before children, in this order."""
    new = {row: i for i, row in enumerate(kept)}
    return TokenTree(
        tokens=np.array([tokens[row] for row in kept], dtype=np.int64),
        parents=np.array([new[parents[row]] if row else -1 for row in kept], dtype=np.int32),
        logprob=np.array([paths[row] for row in kept], dtype=np.float32),
    )


def path_probabilities(tree: TokenTree) -> list[float]:
    """How likely each row is to be on the right path, by the tree's own account; the root is certain.

    Their sum is the number of tokens that a call with this tree emits on average: the correction, and each row that is accepted.
    """
    return [math.exp(path) for path in tree.logprob.tolist()]


def likeliest_rows(tree: TokenTree, count: int) -> TokenTree:
    """The tree of the ``count`` likeliest rows, in the order that they had; all ancestors of a row are as likely as it is."""
    paths: list[float] = tree.logprob.tolist()
    likeliest = sorted(range(len(paths)), key=paths.__getitem__, reverse=True)  # equal ones in row order, so after their ancestors
    return _rows_of(sorted(likeliest[:count]), tree.tokens.tolist(), tree.parents.tolist(), paths)


# Which rows of a tree carry streams in the call that verifies it: int64 [S], ascending.
StreamPolicy = Callable[[TokenTree], IntArray]


def every_row(tree: TokenTree) -> IntArray:
    """The paper's choice: streams beside every node, so any accepted path goes on with a full draft. (1 + γ) rows a node."""
    return np.arange(len(tree), dtype=np.int64)


def only_root(tree: TokenTree) -> IntArray:
    """γ extra rows only; the next draft is shorter by as many levels as were accepted."""
    return np.zeros(1, dtype=np.int64)


def likeliest_last(count: int) -> StreamPolicy:
    """The ``count`` rows that are likeliest to be the last accepted one.

    A node is the last accepted when its path is right and none of its children is: P(path) · (1 - Σ P(child | path)), which is
    P(path) - Σ P(path, child).
    """
    if count < 1:
        raise ValueError(f"at least one row must carry streams, not {count}")

    def choose(tree: TokenTree) -> IntArray:
        if count >= len(tree):
            return every_row(tree)
        path = np.exp(tree.logprob.astype(np.float64))
        last = path - np.bincount(tree.parents[1:], weights=path[1:], minlength=len(tree))
        return np.sort(np.argsort(-last, kind="stable")[:count]).astype(np.int64)

    return choose
