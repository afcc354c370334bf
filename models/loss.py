"""The training objective: next-token loss of the main rows and future-token losses of their streams.

PMLR v262, equation 7:  L = -α0 Σ_t log p(y_t+1) - Σ_j αj Σ_t log p(y_t+1+j). Targets are the reference tokens, or the model's
own distribution on the same prefix (distillation): what a draft has to meet is the model's choice, not the reference's.
Knows states and targets; nothing of data or optimizers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from specstream.models.data import Batch
from specstream.models.stream_model import MainPass, StreamModel

Targets = Literal["model", "reference"]


@dataclass(frozen=True)
class StreamSums:
    """Sums over the anchors of a part of a batch."""

    losses: Tensor  # [γ]
    correct: Tensor  # [γ], agreements with the model's own choice
    prune: Tensor  # []


def main_loss_sum(model: StreamModel, main: MainPass, batch: Batch) -> Tensor:
    """Cross-entropy of the completion's tokens, summed: -Σ log p(y_t+1) over real anchors."""
    picked = main.final.gather(1, batch.anchors.unsqueeze(2).expand(-1, -1, main.final.shape[2]))
    real = torch.arange(batch.anchors.shape[1], device=batch.ids.device) < batch.counts.unsqueeze(1)
    targets = batch.ids.gather(1, batch.anchors + 1)
    return nn.functional.cross_entropy(model.head(picked[real]).float(), targets[real], reduction="sum")


@torch.no_grad()
def teacher_logits(model: StreamModel, main: MainPass, anchors: Tensor) -> Tensor:
    """The main rows' logits over the draft vocabulary: anchors int64 [B, n] -> float [B, n, Vd]."""
    picked = main.final.detach().gather(1, anchors.unsqueeze(2).expand(-1, -1, main.final.shape[2]))
    return model.draft_head(picked).float()


def stream_sums(
    model: StreamModel, main: MainPass, batch: Batch, first: int, last: int, targets: Targets, token_index: Tensor | None
) -> StreamSums:
    """Losses of the streams beside anchors ``first`` to ``last`` (a segment: it bounds the memory of stream rows).

    Args:
        model: with streams.
        main: main rows of the batch.
        batch: the batch.
        first: first anchor column of the segment.
        last: one past its last.
        targets: whose tokens to predict.
        token_index: int64 [V], place of a token in the draft vocabulary or -1; None when all tokens can be drafted.
    """
    assert model.config is not None
    gamma = model.config.num_streams
    anchors = batch.anchors[:, first:last]
    teacher = teacher_logits(model, main, batch.anchors[:, first : last + gamma])
    states = model.stream_pass(main, anchors)  # [B, n, γ, H]
    # Stream j (from 1) of anchor column a predicts what the main row of column a + j predicts.
    device = batch.ids.device
    here = torch.arange(first, first + anchors.shape[1], device=device)
    column = here.unsqueeze(1) + torch.arange(1, gamma + 1, device=device)  # [n, γ]
    real = column < batch.counts.view(-1, 1, 1)  # [B, n, γ]
    column = column.clamp(max=batch.anchors.shape[1] - 1)
    predicted = model.draft_head(states[real]).float()  # [R, Vd]
    wanted = teacher[:, column - first][real]  # [R, Vd]
    stream = torch.arange(gamma, device=device).expand_as(real)[real]  # [R]
    if targets == "model":
        loss = nn.functional.cross_entropy(predicted, torch.softmax(wanted, dim=-1), reduction="none")
    else:
        tokens = batch.ids.gather(1, batch.anchors + 1)[:, column][real]
        index = tokens if token_index is None else token_index[tokens]
        loss = nn.functional.cross_entropy(predicted, index, reduction="none", ignore_index=-1)
    hit = (predicted.argmax(-1) == wanted.argmax(-1)).to(loss.dtype)
    zeros = torch.zeros(gamma, dtype=loss.dtype, device=device)
    sums = zeros.index_add(0, stream, loss)
    correct = zeros.index_add(0, stream, hit.detach())
    prune = torch.zeros((), device=device)
    if model.config.prune_rank:
        inside = here < batch.counts.unsqueeze(1)  # [B, n]
        entry = main.entry.detach().gather(1, anchors.unsqueeze(2).expand(-1, -1, main.entry.shape[2]))
        early = model.prune_logits(entry[inside]).float()
        prune = nn.functional.cross_entropy(early, torch.softmax(teacher[:, : anchors.shape[1]][inside], dim=-1), reduction="sum")
    return StreamSums(sums, correct, prune)
