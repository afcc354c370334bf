"""What streams say on held-out rows, and one temperature per stream, fitted on it, so that the product of drafted probabilities along a
path is a fair estimate of its chance to be accepted: trees are grown from it. Knows a model with streams and rows of token ids."""

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
class RowDrafts:
    """The streams beside each anchor of a row, told the token after it if they are delayed, and what the model itself says.

    Attributes:
        chosen: int64 [A], the model's own next token after each anchor.
        ids: int64 [A, γ, k], candidates, best first.
        logprobs: float32 [A, γ, k].
        pairs: float32 [A, γ, k, k], see ``specstream.runtimes.drafters.Streams``; None without a pair head.
        own: int64 [A], the token of the draft vocabulary that the model prefers.
        text_logprobs: float32 [A], of the row's next token, by the model itself.
        own_logprobs: float32 [A, γ], of the tokens ``own`` that streams guess; beyond the row's end there are none (0).
    """

    chosen: Tensor
    ids: Tensor
    logprobs: Tensor
    pairs: Tensor | None
    own: Tensor
    text_logprobs: Tensor
    own_logprobs: Tensor


@dataclass(frozen=True)
class HeldOut:
    """How streams do on held-out rows. All [γ]."""

    temperatures: Tensor
    agreement: list[float]  # the stream's first choice is the model's own
    loss: list[float]  # cross-entropy to the model's own choice, at temperature 1


@torch.no_grad()
def held_out_drafts(model: StreamModel, rows: Sequence[TokenRow], batch_size: int = 8) -> list[RowDrafts]:
    """Run the streams beside every anchor of every row."""
    assert model.config is not None
    gamma, top_k = model.config.num_streams, model.config.top_k
    device = model.stream_vectors.device
    found: list[RowDrafts] = []
    for start in range(0, len(rows), batch_size):
        batch = make_batch(rows[start : start + batch_size])
        ids, anchors = batch.ids.to(device), batch.anchors.to(device)
        main = model.main_pass(ids)
        teacher = teacher_logits(model, main, anchors).argmax(-1)  # [B, A], places in the draft vocabulary
        corrections = ids.gather(1, anchors + 1) if model.config.placement == "delayed" else None
        states = model.stream_pass(main, anchors, corrections)  # [B, A, γ, H]
        for i, count in enumerate(batch.counts.tolist()):
            own = teacher[i, :count]
            said = torch.log_softmax(model.head(main.final[i, anchors[i, :count]]).float(), dim=-1)  # [A, V]
            chosen, text = said.argmax(-1), said.gather(1, ids[i, anchors[i, :count] + 1].unsqueeze(1)).squeeze(1)
            scores = torch.log_softmax(model.draft_head(states[i, :count]).float(), dim=-1)  # [A, γ, Vd]
            best, index = scores.topk(top_k, dim=-1)
            own_logprobs = torch.zeros(count, gamma, device=device)
            for j in range(min(gamma, count - 1)):
                own_logprobs[: count - j - 1, j] = scores[: count - j - 1, j].gather(1, own[j + 1 :].unsqueeze(1)).squeeze(1)
            pairs = model.pair_scores(states[i, :count], index) if model.config.pair_rank else None
            tokens = (model.draft_vocab[x] if model.config.draft_vocab_size else x for x in (index, own))
            drafted, preferred = (x.cpu() for x in tokens)
            pairs = None if pairs is None else pairs.cpu()
            found.append(RowDrafts(chosen.cpu(), drafted, best.cpu(), pairs, preferred, text.cpu(), own_logprobs.cpu()))
    return found


def fit_temperatures(rows: Sequence[RowDrafts]) -> HeldOut:
    """Fit each stream's temperature by the likelihood of the model's own (greedy) next tokens on the same prefix.

    The likelihood is that of what a device sees: the top k of a stream, and everything else as one more outcome
    (``specstream.runtimes.drafters.calibrate``).
    """
    gamma = rows[0].ids.shape[1]
    temperatures: list[float] = []
    agreement: list[float] = []
    loss: list[float] = []
    for j in range(gamma):
        known = [row.ids[: len(row.own) - j - 1, j] == row.own[j + 1 :].unsqueeze(1) for row in rows if len(row.own) > j + 1]
        if not known:  # no row is that long
            temperatures.append(1.0)
            agreement.append(0.0)
            loss.append(0.0)
            continue
        best = [row.logprobs[: len(row.own) - j - 1, j] for row in rows if len(row.own) > j + 1]
        hits = torch.cat(known)
        temperatures.append(float(_GRID[_outcome_losses(torch.cat(best), hits).argmin()]))
        agreement.append(float(hits[:, 0].float().mean()))
        loss.append(-float(torch.cat([row.own_logprobs[: len(row.own) - j - 1, j] for row in rows if len(row.own) > j + 1]).mean()))
    return HeldOut(torch.tensor(temperatures), agreement, loss)


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
