"""One temperature per stream, fitted on held-out rows, so that the product of drafted probabilities along a path is a fair
estimate of its chance to be accepted: trees are grown from it. Knows a model with streams and rows of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specstream.models.data import TokenRow, make_batch
from specstream.models.loss import teacher_logits
from specstream.models.stream_model import StreamModel

_GRID = torch.exp(torch.linspace(-0.7, 0.9, 33))  # temperatures 0.5 to 2.5


@dataclass(frozen=True)
class HeldOut:
    """How streams do on held-out rows. All [γ]."""

    temperatures: Tensor
    agreement: list[float]  # the stream's first choice is the model's own
    loss: list[float]  # cross-entropy to the model's own choice, at temperature 1


@torch.no_grad()
def fit_temperatures(model: StreamModel, rows: Sequence[TokenRow], batch_size: int = 8) -> HeldOut:
    """Fit each stream's temperature by the likelihood of the model's own (greedy) next tokens on the same prefix."""
    assert model.config is not None
    gamma = model.config.num_streams
    device = model.stream_vectors.device
    losses = torch.zeros(gamma, len(_GRID))
    plain, hits, counts = torch.zeros(gamma), torch.zeros(gamma), torch.zeros(gamma)
    for start in range(0, len(rows), batch_size):
        batch = make_batch(rows[start : start + batch_size])
        anchors = batch.anchors.to(device)
        main = model.main_pass(batch.ids.to(device))
        chosen = teacher_logits(model, main, anchors).argmax(-1)  # [B, A]
        logits = model.draft_head(model.stream_pass(main, anchors)).float()  # [B, A, γ, Vd]
        column = torch.arange(anchors.shape[1])
        for j in range(gamma):
            real = (column + j + 1 < batch.counts.unsqueeze(1)).to(device)
            wanted = chosen.roll(-(j + 1), dims=1)[real]
            scores = logits[:, :, j][real]
            hits[j] += float((scores.argmax(-1) == wanted).sum())
            counts[j] += len(wanted)
            for i, temperature in enumerate(_GRID.tolist()):
                losses[j, i] += float(torch.nn.functional.cross_entropy(scores / temperature, wanted, reduction="sum"))
            plain[j] += float(torch.nn.functional.cross_entropy(scores, wanted, reduction="sum"))
    counts = counts.clamp(min=1)
    return HeldOut(_GRID[losses.argmin(dim=1)], (hits / counts).tolist(), (plain / counts).tolist())
