"""The cache of the ``ort`` profile: a layer's attention becomes one ``com.microsoft::GroupQueryAttention`` node, in place.

The operator writes the call's keys and values behind the committed rows and attends over them. Which rows see which is an
additive bias, built once for each phase (main rows alone, main and stream rows) and window. Rotary stays outside: with it
inside and an empty cache the operator uses the first position only, and a tree needs them all. A sliding window is part of
the bias, since the operator's own counts slots and not positions. For tracing only: symbolic nodes compute nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specstream.export.visibility import Visibility


class OrtCache:
    """Cache inputs of a graph, and the nodes that read and fill them.

    Args:
        past_length: int32 [1], committed rows.
        keys: of every layer, [1, kv_heads, C, head_dim].
        values: as ``keys``.
    """

    def __init__(self, past_length: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        self.past_length = past_length
        self.keys = list(keys)
        self.values = list(values)
        self._visibility = Visibility(past_length)

    def set_rows(self, positions: Tensor, visible: Tensor) -> None:
        self._visibility.set_rows(positions, visible)
        total = self.past_length + positions.shape[0]
        self._seqlens_k = total - 1
        self._total = total.squeeze(0)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        _, heads, rows, size = query.shape
        out, self.keys[layer], self.values[layer] = torch.onnx.ops.symbolic_multi_out(
            "com.microsoft::GroupQueryAttention",
            (
                *(x.transpose(1, 2).reshape(1, rows, -1) for x in (query, key, value)),
                self.keys[layer],
                self.values[layer],
                self._seqlens_k,
                self._total,
                None,
                None,
                None,
                self._visibility.bias(window),
            ),
            {"num_heads": heads, "kv_num_heads": key.shape[1], "scale": float(scale), "softcap": float(softcap or 0.0)},
            dtypes=(query.dtype, key.dtype, value.dtype),
            shapes=((1, rows, heads * size), self.keys[layer].shape, self.values[layer].shape),
            version=1,
        )
        return out.reshape(1, rows, heads, size)
