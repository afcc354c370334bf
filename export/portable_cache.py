"""The cache of the ``portable`` profile: ``TensorScatter`` and ``Attention``, standard operators of opset 24, in place.

``TensorScatter`` writes the call's keys and values behind the committed rows, ``Attention`` runs over the whole cache with an
additive mask and the number of rows in use. A layer's cost grows with the capacity, and slots behind the rows in use must
hold finite numbers (ONNX Runtime multiplies them by zero). For tracing only: symbolic nodes compute nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specstream.export.visibility import Visibility


class PortableCache:
    """Cache inputs of a graph, and the nodes that read and fill them.

    Args:
        past_length: int32 [1], committed rows.
        keys: of every layer, [1, kv_heads, C, head_dim].
        values: as ``keys``.
    """

    def __init__(self, past_length: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        self.keys = list(keys)
        self.values = list(values)
        self._past = past_length.to(torch.int64)
        self._visibility = Visibility(past_length, capacity=self.keys[0].shape[2])

    def set_rows(self, positions: Tensor, visible: Tensor) -> None:
        self._visibility.set_rows(positions, visible)
        self._total = self._past + positions.shape[0]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        self.keys[layer] = self._write(self.keys[layer], key)
        self.values[layer] = self._write(self.values[layer], value)
        out = torch.onnx.ops.symbolic(
            "Attention",
            (query, self.keys[layer], self.values[layer], self._visibility.bias(window), None, None, self._total),
            {"scale": float(scale), "softcap": float(softcap or 0.0)},
            dtype=query.dtype,
            shape=query.shape,
            version=24,
        )
        return out.transpose(1, 2)

    def _write(self, cache: Tensor, rows: Tensor) -> Tensor:
        return torch.onnx.ops.symbolic(
            "TensorScatter", (cache, rows, self._past), {"axis": 2}, dtype=cache.dtype, shape=cache.shape, version=24
        )
