"""A replay must say what speculation really does."""

from __future__ import annotations

import pytest

from specstream.runtimes.adaptive import AdaptiveBudget, CallCosts
from specstream.runtimes.drafters import NoDrafter, StreamDrafter
from specstream.runtimes.replay import record, replay
from specstream.runtimes.speculate import speculate
from specstream.runtimes.tree import every_row, likeliest_last, only_root

from .fake_model import FakeModel

PROMPT = [3, 1, 4, 1, 5]


@pytest.mark.parametrize("limit", [1, 2, 40])
@pytest.mark.parametrize("skill", [0.5, 1.0])
@pytest.mark.parametrize("policy", [every_row, only_root, likeliest_last(2)])
@pytest.mark.parametrize("budget", [2, 8])
def test_replayed_calls_are_the_real_ones(limit: int, skill: float, policy: object, budget: int) -> None:
    model = FakeModel(skill=skill, capacity=256)
    recording = record(model, PROMPT, max_new_tokens=limit, stop_ids={7})
    assert len(recording.streams) == len(recording.tokens) - 1
    model.rewind(0)
    drafter = StreamDrafter()
    blocks = list(speculate(model, PROMPT, drafter, policy=policy, budget=budget, max_new_tokens=limit, stop_ids={7}))  # type: ignore[arg-type]
    assert tuple(token for block in blocks for token in block.tokens) == recording.tokens
    found = replay(recording, drafter, budget, policy)  # type: ignore[arg-type]
    assert found.emitted == tuple(len(block.tokens) for block in blocks[1:])
    assert found.rows == tuple(block.rows for block in blocks[1:])
    assert (found.tokens, found.calls) == (len(recording.tokens) - 1, len(blocks) - 1)


def test_without_a_policy_streams_are_always_the_freshest() -> None:
    recording = record(FakeModel(capacity=256), PROMPT, max_new_tokens=40, stop_ids=())
    assert replay(recording, StreamDrafter(), 12) == replay(recording, StreamDrafter(), 12, every_row)
    plain = replay(recording, NoDrafter(), 12)
    assert set(plain.emitted) == set(plain.rows) == {1}
    assert plain.expected == (1.0,) * 39


def test_an_adaptive_budget_decides_before_each_call() -> None:
    bad = record(FakeModel(skill=0.0, capacity=512), PROMPT, max_new_tokens=200, stop_ids=())
    costs = CallCosts((1, 2, 4, 8, 16, 32), (1.0, 1.1, 1.2, 1.5, 1.85, 2.7), streams=0.35)
    found = replay(bad, StreamDrafter(), AdaptiveBudget(costs))
    assert found.tokens == 199
    assert found.streams.count(False) > 150
    assert all(rows == 1 for rows, streams in zip(found.rows, found.streams, strict=True) if not streams)
    good = record(FakeModel(skill=1.0, capacity=512), PROMPT, max_new_tokens=200, stop_ids=())
    found = replay(good, StreamDrafter(), AdaptiveBudget())
    assert found.streams.count(False) <= 3  # once in a while, to know what calls without streams give
    assert found.calls < 80
