"""The stream-fused network: a Hugging Face decoder whose top layers also run γ streams beside chosen rows.

Speculative Streaming, arXiv 2402.11131 (v1) and PMLR v262 pp. 395-413. With M_t^l the main state of row t before layer l and
S_tj^l the state of stream j beside it (N layers, the top N_s multi-stream, l0 = N - N_s):

    S_tj^l0  = f_η(M_t^l0) + P_j                                   entry: one learned vector per stream
    M_t^l+1  = layer(M_t^l;  M_<=t^l)                              main rows never see stream rows
    S_tj^l+1 = layer(S_tj^l; M_<=t^l ⊕ S_t,<=j^l)                  multi-stream attention, LoRA on stream rows
    p(y_t+1)     = softmax(H(norm(M_t^N)))                         the next token
    p(y_t+1+j)   = softmax(H(norm(S_tj^N)))                        the token j places after the next one

Delayed placement: streams run in a pass of their own, once the row's next token c = y_t+1 (the correction) is known, and enter as

    S_tj^l0  = f_η(M_t^l0) + W E[c] + P_j                          W of low rank, E the embeddings scaled to RMS 1

and a small head re-scores the candidates of stream j for a given token p before them (a low-rank, state-dependent bigram):

    s(v | p) = SiLU(A E[p] + C norm(S_tj^N)) · B E[v]              added to the stream's own log-probability of v

Stream j of the row at position t stands at rotary position t + j, the place of the token that it would have to read to
predict the same target. The pruning adapter o_θ scores tokens early, from the state at l0: H(norm(M^l0 + o_θ M^l0)).

The decoder's own layers are called; they reach keys and values through a ``Cache`` (``attention.py``). Knows token ids and
states; nothing of tokenizers, files or training.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specstream.models.attention import ATTENTION_NAME, Cache, dense_attention
from specstream.models.config import StreamConfig
from specstream.models.lora import LoraLinear, RowGate, linear_names, unwrap, wrap

# All trained parameters of the streams but their LoRA.
SMALL_PARAMETERS = (
    "stream_vectors",
    "entry_down",
    "entry_up",
    "correction_down",
    "correction_up",
    "pair_parent",
    "pair_state",
    "pair_child",
    "prune_down",
    "prune_up",
)


@dataclass(frozen=True)
class StepTensors:
    """What one call returns (graph contract v1). Stream fields are None in a model without streams.

    ``entry`` has the states at which streams enter, for delayed placement only.
    """

    next_ids: Tensor  # int64 [L]
    logits: Tensor  # float [L, V]
    stream_ids: Tensor | None  # int64 [S, γ, k]
    stream_logprobs: Tensor | None  # float [S, γ, k]
    entry: Tensor | None = None  # float [T, H]


@dataclass(frozen=True)
class DraftTensors:
    """What the streams' own pass returns (graph contract v1, delayed placement)."""

    stream_ids: Tensor  # int64 [1, γ, k]
    stream_logprobs: Tensor  # float [1, γ, k]
    stream_pairs: Tensor | None  # float [1, γ, k, k]; None without a pair head


@dataclass(frozen=True)
class MainPass:
    """Main rows of a batch of whole sequences, as the streams need them. Sequences are padded on the right."""

    entry: Tensor  # [B, T, H], states at layer N - N_s
    final: Tensor  # [B, T, H], states after the last layer, before the norm
    keys: list[Tensor]  # of the top N_s layers, [B, kv_heads, T, d]
    values: list[Tensor]

    def detach(self) -> MainPass:
        """The same values as leaves; ``requires_grad`` where the original had it, to collect gradients piece by piece."""

        def leaf(x: Tensor) -> Tensor:
            return x.detach().requires_grad_(x.requires_grad)

        return MainPass(leaf(self.entry), self.final.detach(), [leaf(k) for k in self.keys], [leaf(v) for v in self.values])


class StreamModel(nn.Module):
    """A causal LM with streams.

    Args:
        base: a ``*ForCausalLM`` whose ``model`` has ``embed_tokens``, ``layers``, ``norm`` and ``rotary_emb``. Its layers are
            used in place: LoRA wrappers are put around linear layers of the top N_s layers when ``config`` asks for them.
        config: sizes of the streams; None for a plain model.
    """

    draft_vocab: Tensor  # int64 [Vd], empty when streams choose from all tokens

    def __init__(self, base: PreTrainedModel, config: StreamConfig | None) -> None:
        super().__init__()
        self.base = base
        self.config = config
        # Not set_attn_implementation: it checks kernels that an export never runs.
        base.config._attn_implementation = ATTENTION_NAME
        self.decoder: Any = base.model
        self.decoder.config._attn_implementation = ATTENTION_NAME
        text = base.config
        self.num_layers = int(text.num_hidden_layers)
        hidden = int(text.hidden_size)
        kind = text.model_type
        self._embed_scale = float(getattr(text, "embedding_multiplier", 1.0)) if kind != "gemma2" else hidden**0.5
        self._logit_divisor = float(getattr(text, "logits_scaling", 1.0))
        self._logit_softcap: float | None = getattr(text, "final_logit_softcapping", None)
        self.gate = RowGate()
        if config is None:
            return
        self.entry_layer = config.entry_layer
        self.stream_vectors = nn.Parameter(torch.zeros(config.num_streams, hidden))
        self.entry_down = nn.Parameter(torch.randn(config.entry_rank, hidden) / hidden**0.5)
        self.entry_up = nn.Parameter(torch.zeros(hidden, config.entry_rank))
        self.correction_down = nn.Parameter(torch.randn(config.correction_rank, hidden) / hidden**0.5)
        self.correction_up = nn.Parameter(torch.zeros(hidden, config.correction_rank))
        self.pair_parent = nn.Parameter(torch.randn(config.pair_rank, hidden) / hidden**0.5)
        self.pair_state = nn.Parameter(torch.zeros(config.pair_rank, hidden))
        self.pair_child = nn.Parameter(torch.zeros(config.pair_rank, hidden))
        self.prune_down = nn.Parameter(torch.randn(config.prune_rank, hidden) / hidden**0.5)
        self.prune_up = nn.Parameter(torch.zeros(hidden, config.prune_rank))
        self.correction_table: Tensor | None = None  # see freeze
        self._pair_tables: tuple[Tensor, Tensor] | None = None
        self.register_buffer("draft_vocab", torch.zeros(config.draft_vocab_size, dtype=torch.int64), persistent=False)
        if config.stream_rank:
            for index in range(self.entry_layer, self.num_layers):
                layer = self.decoder.layers[index]
                wrap(layer, linear_names(layer), config.stream_rank, config.stream_alpha, self.gate)

    # Pieces

    def embed(self, input_ids: Tensor) -> Tensor:
        """Token embeddings as the first layer wants them: int64 [B, T] -> [B, T, H]."""
        hidden: Tensor = self.decoder.embed_tokens(input_ids)
        return hidden if self._embed_scale == 1.0 else hidden * self._embed_scale

    def run_layers(self, hidden: Tensor, start: int, stop: int, positions: Tensor, cache: Cache) -> Tensor:
        """Decoder layers ``start`` to ``stop`` over rows [B, R, H] at absolute ``positions`` int64 [B, R]."""
        rotary = self.decoder.rotary_emb(hidden, positions)
        local = getattr(self.decoder, "rotary_emb_local", None)
        if local is None:
            places = {"position_embeddings": rotary}
        else:  # Gemma 3: sliding layers have a rotary base of their own
            places = {"position_embeddings_global": rotary, "position_embeddings_local": local(hidden, positions)}
        for layer in self.decoder.layers[start:stop]:
            out: Any = layer(hidden, attention_mask=None, position_ids=positions, row_cache=cache, **places)
            hidden = out[0] if isinstance(out, tuple) else out
        return hidden

    def head(self, hidden: Tensor) -> Tensor:
        """Logits over the whole vocabulary: [..., H] -> [..., V]."""
        return self._scale_logits(self.base.lm_head(self.decoder.norm(hidden)))

    def draft_head(self, hidden: Tensor) -> Tensor:
        """Logits over the draft vocabulary (all tokens when there is none): [..., H] -> [..., Vd]."""
        normed = self.decoder.norm(hidden)
        return self._scale_logits(nn.functional.linear(normed, self.draft_weight()))

    def draft_weight(self) -> Tensor:
        """Rows of the head that score the draft vocabulary: [Vd, H]."""
        weight: Tensor = self.base.lm_head.weight
        return nn.functional.embedding(self.draft_vocab, weight) if self.config is not None and self.config.draft_vocab_size else weight

    def stream_logprobs(self, logits: Tensor, best: Tensor) -> Tensor:
        """Log-probabilities of the best logits [R, k] among all of a stream [R, Vd]; an exporter may put another form in its place."""
        return best - torch.logsumexp(logits, dim=-1, keepdim=True)

    def _scale_logits(self, logits: Tensor) -> Tensor:
        if self._logit_divisor != 1.0:
            logits = logits / self._logit_divisor
        if self._logit_softcap is not None:
            logits = torch.tanh(logits / self._logit_softcap) * self._logit_softcap
        return logits

    def unit_embedding(self, tokens: Tensor | None) -> Tensor:
        """Embeddings at RMS 1: int64 [...] -> [..., H]; of the whole draft vocabulary, [Vd, H], for None."""
        weight: Tensor = self.decoder.embed_tokens.weight
        if tokens is None and self.config is not None and self.config.draft_vocab_size:
            tokens = self.draft_vocab
        found = (weight if tokens is None else nn.functional.embedding(tokens, weight)).float()
        return found * torch.rsqrt(found.pow(2).mean(-1, keepdim=True) + 1e-12)

    def enter(self, state: Tensor, corrections: Tensor | None = None) -> Tensor:
        """Stream rows that start beside main rows: f_η(M) + P_j, the streams of a row together.

        Args:
            state: [B, n, H].
            corrections: int64 [B, n], the tokens that follow those rows; for delayed placement only.

        Returns:
            [B, n·γ, H].
        """
        assert self.config is not None
        start = state
        if self.config.entry_rank:
            low = nn.functional.linear(state, self.entry_down.to(state.dtype))
            start = start + nn.functional.linear(low, self.entry_up.to(state.dtype))
        if self.config.placement == "delayed":
            assert corrections is not None
            if self.correction_table is not None:
                low = nn.functional.embedding(corrections, self.correction_table).float()
            else:
                low = nn.functional.linear(self.unit_embedding(corrections), self.correction_down)
            start = start + nn.functional.linear(low, self.correction_up).to(state.dtype)
        streams = start.unsqueeze(2) + self.stream_vectors.to(state.dtype)
        return streams.reshape(state.shape[0], -1, state.shape[2])

    def pair_tables(self) -> tuple[Tensor, Tensor]:
        """A E[p] and B E[v] of the draft vocabulary, [Vd, r] each: fp32, 16 bits once frozen."""
        if self._pair_tables is not None:
            return self._pair_tables
        unit = self.unit_embedding(None)
        return nn.functional.linear(unit, self.pair_parent), nn.functional.linear(unit, self.pair_child)

    @torch.no_grad()
    def freeze(self) -> None:
        """Compute what depends on parameters and tokens alone, once parameters no longer change: rows of small tables (16 bits) are
        then looked up instead of computed from embeddings."""
        if self.config is None or self.config.placement != "delayed":
            return
        everything = torch.arange(self.config.base.vocab_size)
        self.correction_table = nn.functional.linear(self.unit_embedding(everything), self.correction_down).half()
        if self.config.pair_rank:
            by_parent, by_child = self.pair_tables()
            self._pair_tables = by_parent.half(), by_child.half()

    def merge_streams(self) -> None:
        """Add the streams' LoRA to the weights of the top layers, in place: main rows are wrong from then on."""
        for layer in self.decoder.layers[self.entry_layer :]:
            unwrap(layer, merge=True)

    def pair_context(self, states: Tensor) -> Tensor:
        """C norm(S): stream states after the last layer [..., H] -> fp32 [..., r]."""
        return nn.functional.linear(self.decoder.norm(states).float(), self.pair_state)

    def pair_scores(self, states: Tensor, index: Tensor) -> Tensor:
        """Scores of every candidate below every candidate of the stream before it; nothing (zeros) for stream 1, which has none before.

        Args:
            states: [n, γ, H], after the last layer.
            index: int64 [n, γ, k], candidates, as places in the draft vocabulary.

        Returns:
            fp32 [n, γ, k, k].
        """
        by_parent, by_child = self.pair_tables()
        parents = nn.functional.embedding(index[:, :-1], by_parent).float()  # [n, γ - 1, k, r]
        mix = nn.functional.silu(parents + self.pair_context(states[:, 1:]).unsqueeze(2))
        scores = mix @ nn.functional.embedding(index[:, 1:], by_child).float().transpose(2, 3)
        return nn.functional.pad(scores, (0, 0, 0, 0, 1, 0))

    def prune_logits(self, entry: Tensor) -> Tensor:
        """Early next-token scores of the pruning adapter (PMLR v262, section 3.3): z = H(norm(M + o_θ M)), [..., H] -> [..., Vd]."""
        low = nn.functional.linear(entry, self.prune_down.to(entry.dtype))
        return self.draft_head(entry + nn.functional.linear(low, self.prune_up.to(entry.dtype)))

    # One call of the loop: graph contract v1

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        tree_mask: Tensor,
        logit_rows: Tensor,
        stream_rows: Tensor | None,
        cache: Cache,
    ) -> StepTensors:
        """One call over T main rows, S of which carry streams.

        Args:
            input_ids: int64 [1, T].
            position_ids: int64 [1, T].
            tree_mask: bool [T, T], row i may see row j.
            logit_rows: int64 [L], rows to score.
            stream_rows: int64 [S], rows that carry streams; None in a model without streams or with delayed ones.
            cache: committed rows.
        """
        positions = position_ids[0]
        hidden = self.embed(input_ids)
        self.gate.rows = None
        cache.set_rows(positions, tree_mask)
        if self.config is not None and self.config.placement == "delayed":
            entry = self.run_layers(hidden, 0, self.entry_layer, position_ids, cache)
            hidden = self.run_layers(entry, self.entry_layer, self.num_layers, position_ids, cache)
            return replace(self._outputs(hidden[0, logit_rows], None), entry=entry[0])
        if self.config is None or stream_rows is None:
            hidden = self.run_layers(hidden, 0, self.num_layers, position_ids, cache)
            return self._outputs(hidden[0, logit_rows], None)
        rows = input_ids.shape[1]
        hidden = self.run_layers(hidden, 0, self.entry_layer, position_ids, cache)
        streams = self.enter(hidden[:, stream_rows])
        hidden = torch.cat([hidden, streams], dim=1)
        all_positions, visible = fused_rows(positions, tree_mask, stream_rows, self.config.num_streams)
        cache.set_rows(all_positions, visible)
        self.gate.rows = (torch.arange(all_positions.shape[0], device=hidden.device) >= rows).to(hidden.dtype).unsqueeze(1)
        hidden = self.run_layers(hidden, self.entry_layer, self.num_layers, all_positions.unsqueeze(0), cache)
        self.gate.rows = None
        return self._outputs(hidden[0, logit_rows], hidden[0, rows:])

    def _outputs(self, scored: Tensor, streams: Tensor | None) -> StepTensors:
        logits = self.head(scored).float()
        next_ids = torch.argmax(logits, dim=-1)
        if streams is None or self.config is None:
            return StepTensors(next_ids, logits, None, None)
        ids, logprobs, _ = self._candidates(streams)
        shape = (-1, self.config.num_streams, self.config.top_k)
        return StepTensors(next_ids, logits, ids.reshape(shape), logprobs.reshape(shape))

    def _candidates(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Top k of each stream row [R, H]: token ids, log-probabilities, places in the draft vocabulary, [R, k] each."""
        assert self.config is not None
        draft = self.draft_head(streams).float()
        best, index = torch.topk(draft, self.config.top_k, dim=-1)
        logprobs = self.stream_logprobs(draft, best)
        return self.draft_vocab[index] if self.config.draft_vocab_size else index, logprobs, index

    # The streams' own pass: delayed placement

    def draft(self, entry: Tensor, root_id: Tensor, past_length: Tensor, cache: Cache) -> DraftTensors:
        """The streams of the last committed row, once the token after it is known.

        Args:
            entry: float [1, H], the row's state at layer N - N_s.
            root_id: int64 [1], the token after it.
            past_length: integer [1], committed rows, that row the last of them.
            cache: of the top layers at least.
        """
        assert self.config is not None
        gamma, top_k = self.config.num_streams, self.config.top_k
        streams = self.enter(entry.unsqueeze(0), root_id.unsqueeze(0))
        order = torch.arange(gamma, device=entry.device)
        positions = past_length.to(torch.int64) + order  # the row itself stands at past - 1
        cache.set_rows(positions, order.unsqueeze(1) >= order.unsqueeze(0))
        self.gate.rows = True
        states = self.run_layers(streams, self.entry_layer, self.num_layers, positions.unsqueeze(0), cache)[0]
        self.gate.rows = None
        ids, logprobs, index = self._candidates(states)
        pairs = None
        if self.config.pair_rank:
            by_parent, by_child = self.pair_tables()
            parents = nn.functional.embedding(index[:-1], by_parent).float()  # [γ - 1, k, r]: of streams 1 to γ - 1
            mix = nn.functional.silu(parents + self.pair_context(states[1:]).unsqueeze(1))
            scores = mix @ nn.functional.embedding(index[1:], by_child).float().transpose(1, 2)  # [γ - 1, k, k]
            pairs = torch.cat([torch.zeros_like(scores[:1]) if gamma > 1 else scores.new_zeros(1, top_k, top_k), scores]).unsqueeze(0)
        return DraftTensors(ids.unsqueeze(0), logprobs.unsqueeze(0), pairs)

    # Whole sequences, for training

    def main_pass(self, input_ids: Tensor) -> MainPass:
        """Main rows of a batch: int64 [B, T], padded on the right (causal rows never see what comes after them).

        Tokens that all sequences begin with (a chat template's system prompt, a task's instruction) are run once for the batch.
        """
        batch = input_ids.shape[0]
        first_kept = self.entry_layer if self.config is not None else self.num_layers
        shared = shared_prefix(input_ids)
        cache = _CausalCache(first_kept, batch, shared)
        self.gate.rows = None
        firsts, finals = [], []
        for ids, start in ((input_ids[:1, :shared], 0), (input_ids[:, shared:], shared)):
            if ids.shape[1]:
                positions = torch.arange(start, start + ids.shape[1], device=ids.device).expand(ids.shape)
                first = self.run_layers(self.embed(ids), 0, first_kept, positions, cache)
                final = self.run_layers(first, first_kept, self.num_layers, positions, cache)
                firsts.append(first.expand(batch, -1, -1))
                finals.append(final.expand(batch, -1, -1))
        if not shared:
            return MainPass(firsts[0], finals[0], cache.keys, cache.values)
        return MainPass(torch.cat(firsts, dim=1), torch.cat(finals, dim=1), cache.keys, cache.values)

    def stream_pass(self, main: MainPass, anchors: Tensor, corrections: Tensor | None = None) -> Tensor:
        """Streams beside chosen rows of a batch.

        Args:
            main: the batch's main rows.
            anchors: int64 [B, n], rows that carry streams (repeat any row for padding).
            corrections: int64 [B, n], the tokens after them; for delayed placement only.

        Returns:
            States after the last layer, [B, n, γ, H].
        """
        assert self.config is not None
        batch, count = anchors.shape
        gamma = self.config.num_streams
        hidden = self.enter(main.entry.gather(1, anchors.unsqueeze(2).expand(-1, -1, main.entry.shape[2])), corrections)
        offsets = torch.arange(1, gamma + 1, device=anchors.device)
        positions = (anchors.unsqueeze(2) + offsets).reshape(batch, -1)
        cache = _BesideCache(main, anchors, gamma, self.entry_layer)
        self.gate.rows = True
        hidden = self.run_layers(hidden, self.entry_layer, self.num_layers, positions, cache)
        self.gate.rows = None
        return hidden.reshape(batch, count, gamma, -1)

    def stream_parameters(self) -> dict[str, nn.Parameter]:
        """Everything that makes streams: vectors, entry map, pruning adapter, LoRA of stream rows."""
        if self.config is None:
            return {}
        found = {name: getattr(self, name) for name in SMALL_PARAMETERS}
        for name, module in self.decoder.named_modules():
            if isinstance(module, LoraLinear) and module.gate is not None:
                found |= {f"{name}.lora_A": module.lora_A, f"{name}.lora_B": module.lora_B}
        return {name: parameter for name, parameter in found.items() if parameter.numel()}


def fused_rows(positions: Tensor, tree_mask: Tensor, stream_rows: Tensor, num_streams: int) -> tuple[Tensor, Tensor]:
    """Positions and visibility once stream rows stand behind the main rows.

    Args:
        positions: int64 [T].
        tree_mask: bool [T, T].
        stream_rows: int64 [S].
        num_streams: γ.

    Returns:
        Positions int64 [T + S·γ] and visibility bool [T + S·γ, T + S·γ]: main rows see main rows of the tree only; stream j of
        row t sees what t sees and streams <= j of t.
    """
    carriers = stream_rows.unsqueeze(1).expand(-1, num_streams).reshape(-1)  # the main row beside each stream row
    count = torch.arange(carriers.shape[0], device=carriers.device)
    group, index = count // num_streams, count % num_streams
    own = (group.unsqueeze(1) == group.unsqueeze(0)) & (index.unsqueeze(1) >= index.unsqueeze(0))
    behind = torch.zeros(1, dtype=torch.bool, device=tree_mask.device).expand(tree_mask.shape[0], carriers.shape[0])
    visible = torch.cat([torch.cat([tree_mask, behind], dim=1), torch.cat([tree_mask[carriers], own], dim=1)], dim=0)
    return torch.cat([positions, positions[carriers] + index + 1]), visible


def shared_prefix(input_ids: Tensor, least: int = 64) -> int:
    """How many tokens all sequences of a batch [B, T] begin with, T - 1 at most; 0 where running them once saves fewer than ``least``
    rows."""
    batch, length = input_ids.shape
    differs = (input_ids[:, : length - 1] != input_ids[:1, : length - 1]).any(dim=0)
    places = differs.nonzero()
    count = int(places[0]) if places.numel() else length - 1
    return count if count * (batch - 1) >= least else 0


class _CausalCache:
    """Main rows of whole sequences: a triangle, keys and values of the top layers kept for the streams.

    With ``shared`` rows, each layer first sees those, of one sequence, then the rest of all ``batch`` sequences.
    """

    def __init__(self, first_kept: int, batch: int, shared: int) -> None:
        self.first_kept, self.batch, self.shared = first_kept, batch, shared
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        self._masks: dict[tuple[int | None, int, int], Tensor] = {}

    def set_rows(self, positions: Tensor, visible: Tensor) -> None:
        raise AssertionError("whole sequences have one fixed mask")

    def _mask(self, window: int | None, rows: int, length: int, device: torch.device) -> Tensor:
        """Bool [rows, length]: the last rows of a triangle, within the window."""
        kind = window, rows, length
        if kind not in self._masks:
            full = torch.ones(length, length, dtype=torch.bool, device=device).tril()
            self._masks[kind] = (full if window is None else full & ~full.tril(-window))[length - rows :]
        return self._masks[kind]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        rows = query.shape[2]
        is_shared = self.shared > 0 and layer not in self._before
        if is_shared:
            self._before[layer] = key, value
        elif self.shared:
            key, value = (
                torch.cat([old.expand(self.batch, -1, -1, -1), new], dim=2)
                for old, new in zip(self._before[layer], (key, value), strict=True)
            )
        if layer >= self.first_kept and not is_shared:
            self.keys.append(key)
            self.values.append(value)
        length = key.shape[2]
        if rows == length and (window is None or rows <= window):
            return dense_attention(query, key, value, None, scale=scale, softcap=softcap, causal=True)
        visible = self._mask(window, rows, length, query.device)
        return dense_attention(query, key, value, visible, scale=scale, softcap=softcap)


class _BesideCache:
    """Stream rows beside main rows whose keys and values are known.

    Each stream row sees main rows up to its own and the streams of its own row up to itself, so scores are two blocks, [n·γ, T] and
    n times [γ, γ], instead of [n·γ, T + n·γ].
    """

    def __init__(self, main: MainPass, anchors: Tensor, gamma: int, first: int) -> None:
        self.main, self.first, self.gamma = main, first, gamma
        device = anchors.device
        order = torch.arange(gamma, device=device)
        self.carriers = anchors.repeat_interleave(gamma, dim=1)  # [B, n·γ]
        self.positions = self.carriers + order.repeat(anchors.shape[1]) + 1
        self.slots = torch.arange(main.entry.shape[1], device=device)
        self.own = order.unsqueeze(1) >= order.unsqueeze(0)  # [γ, γ]
        self._biases: dict[int | None, tuple[Tensor, Tensor]] = {}

    def set_rows(self, positions: Tensor, visible: Tensor) -> None:
        raise AssertionError("stream rows beside whole sequences have one fixed mask")

    def _bias(self, window: int | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Additive masks: [B, 1, n·γ, T] over main rows, [γ, γ] over own streams."""
        if window not in self._biases:
            seen, own = self.slots <= self.carriers.unsqueeze(2), self.own
            if window is not None:
                order = torch.arange(self.gamma, device=own.device)
                seen = seen & (self.positions.unsqueeze(2) - self.slots < window)
                own = own & (order.unsqueeze(1) - order.unsqueeze(0) < window)
            hidden = torch.finfo(dtype).min
            masks = [torch.zeros(m.shape, dtype=dtype, device=m.device).masked_fill(~m, hidden) for m in (seen, own)]
            self._biases[window] = masks[0].unsqueeze(1), masks[1]
        return self._biases[window]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        batch, heads, rows, size = query.shape
        kv, gamma = key.shape[1], self.gamma
        groups, count = heads // kv, rows // gamma
        seen, own = self._bias(window, query.dtype)
        query = (query * scale).reshape(batch, kv, groups * rows, size)
        main_keys, main_values = self.main.keys[layer - self.first], self.main.values[layer - self.first]
        beside = (query @ main_keys.transpose(-1, -2)).view(batch, kv, groups, rows, -1)
        among = query.view(batch, kv, groups, count, gamma, size) @ key.reshape(batch, kv, 1, count, gamma, size).transpose(-1, -2)
        if softcap is not None:
            beside, among = (torch.tanh(x / softcap) * softcap for x in (beside, among))
        scores = torch.cat([beside + seen.unsqueeze(2), (among + own).view(batch, kv, groups, rows, gamma)], dim=-1)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
        length = main_keys.shape[2]
        out = weights[..., :length].reshape(batch, kv, groups * rows, length) @ main_values
        mine = weights[..., length:].view(batch, kv, groups, count, gamma, gamma) @ value.reshape(batch, kv, 1, count, gamma, size)
        return (out.view(batch, heads, rows, size) + mine.reshape(batch, heads, rows, size)).transpose(1, 2)
