"""The loop with seeded sampling: the same text with any drafter, budget and tree, and it is that of the documentation's own code."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specstream.models.errors import UserError
from specstream.runtimes import speculate as loop
from specstream.runtimes.drafters import NoDrafter, StreamDrafter
from specstream.runtimes.sampling import History, Sampling, pick
from specstream.runtimes.session import Rows, StepOutput, prefill, tree_rows
from specstream.runtimes.speculate import speculate
from specstream.runtimes.tree import root_only

from .drafters import SPOILS, AlwaysRight, AlwaysWrong, Broken, Empty, OverBudget, Randomly
from .fake_model import FakeModel
from .test_sampling import SCALAR
from .test_speculate import POLICIES, Restless, compare_with_plain, emitted, requests

samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.2, 0.5, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 5, 20]),
    top_p=st.sampled_from([1.0, 0.9, 0.4]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 2**64 - 1),
)


def by_hand(prompt: list[int], count: int, sampling: Sampling) -> list[int]:
    """Plain decoding, token by token, with the code of docs/sampling.md."""
    model = FakeModel(capacity=200)
    logits = prefill(model, prompt, logits=True).logits
    generated: list[int] = []
    while True:
        assert logits is not None
        position = len(prompt) + len(generated)
        generated.append(SCALAR.sample(logits[0].tolist(), position, prompt, generated, sampling))
        if len(generated) == count:
            return generated
        logits = model.run(tree_rows(root_only(generated[-1]), model.length), logits=True).logits
        model.commit([0])


@given(prompt=st.lists(st.integers(0, 39), min_size=1, max_size=30), chunk=st.sampled_from([1, 7, 64]), sampling=samplings)
def test_plain_sampled_text_is_that_of_the_documentation(prompt: list[int], chunk: int, sampling: Sampling) -> None:
    blocks = list(speculate(FakeModel(), prompt, NoDrafter(), max_new_tokens=25, chunk=chunk, sampling=sampling))
    assert emitted(blocks) == by_hand(prompt, 25, sampling)


@pytest.mark.parametrize("maker", [AlwaysRight, AlwaysWrong, OverBudget])
@given(request=requests, sampling=samplings)
def test_right_and_wrong_drafts(maker: type, request: dict[str, Any], sampling: Sampling) -> None:
    _, blocks = compare_with_plain(None, maker=maker, sampling=sampling, **request)
    if maker is AlwaysWrong:
        assert all(block.accepted == 0 for block in blocks)
    elif maker is AlwaysRight:
        assert all(len(block.tokens) == block.rows for block in blocks[1:-1])


@given(request=requests, seed=st.integers(0, 10**6), sampling=samplings)
def test_random_trees(request: dict[str, Any], seed: int, sampling: Sampling) -> None:
    compare_with_plain(None, maker=lambda truth: Randomly(truth, seed=seed), sampling=sampling, **request)  # type: ignore[arg-type]


@given(request=requests, sampling=samplings)
def test_empty_drafts(request: dict[str, Any], sampling: Sampling) -> None:
    compare_with_plain(Empty(), sampling=sampling, **request)


@pytest.mark.parametrize("spoil", SPOILS, ids=lambda spoil: spoil.__name__)
def test_broken_drafts(spoil: Any) -> None:
    sampling = Sampling(0.8, repetition_penalty=1.2, seed=9)
    request = {"max_new_tokens": 30, "budget": 6, "sampling": sampling}
    compare_with_plain(None, [3, 1, 4], maker=lambda truth: Broken(truth, spoil=spoil), **request)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", POLICIES)
@given(request=requests, skill=st.sampled_from([0.0, 0.5, 1.0]), capacity=st.integers(31, 96), sampling=samplings)
def test_streams(policy: str, request: dict[str, Any], skill: float, capacity: int, sampling: Sampling) -> None:
    model = FakeModel(skill=skill, capacity=capacity)
    compare_with_plain(StreamDrafter(), model=model, policy=POLICIES[policy], sampling=sampling, **request)


@given(request=requests, skill=st.sampled_from([0.0, 0.5, 1.0]), capacity=st.integers(31, 96), sampling=samplings)
def test_delayed_streams(request: dict[str, Any], skill: float, capacity: int, sampling: Sampling) -> None:
    model = FakeModel(skill=skill, capacity=capacity, delayed=True, greedy=False)
    compare_with_plain(StreamDrafter(), model=model, sampling=sampling, **request)


@given(request=requests, delayed=st.booleans(), seed=st.integers(0, 10**6), sampling=samplings)
def test_a_budget_that_changes(request: dict[str, Any], delayed: bool, seed: int, sampling: Sampling) -> None:
    controller = Restless(seed, int(request["budget"]))
    model = FakeModel(delayed=delayed, greedy=False)
    compare_with_plain(StreamDrafter(), model=model, controller=controller, sampling=sampling, **request)


def test_streams_are_accepted_at_a_low_temperature() -> None:
    """Drafts of the greedy text are worth something as long as sampling mostly follows it."""
    saved = {}
    for temperature in (0.05, 1.0):
        sampling = Sampling(temperature, seed=1)
        _, blocks = compare_with_plain(StreamDrafter(), prompt=[3, 1, 4], max_new_tokens=60, sampling=sampling)
        saved[temperature] = sum(block.accepted for block in blocks)
    assert saved[0.05] > 30
    assert saved[0.05] > saved[1.0]


def test_one_token_is_sampled_for_each_that_is_emitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rows a call has: filters and noise of rows off the path would cost more than they give."""
    positions: list[int] = []

    def counting(logits: np.ndarray, position: int, history: History, sampling: Sampling) -> int:
        positions.append(position)
        return pick(logits, position, history, sampling)

    monkeypatch.setattr(loop, "pick", counting)
    model = FakeModel()
    blocks = list(speculate(model, [3, 1, 4], StreamDrafter(), budget=12, max_new_tokens=40, sampling=Sampling(0.3, seed=2)))
    assert any(block.accepted for block in blocks)
    assert max(len(rows.input_ids) for rows in model.calls) > 6
    assert positions == list(range(3, 43))


class Watching(FakeModel):
    """Notes which calls are asked for logits."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[bool] = []

    def run(self, rows: Rows, logits: bool = False) -> StepOutput:
        self.asked.append(logits)
        return super().run(rows, logits)


@pytest.mark.parametrize("sampling", [None, Sampling(0.0), Sampling(0.0, top_k=3, seed=8)])
def test_greedy_decoding_fetches_no_logits(sampling: Sampling | None) -> None:
    model = Watching()
    blocks = list(speculate(model, [3, 1, 4], StreamDrafter(), max_new_tokens=20, sampling=sampling))
    assert not any(model.asked)
    assert emitted(blocks) == emitted(list(speculate(FakeModel(), [3, 1, 4], NoDrafter(), max_new_tokens=20)))


def test_a_prompt_in_chunks_fetches_the_last_ones_logits_only() -> None:
    model = Watching()
    list(speculate(model, [3, 1, 4, 1, 5], NoDrafter(), max_new_tokens=2, chunk=2, sampling=Sampling()))
    assert model.asked == [False, False, True, True]


# Penalties: the history of a row is the text and its own path


def test_tokens_of_a_path_are_penalised_in_its_own_rows_only() -> None:
    """Nothing may come twice: a drafted token counts for the rows below it, and not for its siblings and their children."""
    sampling = Sampling(0.0, presence_penalty=100)
    _, blocks = compare_with_plain(None, [3, 1, 4], maker=AlwaysRight, max_new_tokens=40, budget=9, sampling=sampling)
    text = emitted(blocks)
    assert len(set(text)) == len(text) == 40
    assert [len(block.tokens) for block in blocks[1:5]] == [9, 9, 9, 9]
    for seed in range(20):
        compare_with_plain(
            None, [3, 1, 4], maker=lambda truth, s=seed: Randomly(truth, seed=s), max_new_tokens=40, budget=9, sampling=sampling
        )


def test_the_prompt_counts_for_repetition_alone() -> None:
    prompt = [token for token in range(40) if token != 7]
    sampled = {"max_new_tokens": 1, "sampling": Sampling(0.0, repetition_penalty=100)}
    assert emitted(list(speculate(FakeModel(), prompt, NoDrafter(), **sampled))) == [7]  # type: ignore[arg-type]
    greedy = emitted(list(speculate(FakeModel(), prompt, NoDrafter(), max_new_tokens=1)))
    assert greedy != [7]
    for penalty in ({"presence_penalty": 100}, {"frequency_penalty": 100}):
        sampled = {"max_new_tokens": 1, "sampling": Sampling(0.0, **penalty)}  # type: ignore[arg-type]
        assert emitted(list(speculate(FakeModel(), prompt, NoDrafter(), **sampled))) == greedy  # type: ignore[arg-type]


# Ends


@pytest.mark.parametrize("offset", range(0, 9))
def test_a_stop_token_inside_an_accepted_block_cuts_it(offset: int) -> None:
    prompt, sampling = [2, 7, 1], Sampling(0.9, presence_penalty=0.2, seed=4)
    truth = by_hand(prompt, 30, sampling)
    stop = truth[offset]
    request = {"stop_ids": {stop}, "max_new_tokens": 30, "budget": 6, "sampling": sampling}
    _, blocks = compare_with_plain(None, prompt, maker=AlwaysRight, **request)
    assert emitted(blocks) == truth[: truth.index(stop) + 1]
    assert blocks[-1].finish_reason == "stop"


def test_a_text_goes_on_after_its_own_beginning() -> None:
    """Positions are absolute: with the beginning of a text in the prompt, the same seed goes on as before (without penalties)."""
    sampling = Sampling(1.0, top_p=0.9, seed=6)
    whole = by_hand([3, 1, 4], 30, sampling)
    rest = list(speculate(FakeModel(), [3, 1, 4, *whole[:12]], NoDrafter(), max_new_tokens=18, sampling=sampling))
    assert emitted(rest) == whole[12:]
    model = FakeModel()
    list(speculate(model, [3, 1, 4], NoDrafter(), max_new_tokens=9, sampling=sampling))
    model.rewind(7)
    again = list(speculate(model, [3, 1, 4, *whole[:12]], StreamDrafter(), max_new_tokens=18, sampling=sampling))
    assert emitted(again) == whole[12:]


def test_bad_requests_fail_before_any_call() -> None:
    model = FakeModel()
    with pytest.raises(UserError, match="prompt is empty"):
        speculate(model, [], NoDrafter(), sampling=Sampling())
    assert not model.calls
