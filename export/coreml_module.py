"""The network as Core ML will run it: static shapes, a cache in two states, arithmetic that 16 bits can hold. For tracing.

Beside the cache, three things would fail in fp16 and are exchanged while tracing: RMS norms, whose squares overflow above 256; rotary
embeddings, whose angles have no precision left at some thousand positions; the log-sum-exp of a stream's logits, whose exponentials
overflow above 11 where a runtime does not shift them. Knows the network and
the contract; nothing of Core ML's own types or files.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from specstream.export.coreml_contract import CoreMLFunction
from specstream.models.stream_model import StreamModel

HIDDEN = -3e4  # added to scores that a row must not see: far below any score, and a sum with one that fp16 can still hold

_LEAST_SCALE = 2.0**-10  # of an RMS norm: below it, what is divided by the scale could overflow


class StateCache:
    """A cache of all layers in two tensors, written in place (see :class:`specstream.models.attention.Cache`).

    Queries that share a key/value head are laid behind each other as rows of one head, so keys and values are never repeated.

    Args:
        keys: [layers, kv_heads, slots, head_dim].
        values: as ``keys``.
        past_length: int32 [1], committed rows.
    """

    def __init__(self, keys: Tensor, values: Tensor, past_length: Tensor) -> None:
        self.keys, self.values = keys, values
        self.past = past_length[0]
        self.slots = int(keys.shape[2])
        self.fused = 0  # layers that became scaled_dot_product_attention

    def commit(self, start: Tensor, rows: Tensor, width: int) -> None:
        """Slot ``start + i`` gets what slot ``rows[i]`` holds, in every layer. start: int32 [1]; rows: int32 [width]."""
        begin = start[0]
        for state in (self.keys, self.values):
            state[:, :, begin : begin + width] = torch.index_select(state, 2, rows)

    def set_rows(self, positions: Tensor, visible: Tensor) -> None:
        self._positions, self._visible = positions, visible
        self._biases: dict[tuple[int | None, int], Tensor] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        _, heads, rows, size = query.shape
        kv_heads = key.shape[1]
        begin, end = self.past, self.past + rows
        self.keys[layer : layer + 1, :, begin:end] = key
        self.values[layer : layer + 1, :, begin:end] = value
        key, value = self.keys[layer : layer + 1], self.values[layer : layer + 1]
        bias = self._bias(window, heads // kv_heads)
        factor = scale * math.sqrt(size)
        if abs(factor - 1.0) > 1e-6:  # an explicit scale would keep the converter from the fused operator
            query = query * factor
        query = query.reshape(1, kv_heads, -1, size)
        if softcap is None:
            out = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)
            self.fused += 1
        else:
            scores = torch.matmul(query * (1.0 / (math.sqrt(size) * softcap)), key.transpose(-1, -2))
            out = torch.matmul(torch.softmax(torch.tanh(scores) * softcap + bias, dim=-1), value)
        return out.reshape(1, heads, -1, size).transpose(1, 2)

    def _bias(self, window: int | None, groups: int) -> Tensor:
        """float [1, 1, groups · R, slots]: 0 where a row sees a slot, else :data:`HIDDEN`."""
        if (window, groups) not in self._biases:
            slots = torch.arange(self.slots, dtype=torch.int32)[None]
            places, own = self._positions[:, None], self._visible
            cached = slots < self.past
            if window is not None:
                cached = cached & (slots > places - window)
                own = own & (self._positions[None] > places - window)
            rows = own.shape[0]
            bias = _additive(cached)
            if window is None:
                bias = bias.repeat(rows, 1)
            bias[:, self.past : self.past + rows] = _additive(own)
            self._biases[window, groups] = bias.repeat(groups, 1)[None, None]
        return self._biases[window, groups]


def _additive(visible: Tensor) -> Tensor:
    """0 where true, else :data:`HIDDEN`; by arithmetic, since a choice between constants stores them in the size of the mask."""
    return (visible.to(torch.float32) - 1.0) * -HIDDEN


class RowsModule(nn.Module):
    """A function of main rows: the contract's inputs as arguments, its outputs as results.

    Args:
        model: fp32, its fine-tune merged.
        function: static sizes.
        slots: of the cache.
        commit_width: rows of a commit.
    """

    keyCache: Tensor
    valueCache: Tensor

    def __init__(self, model: StreamModel, function: CoreMLFunction, slots: int, commit_width: int) -> None:
        super().__init__()
        self.model, self.function, self.commit_width = model, function, commit_width
        _add_states(self, model, slots)
        self.fused = 0

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        tree_mask: Tensor,
        past_length: Tensor,
        commit_start: Tensor,
        commit_rows: Tensor,
        logit_rows: Tensor | None = None,
        stream_rows: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        cache = StateCache(self.keyCache, self.valueCache, past_length)
        cache.commit(commit_start, commit_rows, self.commit_width)
        scored: Any = slice(None) if logit_rows is None else logit_rows  # a slice keeps all rows and costs no gather
        step = self.model(input_ids, position_ids, tree_mask > 0.5, scored, stream_rows, cache)
        self.fused = cache.fused
        outputs = [step.next_ids, step.logits]
        if step.stream_ids is not None:
            outputs += [step.stream_ids, step.stream_logprobs]
        if step.entry is not None:
            outputs.append(step.entry[scored])
        return tuple(outputs)


class DraftModule(nn.Module):
    """The function of delayed streams; arguments as for :class:`RowsModule`."""

    keyCache: Tensor
    valueCache: Tensor

    def __init__(self, model: StreamModel, slots: int, commit_width: int) -> None:
        super().__init__()
        self.model, self.commit_width = model, commit_width
        _add_states(self, model, slots)
        self.fused = 0

    def forward(
        self, entry_state: Tensor, root_id: Tensor, past_length: Tensor, commit_start: Tensor, commit_rows: Tensor
    ) -> tuple[Tensor, ...]:
        cache = StateCache(self.keyCache, self.valueCache, past_length)
        cache.commit(commit_start, commit_rows, self.commit_width)
        step = self.model.draft(entry_state, root_id, past_length, cache)
        self.fused = cache.fused
        outputs = [step.stream_ids, step.stream_logprobs]
        if step.stream_pairs is not None:
            outputs.append(step.stream_pairs)
        return tuple(outputs)


def _add_states(module: nn.Module, model: StreamModel, slots: int) -> None:
    for name in ("keyCache", "valueCache"):
        module.register_buffer(name, torch.zeros(state_shape(model, slots)))


def state_shape(model: StreamModel, slots: int) -> tuple[int, int, int, int]:
    """Of either state: [layers, kv_heads, slots, head_dim]."""
    config = model.base.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return model.num_layers, config.num_key_value_heads, slots, head_dim


class SafeRmsNorm(nn.Module):
    """``w · x / sqrt(mean(x²) + ε)`` without squares that overflow: the mean is taken of x / max|x|, which is at most 1.

    With s = max|x|:  mean(x²) + ε = s² (mean((x / s)²) + (√ε / s)²).
    """

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        scale = x.abs().amax(dim=-1, keepdim=True).clamp_min(_LEAST_SCALE)
        mean = (x / scale).square().mean(dim=-1, keepdim=True) + (math.sqrt(self.epsilon) / scale).square()
        return x * (torch.rsqrt(mean) / scale) * self.weight


class TableRotary(nn.Module):
    """Cosines and sines of all positions, computed in fp32 by the module it stands for and looked up by position."""

    def __init__(self, rotary: nn.Module, positions: int) -> None:
        super().__init__()
        cos, sin = rotary(torch.zeros(1), torch.arange(positions)[None])
        self.cos, self.sin = nn.Parameter(cos[0], requires_grad=False), nn.Parameter(sin[0], requires_grad=False)

    def forward(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return nn.functional.embedding(positions, self.cos), nn.functional.embedding(positions, self.sin)


def safe_logprobs(logits: Tensor, best: Tensor) -> Tensor:
    """As :meth:`StreamModel.stream_logprobs`, shifted by the best logit: no exponential is above 1.

    Their sum must stay below 65,504, which only a distribution that is flat over more tokens than that exceeds.

    Args:
        logits: [R, Vd].
        best: [R, k], the k largest, the largest first.
    """
    largest = best[..., :1]
    return (best - largest) - torch.log(torch.exp(logits - largest).sum(dim=-1, keepdim=True))


@contextlib.contextmanager
def fp16_safe(model: StreamModel, positions: int) -> Iterator[None]:
    """The model with norms, rotary embeddings and log-probabilities that 16 bits can hold, for as long as the context lasts.

    Args:
        positions: that rotary tables cover.

    Raises:
        NotImplementedError: a norm that is none of those known.
    """
    exchanged: list[tuple[nn.Module, str, nn.Module]] = []

    def exchange(path: str, new: nn.Module) -> None:
        parent_name, _, leaf = path.rpartition(".")
        parent = model.decoder.get_submodule(parent_name)
        exchanged.append((parent, leaf, getattr(parent, leaf)))
        setattr(parent, leaf, new)

    try:
        for name, module in list(model.decoder.named_modules()):
            kind = type(module).__name__
            if kind.endswith("RMSNorm"):
                exchange(name, _safe_norm(module))
            elif kind.endswith("LayerNorm"):
                raise NotImplementedError(f"{name}: {kind} has no form for Core ML yet")
        for name in ("rotary_emb", "rotary_emb_local"):
            if hasattr(model.decoder, name):
                exchange(name, TableRotary(getattr(model.decoder, name), positions))
        model.__dict__["stream_logprobs"] = safe_logprobs  # before the class's own
        yield
    finally:
        model.__dict__.pop("stream_logprobs", None)
        for parent, leaf, old in reversed(exchanged):
            setattr(parent, leaf, old)


def _safe_norm(norm: Any) -> SafeRmsNorm:
    """The same norm in the safe form, compared with it on numbers: architectures differ in what they do with the weight."""
    epsilon = float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)
    weight = norm.weight.detach().float()
    probe = torch.linspace(-3.0, 4.0, weight.shape[0])[None]
    for candidate in (weight, 1.0 + weight):  # Gemma's weights are distances from one
        safe = SafeRmsNorm(candidate, epsilon)
        if torch.allclose(safe(probe), norm(probe), rtol=1e-4, atol=1e-5):
            return safe
    raise NotImplementedError(f"{type(norm).__name__} is not an RMS norm of a known form")
