"""The training objective: next-token loss of the main rows and future-token losses of their streams.

PMLR v262, equation 7:  L = -α0 Σ_t log p(y_t+1) - Σ_j αj Σ_t log p(y_t+1+j). Targets are the reference tokens, or the model's
own distribution on the same prefix (distillation): what a draft has to meet is the model's choice, not the reference's.
Knows states and targets; nothing of data or optimizers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from specstream.models.data import Batch
from specstream.models.stream_model import MainPass, StreamModel

Targets = Literal["model", "reference"]

CHUNK = 128  # stream rows whose logits exist at once: [128, Vd] stays in the processor's cache
PAIR_CANDIDATES = 16  # of a stream, re-scored by the pair head in training


@dataclass(frozen=True)
class StreamSums:
    """Sums over the anchors of a part of a batch."""

    losses: Tensor  # [γ]
    weighted: Tensor  # [γ], each row's loss by the chance that the streams before it are right; equal to losses if not asked for
    correct: Tensor  # [γ], agreements with the model's own choice
    prune: Tensor  # []
    pair: Tensor  # []


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
    model: StreamModel,
    main: MainPass,
    batch: Batch,
    first: int,
    last: int,
    targets: Targets,
    token_index: Tensor | None,
    chance_power: float = 0.0,
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
        chance_power: of the chance that streams 1 to j - 1 are right, which row by row weighs the loss of stream j: a token is accepted
            after those before it only. The weight is exp(-power · Σ_i<j (loss_i - model's_i)), in which no gradient flows; what the model
            itself loses on the targets (with its own distribution for a target: its entropy) is no stream's fault. 0: no such weights.
    """
    assert model.config is not None
    gamma = model.config.num_streams
    device = batch.ids.device
    anchors = batch.anchors[:, first:last]
    following = batch.ids.gather(1, batch.anchors + 1)  # [B, A]: the token after each anchor
    corrections = following[:, first:last] if model.config.placement == "delayed" else None
    teacher = teacher_logits(model, main, batch.anchors[:, first : last + gamma])
    choice = teacher.argmax(-1)  # [B, n + γ]
    teacher = torch.softmax(teacher, dim=-1)
    states = model.stream_pass(main, anchors, corrections)  # [B, n, γ, H]
    # Stream j (from 1) of anchor column a predicts what the main row of column a + j predicts.
    here = torch.arange(first, first + anchors.shape[1], device=device)
    column = here.unsqueeze(1) + torch.arange(1, gamma + 1, device=device)  # [n, γ]
    real = column < batch.counts.view(-1, 1, 1)  # [B, n, γ]
    column = column.clamp(max=batch.anchors.shape[1] - 1).expand_as(real)
    example = torch.arange(batch.ids.shape[0], device=device).view(-1, 1, 1).expand_as(real)[real]  # [R]
    stream = torch.arange(gamma, device=device).expand_as(real)[real]  # [R]
    column = column[real]
    # Rows of the teacher, flat: [B · (n + γ)].
    place = example * teacher.shape[1] + column - first
    wanted: Tensor | None = None
    if targets == "reference":
        tokens = following[example, column]
        wanted = tokens if token_index is None else token_index[tokens]
    picked = states[real]
    keep = PAIR_CANDIDATES if model.config.pair_rank else 0
    loss, guess, best, index = _DraftLoss.apply(  # type: ignore[no-untyped-call]
        picked, model, teacher.flatten(0, 1), place, wanted, keep
    )
    zeros = torch.zeros(gamma, dtype=loss.dtype, device=device)
    sums = weighted = zeros.index_add(0, stream, loss)
    if chance_power:
        beyond = torch.zeros(real.shape, dtype=loss.dtype, device=device)
        beyond[real] = (loss.detach() - _model_loss(teacher, wanted, place)).clamp(min=0)
        weighted = zeros.index_add(0, stream, loss * torch.exp(chance_power * (beyond - beyond.cumsum(-1)))[real])
    correct = zeros.index_add(0, stream, (guess == choice.flatten()[place]).to(loss.dtype))
    pair = torch.zeros((), device=device)
    if keep:
        parents = following[example, (column - 1).clamp(min=0)]
        inside_vocab = parents if token_index is None else token_index[parents]
        # The first stream knows its parent, the correction, from the start.
        chosen = (stream > 0) & (inside_vocab >= 0)
        pair = _pair_loss(
            model, picked.detach()[chosen], inside_vocab[chosen], best[chosen], index[chosen], teacher.flatten(0, 1), place[chosen]
        )
    prune = torch.zeros((), device=device)
    if model.config.prune_rank:
        inside = here < batch.counts.unsqueeze(1)  # [B, n]
        entry = main.entry.detach().gather(1, anchors.unsqueeze(2).expand(-1, -1, main.entry.shape[2]))
        early = model.prune_logits(entry[inside]).float()
        prune = nn.functional.cross_entropy(early, teacher[:, : anchors.shape[1]][inside], reduction="sum")
    return StreamSums(sums, weighted, correct, prune, pair)


def _model_loss(teacher: Tensor, wanted: Tensor | None, place: Tensor) -> Tensor:
    """What the model loses on the streams' targets: float32 [R], in nats.

    Args:
        teacher: float32 [B, N, Vd], probabilities.
        wanted: int64 [R], places of target tokens in the draft vocabulary or -1 (no loss); None: the teacher is the target.
        place: int64 [R], row of the flat teacher that each stream's row has for a target.
    """
    if wanted is None:
        entropy: Tensor = torch.special.entr(teacher).sum(-1)
        return entropy.flatten()[place]
    likely = teacher.flatten(0, 1)[place, wanted.clamp(min=0)]
    return -torch.log(likely.clamp(min=torch.finfo(likely.dtype).tiny))


class _DraftLoss(torch.autograd.Function):
    """Cross-entropy of the draft head, row by row, without ever holding the logits of all rows.

    Each row's loss has one upstream factor, so its gradient by the state is found chunk by chunk on the way forward.
    """

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, model: StreamModel, teacher: Tensor, place: Tensor, wanted: Tensor | None, keep: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """states [R, H], teacher [N, Vd] (probabilities), place int64 [R] (row of the teacher) -> losses [R], argmax int64 [R],
        log-probabilities and places of the ``keep`` best [R, keep]."""
        losses, guesses, bests, indices = [], [], [], []
        gradients: list[Tensor] = []
        learning = ctx.needs_input_grad[0]
        for start in range(0, max(states.shape[0], 1), CHUNK):
            part = states[start : start + CHUNK].detach().requires_grad_(learning)
            with torch.set_grad_enabled(learning):
                logits = model.draft_head(part).float()
                if wanted is None:
                    loss = nn.functional.cross_entropy(logits, teacher[place[start : start + CHUNK]], reduction="none")
                else:
                    loss = nn.functional.cross_entropy(logits, wanted[start : start + CHUNK], reduction="none", ignore_index=-1)
            if learning:
                gradients += torch.autograd.grad(loss, part, torch.ones_like(loss))
            logits = logits.detach()
            losses.append(loss.detach())
            best, index = logits.topk(max(keep, 1), dim=-1)
            guesses.append(index[:, 0])
            if keep:
                best = best - torch.logsumexp(logits, dim=-1, keepdim=True)
            bests.append(best[:, :keep])
            indices.append(index[:, :keep])
        if learning:
            ctx.save_for_backward(torch.cat(gradients))
        results = torch.cat(losses), torch.cat(guesses), torch.cat(bests), torch.cat(indices)
        ctx.mark_non_differentiable(*results[1:])
        return results

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream[0].unsqueeze(1).to(gradient.dtype), None, None, None, None, None


def _pair_loss(model: StreamModel, states: Tensor, parents: Tensor, best: Tensor, index: Tensor, teacher: Tensor, place: Tensor) -> Tensor:
    """Cross-entropy, summed, of what a device sees: a stream's best candidates re-scored for their parent, and all others as one.

    Args:
        states: [R, H], streams after the last layer.
        parents: int64 [R], place of the token before the predicted one in the draft vocabulary.
        best: float [R, K], log-probabilities of the stream's best candidates.
        index: int64 [R, K], their places.
        teacher: float [N, Vd].
        place: int64 [R], row of the teacher.
    """
    by_parent, by_child = model.pair_tables()
    mix = nn.functional.silu(nn.functional.embedding(parents, by_parent).float() + model.pair_context(states))
    scores = torch.einsum("nr,nkr->nk", mix, nn.functional.embedding(index, by_child).float())
    rest = torch.log((1.0 - best.exp().sum(1, keepdim=True)).clamp(min=1e-6))
    outcomes = torch.cat([best + scores, rest], dim=1)
    wanted = teacher[place.unsqueeze(1), index]
    wanted = torch.cat([wanted, (1.0 - wanted.sum(1, keepdim=True)).clamp(min=0.0)], dim=1)
    return nn.functional.cross_entropy(outcomes, wanted, reduction="sum")
