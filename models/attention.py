"""The one door between the layers of a Hugging Face decoder and a cache of keys and values.

The layers call an attention function by name; ours hands projected, rotated rows to a :class:`Cache`. What differs between
dense PyTorch, the two ONNX profiles and Core ML is a cache and nothing else. Knows rows, slots and visibility; nothing of
tokens, streams or files.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ATTENTION_NAME = "specstream"


class Cache(Protocol):
    """Keys and values of committed rows, and the visibility rule of the rows of this call."""

    def set_rows(self, positions: Tensor, visible: Tensor) -> None:
        """Announce the rows of the layers that follow.

        Args:
            positions: int64 [R], absolute position of each row.
            visible: bool [R, R], row i may see row j of this call. Every row sees all committed rows (within its window).
        """

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """Attention of the call's rows over committed rows and each other.

        Args:
            layer: index of the decoder layer.
            query: [1, heads, R, head_dim], rotary applied.
            key: [1, kv_heads, R, head_dim], rotary applied.
            value: [1, kv_heads, R, head_dim].
            scale: factor on the scores.
            window: a row sees positions greater than its own minus ``window``; None sees all.
            softcap: ``c * tanh(scores / c)``; None for none.

        Returns:
            [1, R, heads, head_dim].
        """
        ...


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    row_cache: Cache,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    layer = module.layer_idx
    assert isinstance(layer, int)
    return row_cache.attend(layer, query, key, value, scale=scaling, window=sliding_window, softcap=softcap), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _attend)


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, *, scale: float, softcap: float | None, causal: bool = False
) -> Tensor:
    """Scaled dot-product attention with grouped key/value heads.

    Args:
        query: [B, heads, R, d]; key and value: [B, kv_heads, K, d].
        visible: bool broadcastable to [B, 1, R, K]; None with ``causal`` for a plain triangle.
        scale: factor on the scores.
        softcap: see :meth:`Cache.attend`.
        causal: rows and keys are the same rows in order.

    Returns:
        [B, R, heads, d].
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    if softcap is None:
        out = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scale, is_causal=causal)
    else:
        if causal:
            visible = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
        scores = torch.tanh(query @ key.transpose(-1, -2) * (scale / softcap)) * softcap
        if visible is not None:
            scores = scores.masked_fill(~visible, float("-inf"))
        out = torch.softmax(scores.float(), dim=-1).to(value.dtype) @ value
    return out.transpose(1, 2)


class DenseCache:
    """The reference cache: plain tensors, committed explicitly. Batch 1.

    After a call the new rows are pending; :meth:`commit` keeps some of them in the given order, and the next call drops the rest.
    """

    def __init__(self, num_layers: int) -> None:
        self.keys: list[Tensor | None] = [None] * num_layers  # committed, [1, kv_heads, length, d]
        self.values: list[Tensor | None] = [None] * num_layers
        self._pending: dict[int, tuple[Tensor, Tensor]] = {}
        self._masks: dict[int | None, Tensor] = {}
        self.length = 0

    def set_rows(self, positions: Tensor, visible: Tensor) -> None:
        self._positions, self._visible = positions, visible
        self._masks = {}

    def _mask(self, window: int | None) -> Tensor:
        if window not in self._masks:
            rows = self._visible.shape[0]
            mask = torch.cat([torch.ones(rows, self.length, dtype=torch.bool), self._visible], dim=1)
            if window is not None:
                slots = torch.cat([torch.arange(self.length), self._positions])
                mask = mask & (self._positions[:, None] - slots[None, :] < window)
            self._masks[window] = mask
        return self._masks[window]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        self._pending[layer] = (key, value)
        past_key, past_value = self.keys[layer], self.values[layer]
        if past_key is not None and past_value is not None:
            key, value = torch.cat([past_key, key], dim=2), torch.cat([past_value, value], dim=2)
        return dense_attention(query, key, value, self._mask(window), scale=scale, softcap=softcap)

    def commit(self, rows: list[int]) -> None:
        """Keep ``rows`` (indices into the last call's main rows, in order) and forget the others."""
        index = torch.tensor(rows, dtype=torch.int64)
        for layer, (key, value) in self._pending.items():
            past_key, past_value = self.keys[layer], self.values[layer]
            key, value = key[:, :, index], value[:, :, index]
            self.keys[layer] = key if past_key is None else torch.cat([past_key, key], dim=2)
            self.values[layer] = value if past_value is None else torch.cat([past_value, value], dim=2)
        self._pending = {}
        self.length += len(rows)

    def rewind(self, length: int) -> None:
        """Forget committed rows from ``length`` on."""
        self.keys = [None if key is None or length == 0 else key[:, :, :length] for key in self.keys]
        self.values = [None if value is None or length == 0 else value[:, :, :length] for value in self.values]
        self.length = length
