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

_GRID = torch.exp(torch.linspace(-1.4, 0.9, 47))  # temperatures 0.25 to 2.5


@dataclass(frozen=True)
class HeldOut:
    """How streams do on held-out rows. All [γ]."""

    temperatures: Tensor
    agreement: list[float]  # the stream's first choice is the model's own
    loss: list[float]  # cross-entropy to the model's own choice, at temperature 1


@torch.no_grad()
def fit_temperatures(model: StreamModel, rows: Sequence[TokenRow], batch_size: int = 8) -> HeldOut:
    """Fit each stream's temperature by the likelihood of the model's own (greedy) next tokens on the same prefix.

    The likelihood is that of what a device sees: the top k of a stream, and everything else as one more outcome
    (``specstream.runtimes.drafters.calibrate``).
    """
    assert model.config is not None
    gamma, top_k = model.config.num_streams, model.config.top_k
    device = model.stream_vectors.device
    losses = torch.zeros(gamma, len(_GRID))
    plain, hits, counts = torch.zeros(gamma), torch.zeros(gamma), torch.zeros(gamma)
    for start in range(0, len(rows), batch_size):
        batch = make_batch(rows[start : start + batch_size])
        ids, anchors = batch.ids.to(device), batch.anchors.to(device)
        main = model.main_pass(ids)
        chosen = teacher_logits(model, main, anchors).argmax(-1)  # [B, A]
        corrections = ids.gather(1, anchors + 1) if model.config.placement == "delayed" else None
        states = model.stream_pass(main, anchors, corrections)  # [B, A, γ, H]
        column = torch.arange(anchors.shape[1])
        for j in range(gamma):
            real = (column + j + 1 < batch.counts.unsqueeze(1)).to(device)
            wanted = chosen.roll(-(j + 1), dims=1)[real]
            scores = torch.log_softmax(model.draft_head(states[:, :, j][real]).float(), dim=-1)  # [n, Vd]
            best, index = scores.topk(top_k, dim=-1)
            known = index == wanted.unsqueeze(1)  # [n, k]
            hits[j] += float(known[:, 0].sum())
            counts[j] += len(wanted)
            plain[j] -= float(scores.gather(1, wanted.unsqueeze(1)).sum())
            losses[j] += _outcome_losses(best, known)
    counts = counts.clamp(min=1)
    return HeldOut(_GRID[losses.argmin(dim=1)], (hits / counts).tolist(), (plain / counts).tolist())


def _outcome_losses(best: Tensor, known: Tensor) -> Tensor:
    """Negative log-likelihood, summed, at every temperature of the grid.

    Args:
        best: float [n, k], log-probabilities of the top k.
        known: bool [n, k], which of them came true; none in a row: the rest did.
    """
    rest = torch.log((1.0 - best.exp().sum(1, keepdim=True)).clamp(min=1e-9))
    outcomes = torch.cat([best, rest], dim=1)
    true = torch.cat([known, ~known.any(1, keepdim=True)], dim=1)
    scaled = torch.log_softmax(outcomes / _GRID.view(-1, 1, 1).to(best.device), dim=-1)  # [grid, n, k + 1]
    return -scaled[:, true].sum(1).cpu()
