from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specstream.runtimes.drafters import DraftContext, NoDrafter, StreamDrafter, Streams, calibrate


def streams(position: int) -> Streams:
    """Three streams of two candidates: stream j says 10 j, then 10 j + 1."""
    ids = np.array([[10, 11], [20, 21], [30, 31]])
    return Streams(ids, np.log(np.array([[0.6, 0.2]] * 3)).astype(np.float32), position)


def context(position: int | None, budget: int = 16, max_depth: int = 9) -> DraftContext:
    # Tokens at positions 0 to 5; the root is the one at 5.
    return DraftContext([0, 1, 2, 3, 4, 5], None if position is None else streams(position), budget, max_depth)


@pytest.mark.parametrize(
    ("position", "chain"),
    [
        (4, [5, 10, 20, 30]),  # the last accepted row carried them: stream j serves depth j
        (3, [5, 20, 30]),  # its parent did: the first stream has become the root
        (2, [5, 30]),
        (1, [5]),  # used up
        (0, [5]),
        (None, [5]),
    ],
)
def test_streams_are_shifted_by_their_distance(position: int | None, chain: list[int]) -> None:
    tree = StreamDrafter().propose(context(position))
    assert tree.tokens[: len(chain)].tolist() == chain
    assert tree.depth.max() == len(chain) - 1


def test_budget_and_depth() -> None:
    assert len(StreamDrafter().propose(context(4, budget=5))) == 5
    assert StreamDrafter().propose(context(4, max_depth=2)).depth.max() == 2
    assert StreamDrafter().propose(context(4, max_depth=0)).tokens.tolist() == [5]


def test_each_stream_has_its_own_temperature() -> None:
    # After a shift of one, streams 2 and 3 serve; the cold one's best candidate is nearly certain.
    tree = StreamDrafter((9.0, 0.01, 1.0)).propose(context(3, budget=3))
    assert tree.tokens.tolist() == [5, 20, 30]
    np.testing.assert_allclose(np.exp(tree.logprob), [1, 1, 0.6], atol=1e-4)


def test_pairs_are_shifted_too_and_know_the_root() -> None:
    """Streams of one row ago: the root is candidate 1 of the first stream, so the second stream's scores below it count."""
    ids = np.array([[10, 5], [20, 21], [30, 31]])
    pairs = np.zeros((3, 2, 2), dtype=np.float32)
    pairs[1, 1] = [-9, 9]
    pairs[2, 1] = [-9, 9]
    one_ago = Streams(ids, np.log(np.array([[0.5, 0.4]] * 3)).astype(np.float32), 3, pairs)
    shifted = DraftContext([0, 1, 2, 3, 4, 5], one_ago, budget=3, max_depth=9)
    assert StreamDrafter().propose(shifted).tokens.tolist() == [5, 21, 31]
    other_root = DraftContext([0, 1, 2, 3, 4, 6], one_ago, budget=3, max_depth=9)
    assert StreamDrafter().propose(other_root).tokens.tolist() == [6, 20, 21]


def test_no_drafter_drafts_nothing() -> None:
    assert NoDrafter().propose(context(4)).tokens.tolist() == [5]
    assert not NoDrafter().uses_streams


@given(seed=st.integers(0, 10**6), width=st.integers(1, 6), temperature=st.floats(0.2, 5.0))
def test_calibration_is_a_softmax_at_another_temperature(seed: int, width: int, temperature: float) -> None:
    """With one outcome outside the top k, what is known of the distribution is everything, and the formula is exact."""
    scores = -np.sort(-np.random.default_rng(seed).normal(size=width + 1))

    def softmax(values: np.ndarray) -> np.ndarray:
        shares: np.ndarray = np.exp(values) / np.exp(values).sum()
        return shares

    known = np.log(softmax(scores))[None, :width]
    expected = softmax(scores / temperature)[:width]
    np.testing.assert_allclose(np.exp(calibrate(known, [temperature]))[0], expected, atol=1e-5)
    np.testing.assert_allclose(calibrate(known, [1.0]), known, atol=1e-5)


def test_impossible_candidates_stay_impossible() -> None:
    assert calibrate([[0.0, -np.inf]], [0.5]).tolist() == [[0.0, -np.inf]]
