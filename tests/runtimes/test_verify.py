from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specstream.models.errors import UserError
from specstream.runtimes.drafters import NoDrafter, StreamDrafter
from specstream.runtimes.sampling import NO_HISTORY, History, Sampling, pick
from specstream.runtimes.session import Rows, StepOutput
from specstream.runtimes.speculate import speculate
from specstream.runtimes.verify import NEAR_TIE, compare_rows, could_win, verify

from .fake_model import FakeModel

PROMPTS = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10]]


def plain(prompt: list[int], count: int = 20, sampling: Sampling | None = None, model: FakeModel | None = None) -> list[int]:
    blocks = speculate(model or FakeModel(), prompt, NoDrafter(), max_new_tokens=count, sampling=sampling)
    return [t for block in blocks for t in block.tokens]


class Flipping(FakeModel):
    """Says its second best token in calls of several rows, at every row where ``when`` holds; ``gap`` parts the two best."""

    def __init__(self, gap: float, when: Callable[[int], bool] = lambda position: position % 5 == 0) -> None:
        super().__init__(skill=0.5)
        self.gap = gap
        self.when = when

    def _logits(self, entry: int) -> np.ndarray:
        scores = super()._logits(entry)
        best, second = np.argsort(-scores)[:2]
        scores[second] = scores[best] - self.gap
        return scores

    def run(self, rows: Rows, logits: bool = False) -> StepOutput:
        output = super().run(rows, logits=True)
        tree = len(rows.input_ids) > 1 and not rows.tree_mask.all(where=np.tri(len(rows.input_ids), dtype=bool))
        if tree and not logits:
            second = np.argsort(-output.logits, axis=1)[:, 1]
            flip = np.array([self.when(p) for p in rows.position_ids[rows.logit_rows].tolist()])
            output = dataclasses.replace(output, next_ids=np.where(flip, second, output.next_ids))
        return output


class Rounding(FakeModel):
    """Flips where ``drafted`` holds in trees, and where ``plainly`` does in calls of one row, if those have kernels of their own."""

    def __init__(self, drafted: Callable[[int], bool], plainly: Callable[[int], bool]) -> None:
        super().__init__(skill=0.5)
        self.drafted, self.plainly, self.one_row = drafted, plainly, True

    def run(self, rows: Rows, logits: bool = False) -> StepOutput:
        output = super().run(rows, logits=logits)
        when = self.drafted if len(rows.input_ids) > 1 else self.plainly if self.one_row else lambda _: False
        if not logits and not (len(rows.input_ids) > 1 and rows.tree_mask.all(where=np.tri(len(rows.input_ids), dtype=bool))):
            flip = np.array([when(p) for p in rows.position_ids[rows.logit_rows].tolist()])
            output = dataclasses.replace(output, next_ids=np.where(flip, (output.next_ids + 1) % self.vocab_size, output.next_ids))
        return output


@pytest.mark.parametrize(
    ("drafted", "plainly", "passes"),
    [
        (lambda _: False, lambda p: p % 7 == 0, True),  # trees are exact
        (lambda p: p == 9, lambda p: p % 7 == 0, True),  # they flip less than one row against several does
        (lambda p: p % 5 == 0, lambda p: p == 14, False),  # more
        (lambda p: p == 9, lambda _: False, False),  # nothing is rounded by number of rows, so nothing may flip
    ],
)
def test_rounded_activations_may_flip_as_often_as_plain_decoding_does(
    drafted: Callable[[int], bool], plainly: Callable[[int], bool], passes: bool
) -> None:
    model = Rounding(drafted, plainly)

    def one_row(wanted: bool) -> None:
        model.one_row = wanted

    one_row(False)
    report = verify(model, PROMPTS, StreamDrafter(), max_new_tokens=20, one_row=one_row)
    assert report.one_row_flip_rate is not None
    assert (report.flip_rate > 0, report.one_row_flip_rate > 0) == (any(map(drafted, range(25))), any(map(plainly, range(25))))
    assert report.passed is passes
    assert verify(FakeModel(), PROMPTS, StreamDrafter(), max_new_tokens=20).one_row_flip_rate is None


def test_an_exact_model_passes() -> None:
    done: list[int] = []
    report = verify(FakeModel(skill=0.7), PROMPTS, StreamDrafter(), max_new_tokens=20, on_prompt=done.append)
    assert report.passed
    assert done == [1, 2, 3, 4]
    assert (report.prompts, report.tokens, report.differences, report.near_ties, report.flip_rate) == (4, 80, 0, 0, 0.0)
    assert report.rows_independent
    assert report.rows_max_abs_diff == 0
    assert report.reference == "plain"
    assert report.mismatches == ()
    assert report.tokens_per_call is not None
    assert 1 < report.tokens_per_call <= 4


def test_tokens_per_call_is_pooled() -> None:
    drafter, calls, tokens = StreamDrafter(), 0, 0
    for prompt in PROMPTS:
        blocks = list(speculate(FakeModel(skill=0.7), prompt, drafter, max_new_tokens=20))
        calls += len(blocks) - 1
        tokens += sum(len(block.tokens) for block in blocks) - 1
    report = verify(FakeModel(skill=0.7), PROMPTS, drafter, max_new_tokens=20)
    assert report.tokens_per_call == tokens / calls


@pytest.mark.parametrize(("gap", "near"), [(5e-4, True), (2e-3, False)])
def test_near_ties_are_told_from_differences(gap: float, near: bool) -> None:
    report = verify(Flipping(gap), PROMPTS, StreamDrafter(), max_new_tokens=20)
    assert report.mismatches
    assert all(m.near_tie == near for m in report.mismatches)
    assert (report.near_ties, report.differences) == ((len(report.mismatches), 0) if near else (0, len(report.mismatches)))
    assert report.passed == near
    assert report.flip_rate == len(report.mismatches) / report.tokens
    for mismatch in report.mismatches:
        truth = plain(PROMPTS[mismatch.prompt])
        assert mismatch.other == mismatch.best[0] == truth[mismatch.position]
        assert mismatch.speculative == mismatch.best[1]
        assert mismatch.logits[0] - mismatch.logits[1] == pytest.approx(gap, abs=1e-6)
        assert mismatch.against == "plain"
    json.dumps(report.to_json())


SAMPLING = Sampling(0.7, top_k=30, repetition_penalty=1.1, seed=5)


def test_sampled_text_is_compared_with_plain_sampled_text() -> None:
    report = verify(FakeModel(skill=0.7), PROMPTS, StreamDrafter(), max_new_tokens=20, sampling=SAMPLING)
    assert report.passed
    assert (report.tokens, report.differences, report.near_ties) == (80, 0, 0)
    assert report.tokens_per_call is not None
    assert report.tokens_per_call > 1


class Drifting(FakeModel):
    """In calls of several rows, each logit is off by up to ``error``; the two best are closer than ``NEAR_TIE``."""

    def __init__(self, error: float) -> None:
        super().__init__(skill=0.5)
        self.error = error

    def _logits(self, entry: int) -> np.ndarray:
        scores = super()._logits(entry)
        best, second = np.argsort(-scores)[:2]
        scores[second] = scores[best] - 5e-4
        return scores

    def run(self, rows: Rows, logits: bool = False) -> StepOutput:
        output = super().run(rows, logits)
        if logits and len(rows.input_ids) > 1 and len(rows.logit_rows) > 1:
            assert output.logits is not None
            drift = np.random.default_rng(len(self.calls)).uniform(-self.error, self.error, output.logits.shape)
            output = dataclasses.replace(output, logits=(output.logits + drift).astype(np.float32))
        return output


def test_near_ties_of_sampled_texts() -> None:
    """Errors of fp32's size change little, and what they change is a near-tie; larger errors make differences."""
    cold, warm = Sampling(1e-3, top_p=0.7, seed=3), Sampling(1.0, top_p=0.9, seed=3)
    small = verify(Drifting(4e-4), PROMPTS, StreamDrafter(), max_new_tokens=20, sampling=cold)
    assert small.near_ties >= 3
    assert small.differences == 0
    large = verify(Drifting(0.2), PROMPTS, StreamDrafter(), max_new_tokens=20, sampling=warm)
    assert large.differences >= 3
    for report, sampling in ((small, cold), (large, warm)):
        for mismatch in report.mismatches:
            truth = plain(PROMPTS[mismatch.prompt], sampling=sampling, model=Drifting(0))
            assert mismatch.other == mismatch.best[0] == truth[mismatch.position]


@given(
    seed=st.integers(0, 10**6),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.integers(0, 20),
    top_p=st.sampled_from([0.2, 0.6, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 0.5]),
    penalty=st.sampled_from([0.7, 1.0, 1.5]),
)
def test_what_could_win_covers_every_small_error(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, penalty: float
) -> None:
    rng = np.random.default_rng(seed)
    # Many logits lie so close together that errors swap them, at the filters' bounds too.
    logits = (np.round(rng.standard_normal(50) * 2) + rng.uniform(0, 1e-3, 50)).astype(np.float32)
    sampling = Sampling(temperature, top_k, top_p, min_p, penalty, seed=seed)
    history = History([1, 2], [3, 4])
    possible = could_win(logits, 9, history, sampling)
    assert pick(logits, 9, history, sampling) in possible
    for _ in range(20):
        error = rng.choice([-1, 1], 50) * NEAR_TIE / 2 * 0.999
        assert pick(logits.astype(np.float64) + error, 9, history, sampling) in possible
    assert temperature > 0 or len(possible) < 50


def test_what_could_win_is_seldom_more_than_the_winner() -> None:
    logits = (np.random.default_rng(0).standard_normal(1000) * 3).astype(np.float32)
    counts = [len(could_win(logits, position, NO_HISTORY, Sampling(top_p=0.9))) for position in range(200)]
    assert sum(count > 1 for count in counts) < 6


def test_a_reference_is_compared_too() -> None:
    def reference(prompt: list[int], limit: int) -> list[int]:
        text = plain(prompt, limit)
        return [*text[:7], text[7] ^ 1, *text[8:]] if prompt == [6] else text[:3] if prompt == [4, 5] else text

    report = verify(FakeModel(), PROMPTS, StreamDrafter(), max_new_tokens=20, reference=reference, reference_name="other")
    assert report.reference == "other"
    assert not report.passed
    assert report.flip_rate == 0
    found = {(m.prompt, m.position, m.against, m.other is None) for m in report.mismatches}
    assert found == {(1, 3, "reference", True), (2, 7, "reference", False)}
    assert report.differences == 2


class Mixing(FakeModel):
    """A model whose rows depend on how many others are in the call, as with one activation scale for all of them."""

    def run(self, rows: Rows, logits: bool = False) -> StepOutput:
        output = super().run(rows, logits)
        return dataclasses.replace(output, logits=output.logits * (1 + 0.01 * len(rows.input_ids)) if logits else None)


def test_rows_that_depend_on_their_neighbours_are_found() -> None:
    report = verify(Mixing(), PROMPTS, StreamDrafter(), max_new_tokens=20)
    assert not report.rows_independent
    assert report.rows_max_abs_diff > 0.01
    assert not report.passed
    assert report.differences == 0


def test_rows_near_the_capacity() -> None:
    model = FakeModel(capacity=8)
    assert compare_rows(model, [1] * 8, [2, 3]) == (0.0, False)
    assert compare_rows(model, [1] * 7, [2, 3]) == (0.0, False)
    assert len(model.calls[-1].input_ids) == 1
    assert compare_rows(model, [1] * 5, [2, 3, 4]) == (0.0, False)
    assert len(model.calls[-1].input_ids) == 3


def test_something_must_be_compared() -> None:
    with pytest.raises(UserError, match="no prompts"):
        verify(FakeModel(), [], StreamDrafter())
