"""The objective against its definition, written out token by token."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch

from specstream.models.data import Batch, TokenRow, make_batch
from specstream.models.loss import _model_loss, main_loss_sum, stream_sums
from specstream.models.stream_model import StreamModel

from ..export.tiny import tiny_model

ROWS = [TokenRow((5, 6, 7, 8, 9, 10, 11, 2), 3), TokenRow((15, 16, 17, 18, 2), 2)]


def logits(model: StreamModel, ids: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Main logits [T, V] and stream logits [T, γ, V] of one row alone."""
    with torch.no_grad():
        main = model.main_pass(torch.tensor([ids]))
        streams = model.draft_head(model.stream_pass(main, torch.arange(len(ids))[None]))[0]
        return model.head(main.final)[0], streams


def test_main_loss() -> None:
    model = tiny_model("Llama")
    batch = make_batch(ROWS)
    expected = 0.0
    for row in ROWS:
        scores = torch.log_softmax(logits(model, row.ids)[0], dim=-1)
        expected -= sum(float(scores[t, row.ids[t + 1]]) for t in range(row.start - 1, len(row.ids) - 1))
    with torch.no_grad():
        assert float(main_loss_sum(model, model.main_pass(batch.ids), batch)) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("targets", ["model", "reference"])
@pytest.mark.parametrize("segment", [2, 64])
def test_stream_loss(targets: str, segment: int) -> None:
    """Stream j of row t has the target of the main row t + j; segments add up to the whole."""
    model = tiny_model("Llama")
    assert model.config is not None
    gamma = model.config.num_streams
    batch = make_batch(ROWS)
    expected, hits = [0.0] * gamma, [0] * gamma
    for row in ROWS:
        main, streams = logits(model, row.ids)
        scores = torch.log_softmax(streams, dim=-1)
        for t in range(row.start - 1, len(row.ids) - 1):
            for j in range(1, gamma + 1):
                if t + j >= len(row.ids) - 1:
                    continue
                if targets == "model":
                    expected[j - 1] -= float((torch.softmax(main[t + j], dim=-1) * scores[t, j - 1]).sum())
                else:
                    expected[j - 1] -= float(scores[t, j - 1, row.ids[t + j + 1]])
                hits[j - 1] += int(scores[t, j - 1].argmax() == main[t + j].argmax())
    total, correct = torch.zeros(gamma), torch.zeros(gamma)
    with torch.no_grad():
        rows = model.main_pass(batch.ids)
        for first in range(0, batch.anchors.shape[1], segment):
            sums = stream_sums(model, rows, batch, first, first + segment, targets, None)  # type: ignore[arg-type]
            total += sums.losses
            correct += sums.correct
    torch.testing.assert_close(total, torch.tensor(expected), rtol=1e-4, atol=1e-4)
    assert correct.tolist() == hits


@pytest.mark.parametrize("power", [0.5, 1.0])
@pytest.mark.parametrize("targets", ["model", "reference"])
def test_streams_weighted_by_the_chance_that_those_before_were_right(targets: Literal["model", "reference"], power: float) -> None:
    """Right as far as the model itself is: what it loses on a target is not held against streams."""
    model = tiny_model("Llama")
    assert model.config is not None
    gamma = model.config.num_streams
    expected = [0.0] * gamma
    for row in ROWS:
        main, streams = logits(model, row.ids)
        scores, own = torch.log_softmax(streams, dim=-1), torch.log_softmax(main, dim=-1)
        for t in range(row.start - 1, len(row.ids) - 1):
            before = 0.0
            for j in range(1, gamma + 1):
                if t + j < len(row.ids) - 1:
                    target = own[t + j].exp() if targets == "model" else torch.eye(own.shape[1])[row.ids[t + j + 1]]
                    loss, least = (-float((target * x).sum()) for x in (scores[t, j - 1], own[t + j]))
                    expected[j - 1] += math.exp(-power * before) * loss
                    before += max(loss - least, 0.0)
    batch = make_batch(ROWS)
    with torch.no_grad():
        rows = model.main_pass(batch.ids)
        sums = stream_sums(model, rows, batch, 0, 64, targets, None, power)
        plain = stream_sums(model, rows, batch, 0, 64, targets, None)
    torch.testing.assert_close(sums.weighted, torch.tensor(expected), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(sums.losses, plain.losses)
    torch.testing.assert_close(plain.weighted, plain.losses)


def test_streams_as_good_as_the_model_count_in_full() -> None:
    """However unsure the model is: with streams that guess as it does, weights do not fall."""
    teacher = torch.softmax(torch.randn(2, 6, 11, generator=torch.Generator().manual_seed(0)), dim=-1)
    place = torch.tensor([0, 5, 7, 11])
    entropy = torch.distributions.Categorical(probs=teacher.flatten(0, 1)[place]).entropy()
    torch.testing.assert_close(_model_loss(teacher, None, place), entropy)
    found = _model_loss(teacher, torch.tensor([3, -1, 0, 10]), place)
    torch.testing.assert_close(found[[0, 2, 3]], -teacher.flatten(0, 1)[place[[0, 2, 3]], [3, 0, 10]].log())
    assert found.isfinite().all()


def test_a_token_outside_the_draft_vocabulary_is_no_target() -> None:
    model = tiny_model("Qwen3")
    assert model.config is not None
    index = torch.full((97,), -1)
    index[model.draft_vocab] = torch.arange(len(model.draft_vocab))
    outside = next(t for t in range(3, 97) if index[t] < 0)
    batch = make_batch([TokenRow((5, 6, outside, outside, outside, outside), 1)])
    with torch.no_grad():
        sums = stream_sums(model, model.main_pass(batch.ids), batch, 0, 8, "reference", index)
    assert sums.losses.eq(0).all()


def test_streams_of_padding_count_nothing() -> None:
    model = tiny_model("Llama")
    alone, wide = make_batch([ROWS[1]]), make_batch(ROWS)
    part = Batch(wide.ids[1:], wide.anchors[1:], wide.counts[1:])
    with torch.no_grad():
        one = stream_sums(model, model.main_pass(alone.ids), alone, 0, 64, "model", None)
        two = stream_sums(model, model.main_pass(part.ids), part, 0, 64, "model", None)
    torch.testing.assert_close(one.losses, two.losses, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(one.prune, two.prune, atol=1e-4, rtol=1e-4)
