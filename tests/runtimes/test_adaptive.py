"""The adaptive budget against simulated drafts: what is lost where they fail, what is gained where they are good."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specstream.models.errors import UserError
from specstream.runtimes.adaptive import PRIOR_COSTS, AdaptiveBudget, BudgetController, CallCosts, FixedBudget, prior_costs
from specstream.runtimes.tree import TokenTree, best_first, chain, path_probabilities

CHEAP = CallCosts((1, 16), (1.0, 1.3), 0.1)
DEAR = CallCosts((1, 2, 8, 16), (1.0, 1.6, 2.6, 4.0), 0.8)
ALL_COSTS = (PRIOR_COSTS, prior_costs("int4"), prior_costs("w8a8", "int8"), CHEAP, DEAR)


def run(
    controller: BudgetController,
    costs: CallCosts,
    tokens: int,
    truth: Callable[[int], float],
    claimed: float = 0.85,
    seed: int = 0,
    depth: int = 12,
) -> float:
    """Emit ``tokens`` tokens with chains whose tokens are each right with probability ``truth(tokens so far)`` and claim ``claimed``.

    Returns:
        Time, in plain calls.
    """
    rng = np.random.default_rng(seed)
    table, done, time = costs.table(64), 0, 0.0
    while done < tokens:
        budget = controller.budget()
        streams = budget > 1 and controller.streams()
        tree = chain(0, range(1, min(budget, depth + 1)), [float(np.log(claimed))] * (min(budget, depth + 1) - 1))
        tree = controller.trim(tree) if budget > 1 else tree
        assert 1 <= len(tree) <= max(budget, 1)
        emitted = 1
        while emitted < len(tree) and rng.random() < truth(done):
            emitted += 1
        time += float(table[len(tree) - 1]) + (costs.streams if streams else 0.0)
        controller.record(len(tree), emitted, sum(path_probabilities(tree)))
        done += emitted
    return time


@pytest.mark.parametrize("costs", ALL_COSTS)
@pytest.mark.parametrize("claimed", [0.3, 0.85, 0.99])
@pytest.mark.parametrize("truth", [0.0, 0.1, 0.3])
def test_never_below_095_of_plain_decoding(costs: CallCosts, claimed: float, truth: float) -> None:
    """Where drafts fail, whatever they claim: over a session of texts, and over every text of 100 tokens that starts it."""
    controller = AdaptiveBudget(costs)
    time = run(controller, costs, 100, lambda _: truth, claimed)
    assert time <= 100 / 0.95
    for seed in range(5):
        controller.new_text()
        time += run(controller, costs, 100, lambda _: truth, claimed, seed)
    assert time <= 600 / 0.95


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(ALL_COSTS),
    st.lists(st.tuples(st.integers(1, 100), st.floats(0, 1), st.floats(0.01, 0.999)), min_size=1, max_size=4),
    st.integers(2, 32),
)
def test_the_bound_holds_whatever_the_drafts_do(costs: CallCosts, texts: list[tuple[int, float, float]], most: int) -> None:
    controller = AdaptiveBudget(costs, most)
    dearest = float(costs.table(most)[-1]) + costs.streams - 1
    total = 0.0
    for seed, (tokens, truth, claimed) in enumerate(texts):
        controller.new_text()
        # A tree may have more rows than are usual, so the last draft of an account can overdraw it by one call.
        time = run(controller, costs, tokens, lambda _, truth=truth: truth, claimed, seed)  # type: ignore[misc]
        assert time <= 1.03 * tokens + 3.5 + dearest
        total += time
    assert total <= 1.03 * sum(tokens for tokens, _, _ in texts) + 2 + dearest


@pytest.mark.parametrize("costs", [PRIOR_COSTS, CHEAP])
@pytest.mark.parametrize("truth", [0.8, 0.9])
def test_good_drafts_are_not_held_back(costs: CallCosts, truth: float) -> None:
    adaptive = run(AdaptiveBudget(costs), costs, 2000, lambda _: truth, truth)
    best = min(run(FixedBudget(rows), costs, 2000, lambda _: truth, truth) for rows in range(2, 14))
    assert adaptive <= best * 1.05
    assert adaptive < 2000 / 1.5


def test_drafts_that_become_good_are_found_and_those_that_become_bad_are_left() -> None:
    controller = AdaptiveBudget()
    switched = run(controller, PRIOR_COSTS, 2000, lambda done: 0.0 if done < 1000 else 0.9, 0.9)
    good_half = run(AdaptiveBudget(), PRIOR_COSTS, 1000, lambda _: 0.9, 0.9)
    assert switched <= 1000 / 0.95 + good_half + 60
    controller = AdaptiveBudget()
    assert run(controller, PRIOR_COSTS, 1000, lambda _: 0.9, 0.9) < 500
    controller.new_text()
    assert run(controller, PRIOR_COSTS, 500, lambda _: 0.0, 0.9) <= 500 / 0.95


def test_where_drafts_fail_streams_are_rare() -> None:
    controller = AdaptiveBudget()
    run(controller, PRIOR_COSTS, 200, lambda _: 0.0)
    asked = []
    for _ in range(200):
        asked.append((controller.budget(), controller.streams()))
        controller.record(min(asked[-1][0], 3), 1, 2.0)
    assert 0 < sum(streams for _, streams in asked) < 15


def test_rows_that_are_run_in_any_case_cost_nothing() -> None:
    """Where one row takes the time of two, the second is always drafted, however unlikely."""
    controller = AdaptiveBudget(CallCosts((1, 2, 4), (1.0, 1.1, 1.6), streams=1.0), most=8, uses_streams=False, at_least=2)
    unlikely = chain(0, [1, 2, 3], [float(np.log(0.02))] * 3)
    for _ in range(300):
        assert controller.budget() >= 2
        assert not controller.streams()
        assert len(controller.trim(unlikely)) == 2
        controller.record(2, 1, 1.02)


def test_streams_must_be_better_than_what_costs_nothing() -> None:
    """Streams that are right as often as the other sources are not paid for; ones that are right more often are."""

    def share(with_streams: float, without: float) -> float:
        costs, rng = CallCosts((1, 16), (1.0, 1.3), 0.4), np.random.default_rng(0)
        controller = AdaptiveBudget(costs)
        streamed = []
        for _ in range(1500):
            budget = controller.budget()
            streamed.append(controller.streams())
            right, emitted = (with_streams if streamed[-1] else without), 1
            while emitted < min(budget, 8) and rng.random() < right:
                emitted += 1
            controller.record(min(budget, 8), emitted, emitted)
        return sum(streamed[500:]) / 1000

    assert share(0.6, 0.6) < 0.1
    assert share(0.3, 0.6) < 0.1
    assert share(0.8, 0.4) > 0.95
    assert share(0.8, 0.0) > 0.95


def test_short_texts_with_good_drafts_are_not_held_back() -> None:
    """Every text starts anew, and one in six drafts gives nothing."""
    controller = AdaptiveBudget()
    plain = 0
    for seed in range(40):
        controller.new_text()
        rng, done = np.random.default_rng(seed), 0
        while done < 30:
            controller.budget()
            streams = controller.streams()
            plain += not streams
            emitted = 1 if not streams or rng.random() < 1 / 6 else 4
            controller.record(8 if streams else 1, emitted, 3.5 if streams else 1.0)
            done += emitted
    assert plain < 35


def test_a_try_is_two_calls_since_streams_beside_rows_serve_the_next_one() -> None:
    controller = AdaptiveBudget()
    run(controller, PRIOR_COSTS, 100, lambda _: 0.0)
    drafted = []
    for _ in range(400):
        controller.budget()
        drafted.append(controller.streams())
        controller.record(3 if drafted[-1] else 1, 1, 1.0)
    starts = [i for i in range(1, 399) if drafted[i] and not drafted[i - 1]]
    assert len(starts) > 3
    assert all(drafted[i + 1] for i in starts)


def test_overconfident_trees_get_smaller() -> None:
    def rows(truth: float) -> int:
        controller = AdaptiveBudget(CHEAP)
        run(controller, CHEAP, 2000, lambda _: truth, 0.8)
        return len(controller.trim(chain(0, range(1, 16), [float(np.log(0.8))] * 15)))

    assert rows(0.5) < rows(0.8)


def test_trim_keeps_the_rows_that_pay() -> None:
    tree = TokenTree(np.arange(4), np.array([-1, 0, 1, 0], dtype=np.int32), np.log([1, 0.6, 0.5, 0.01]).astype(np.float32))
    assert AdaptiveBudget(CHEAP).trim(tree).tokens.tolist() == [0, 1, 2]
    assert AdaptiveBudget(CallCosts((1, 2), (1.0, 2.0), 0.0)).trim(tree).tokens.tolist() == [0]


def test_without_streams_their_cost_does_not_count() -> None:
    costs = CallCosts((1, 8), (1.0, 1.1), 3.0)
    dear, free = AdaptiveBudget(costs), AdaptiveBudget(costs, uses_streams=False)
    assert (dear.budget(), dear.streams()) == (16, False)
    assert (free.budget(), free.streams()) == (16, False)
    assert len(free.trim(chain(0, range(1, 8), [float(np.log(0.9))] * 7))) == 8


def test_costs() -> None:
    assert CallCosts((1, 3), (2.0, 4.0), 0).table(5).tolist() == [1.0, 1.5, 2.0, 2.5, 3.0]
    assert CallCosts((1, 2, 4), (1.0, 0.9, 1.2), 0).table(4).tolist() == pytest.approx([1.0, 1.0, 1.1, 1.2])
    assert CallCosts((1,), (1.0,), 0).table(3).tolist() == [1, 1, 1]
    for bad in (((2,), (1.0,), 0), ((1, 1), (1.0, 1.0), 0), ((1, 2), (1.0,), 0), ((1,), (0.0,), 0), ((1,), (1.0,), -1), ((), (), 0)):
        with pytest.raises(UserError, match="call costs"):
            CallCosts(*bad)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="budget: 0"):
        AdaptiveBudget(most=0)


def test_a_fixed_budget_is_fixed() -> None:
    tree = chain(0, [1, 2, 3])
    fixed = FixedBudget(8)
    fixed.record(8, 1, 4.0)
    assert (fixed.budget(), fixed.streams(), fixed.trim(tree)) == (8, True, tree)
    assert not FixedBudget(1).streams()


def test_a_row_that_costs_nothing_does_not_keep_the_unlikely_ones_behind_it() -> None:
    """With the costs of w8a8, where two rows cost what one does, and a rate of 1: rows of 5 % are not drafted in any number."""
    controller = AdaptiveBudget(CallCosts((1, 2, 4, 16), (1.0, 1.0, 1.2, 2.4), streams=1.0), most=16)
    least = controller.least()
    assert len(least) == 16
    assert least[0] == least[1] == 0.0
    assert min(least[2:]) > 0.09
    ids, scores = np.arange(15)[None], np.log(np.full((1, 15), 0.05))
    assert len(best_first(99, ids, scores, 16, least=least)) == 2
    assert len(best_first(99, ids, scores, 16)) == 16


@given(
    st.sampled_from(ALL_COSTS),
    st.lists(st.tuples(st.integers(1, 16), st.integers(1, 9)), max_size=30),
    st.lists(st.lists(st.floats(-6.0, -0.01), min_size=3, max_size=3), min_size=1, max_size=5),
)
def test_rows_that_are_too_unlikely_are_not_missed(costs: CallCosts, past: list[tuple[int, int]], logprobs: list[list[float]]) -> None:
    """Whatever the controller has seen: a tree grown down to ``least`` is trimmed to what the whole tree is trimmed to."""
    controller = AdaptiveBudget(costs)
    for rows, emitted in past:
        controller.budget()
        controller.record(rows, min(emitted, rows), 1.0 + rows / 2)
    scores = np.log(np.exp(logprobs) / np.maximum(np.exp(logprobs).sum(axis=1, keepdims=True), 1.0))
    scores = -np.sort(-scores, axis=1)
    ids = np.arange(scores.size).reshape(scores.shape)
    whole = controller.trim(best_first(99, ids, scores, 16))
    sparing = controller.trim(best_first(99, ids, scores, 16, least=controller.least()))
    assert path_probabilities(sparing) == path_probabilities(whole)
    assert sparing.tokens.tolist() == whole.tokens.tolist()
