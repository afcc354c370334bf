from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specstream.runtimes.tree import (
    TokenTree,
    best_first,
    cartesian,
    chain,
    condition,
    every_row,
    likeliest_last,
    likeliest_rows,
    merge,
    only_root,
    path_probabilities,
    root_only,
)


@st.composite
def streams(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Candidates of γ streams, best first, with probabilities that sum to less than 1."""
    depth, width = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    ids = np.stack([rng.permutation(20)[:width] for _ in range(depth)])
    probabilities = rng.dirichlet(np.ones(width + 1), size=depth)[:, :width]
    return ids, np.log(-np.sort(-probabilities, axis=1)).astype(np.float32)


def check(tree: TokenTree) -> None:
    """What every builder promises."""
    assert tree.tokens.dtype == np.int64
    assert tree.parents.dtype == np.int32
    assert tree.logprob.dtype == np.float32
    assert len(tree.tokens) == len(tree.parents) == len(tree.logprob) == len(tree)
    assert tree.parents[0] == -1
    assert tree.logprob[0] == 0
    assert all(0 <= parent < row for row, parent in enumerate(tree.parents.tolist()[1:], 1))
    assert (tree.logprob[1:] <= tree.logprob[tree.parents[1:]] + 1e-6).all()
    for row in range(len(tree)):
        tokens = tree.tokens[tree.children(row)].tolist()
        assert len(set(tokens)) == len(tokens)
    # The primary chain, from the root always to the likeliest child, comes first.
    row = 0
    while children := tree.children(row):
        best = max(children, key=lambda child: tree.logprob[child])
        assert tree.logprob[best] == tree.logprob[row + 1]
        assert row + 1 in children
        row += 1


def paths(tree: TokenTree) -> dict[tuple[int, ...], float]:
    return {tuple(tree.tokens[tree.path(row)].tolist()): float(tree.logprob[row]) for row in range(len(tree))}


@given(streams(), st.integers(1, 40), st.one_of(st.none(), st.integers(0, 6)))
def test_best_first_takes_the_likeliest_nodes(candidates: tuple[np.ndarray, np.ndarray], budget: int, max_depth: int | None) -> None:
    ids, logprobs = candidates
    tree = best_first(99, ids, logprobs, budget, max_depth)
    check(tree)
    assert len(tree) <= budget
    levels = len(ids) if max_depth is None else min(max_depth, len(ids))
    # Brute force: all nodes of the full tree, the likeliest first.
    everything = [
        sum(logprobs[d][rank] for d, rank in enumerate(ranks))
        for depth in range(1, levels + 1)
        for ranks in itertools.product(range(ids.shape[1]), repeat=depth)
    ]
    expected = sorted(everything, reverse=True)[: budget - 1]
    assert len(tree) == 1 + len(expected)
    np.testing.assert_allclose(sorted(tree.logprob[1:], reverse=True), expected, rtol=1e-5, atol=1e-6)


def test_best_first_sorts_candidates_and_skips_impossible_ones() -> None:
    tree = best_first(0, [[5, 6, 7]], [[-np.inf, np.log(0.3), np.log(0.6)]], budget=10)
    assert tree.tokens.tolist() == [0, 7, 6]
    assert best_first(0, [[5, 6]], [[np.nan, np.nan]], budget=10).tokens.tolist() == [0]


@given(streams(), st.data())
def test_cartesian_is_the_full_tree(candidates: tuple[np.ndarray, np.ndarray], data: st.DataObject) -> None:
    ids, logprobs = candidates
    widths = data.draw(st.lists(st.integers(1, min(3, ids.shape[1])), max_size=min(4, len(ids))))
    tree = cartesian(99, ids, logprobs, widths)
    check(tree)
    expected = {
        (99, *choice)
        for depth in range(len(widths) + 1)
        for choice in itertools.product(*(ids[d][: widths[d]].tolist() for d in range(depth)))
    }
    assert set(paths(tree)) == expected
    assert len(tree) == len(expected)


def test_cartesian_of_the_paper_has_40_rows() -> None:
    ids = np.arange(9).reshape(3, 3)
    assert len(cartesian(99, ids, np.log(np.full((3, 3), 0.3)), (3, 3, 3))) == 40


@given(st.lists(streams(), min_size=1, max_size=3), st.integers(1, 30))
def test_merge_keeps_the_likeliest_paths_of_all(candidates: list[tuple[np.ndarray, np.ndarray]], budget: int) -> None:
    trees = [best_first(99, ids, logprobs, 12) for ids, logprobs in candidates]
    tree = merge(trees, budget)
    check(tree)
    union: dict[tuple[int, ...], float] = {}
    for one in trees:
        for path, logprob in paths(one).items():
            union[path] = max(logprob, union.get(path, -np.inf))
    assert len(tree) == min(budget, len(union))
    merged = paths(tree)
    assert all(union[path] == logprob for path, logprob in merged.items())
    assert sorted(merged.values(), reverse=True) == sorted(union.values(), reverse=True)[: len(tree)]


def test_merge_needs_one_root() -> None:
    with pytest.raises(ValueError, match="common root"):
        merge([chain(1, [2]), chain(2, [2])], 4)


@given(streams(), st.integers(1, 40))
def test_mask_shows_ancestors_and_itself(candidates: tuple[np.ndarray, np.ndarray], budget: int) -> None:
    tree = best_first(99, *candidates, budget)
    mask = tree.mask()
    assert mask.dtype == np.bool_
    for row in range(len(tree)):
        path = tree.path(row)
        assert np.flatnonzero(mask[row]).tolist() == path
        assert tree.depth[row] == len(path) - 1


def test_chain_and_empty_draft() -> None:
    tree = chain(1, [2, 3], [-0.5, -0.25])
    check(tree)
    assert tree.tokens.tolist() == [1, 2, 3]
    assert tree.logprob.tolist() == [0, -0.5, -0.75]
    assert (tree.mask() == np.tri(3, dtype=bool)).all()
    check(root_only(4))
    assert root_only(4).tokens.tolist() == [4]


@given(streams(), st.integers(1, 40), st.integers(1, 6))
def test_likeliest_last_rows(candidates: tuple[np.ndarray, np.ndarray], budget: int, count: int) -> None:
    tree = best_first(99, *candidates, budget)
    rows = likeliest_last(count)(tree)
    assert rows.dtype == np.int64
    assert len(rows) == min(count, len(tree))
    assert (np.diff(rows) > 0).all()
    conditional = np.exp(tree.logprob - np.where(tree.parents < 0, 0, tree.logprob[tree.parents]))
    last = [np.exp(tree.logprob[row]) * (1 - sum(conditional[child] for child in tree.children(row))) for row in range(len(tree))]
    np.testing.assert_allclose(sorted(np.array(last)[rows]), sorted(last)[-len(rows) :], atol=1e-5)


def test_policies_of_one_and_all_rows() -> None:
    tree = chain(1, [2, 3])
    assert every_row(tree).tolist() == [0, 1, 2]
    assert only_root(tree).tolist() == [0]
    assert likeliest_last(1)(chain(1, [2, 3], [np.log(0.9), np.log(0.9)])).tolist() == [2]
    assert likeliest_last(1)(chain(1, [2, 3], [np.log(0.1), np.log(0.9)])).tolist() == [0]
    with pytest.raises(ValueError, match="at least one row"):
        likeliest_last(0)


@given(streams(), st.integers(1, 40), st.integers(0, 2**32), st.booleans())
def test_best_first_with_pairs_takes_the_likeliest_paths(
    candidates: tuple[np.ndarray, np.ndarray], budget: int, seed: int, root_known: bool
) -> None:
    ids, logprobs = candidates
    depth, width = ids.shape
    rng = np.random.default_rng(seed)
    pairs = rng.normal(scale=2, size=(depth, width, width)).astype(np.float32)
    root = int(rng.integers(width)) if root_known else None
    tree = best_first(99, ids, logprobs, budget, pairs=pairs, root_candidate=root)
    check(tree)

    def given_parent(level: int, a: int | None, b: int) -> float:
        own = np.exp(logprobs[level].astype(float))
        if a is None:
            return float(np.log(own[b]))
        scaled = own * np.exp(pairs[level, a].astype(float))
        return float(np.log(scaled[b] / (scaled.sum() + 1 - own.sum())))

    everything = []
    for levels in range(1, depth + 1):
        for ranks in itertools.product(range(width), repeat=levels):
            above = (root, *ranks)
            everything.append(sum(given_parent(d, above[d], rank) for d, rank in enumerate(ranks)))
    expected = sorted(everything, reverse=True)[: budget - 1]
    assert len(tree) == 1 + len(expected)
    np.testing.assert_allclose(sorted(tree.logprob[1:], reverse=True), expected, rtol=1e-3, atol=1e-3)


def test_a_pair_score_changes_what_follows_whom() -> None:
    ids, logprobs = [[1, 2], [3, 4]], np.log([[0.5, 0.4], [0.5, 0.4]])
    pairs = np.zeros((2, 2, 2))
    pairs[1] = [[-9, 9], [9, -9]]  # 4 after 1, 3 after 2
    tree = best_first(0, ids, logprobs, budget=5, pairs=pairs)
    assert set(paths(tree)) == {(0,), (0, 1), (0, 2), (0, 1, 4), (0, 2, 3)}


@given(streams())
def test_scores_of_zero_condition_nothing(candidates: tuple[np.ndarray, np.ndarray]) -> None:
    _, logprobs = candidates
    given_parent = condition(logprobs, np.zeros((*logprobs.shape, logprobs.shape[1])))
    assert given_parent.dtype == np.float32
    np.testing.assert_allclose(given_parent, np.broadcast_to(logprobs[:, None], given_parent.shape), atol=1e-5)


def test_huge_scores_and_impossible_candidates_stay_probabilities() -> None:
    given_parent = condition([[-np.inf, np.log(0.5)], [-np.inf, -np.inf]], np.full((2, 2, 2), 500.0))
    assert given_parent[0].tolist() == [[-np.inf, 0.0], [-np.inf, 0.0]]
    assert (given_parent[1] == -np.inf).all()


@given(streams(), st.integers(1, 40), st.integers(1, 40))
def test_the_likeliest_rows_are_a_tree(candidates: tuple[np.ndarray, np.ndarray], budget: int, count: int) -> None:
    tree = best_first(99, *candidates, budget)
    part = likeliest_rows(tree, count)
    check(part)
    assert len(part) == min(count, len(tree))
    assert paths(part).items() <= paths(tree).items()
    likely = path_probabilities(tree)
    assert sum(path_probabilities(part)) == pytest.approx(np.sort(likely)[::-1][:count].sum(), rel=1e-5)
    assert likely[0] == 1
