"""Main rows kept in memory, so that a frozen base runs over each training row once. Knows rows of token ids and their states.

In lossless training what the streams need of a row (entry states, keys and values of the top layers, final states beside the
completion) never changes. Each row is run alone, so that its states are the same whatever batch it is part of, kept or not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from specstream.models.data import TokenRow, make_batch
from specstream.models.stream_model import MainPass, StreamModel


class MainCache:
    """Main passes of single rows, computed when first asked for.

    Args:
        model: its main rows must not change while this lives.
        rows: all examples; asked for by index.
    """

    def __init__(self, model: StreamModel, rows: Sequence[TokenRow]) -> None:
        self.model, self.rows = model, rows
        self._kept: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    @property
    def nbytes(self) -> int:
        """Memory that the kept rows take."""
        return sum(tensor.nbytes for kept in self._kept.values() for tensor in kept)

    def batch(self, indices: Sequence[int], width: int) -> MainPass:
        """The main pass of several rows, padded with zeros on the right to ``width`` rows.

        Final states are there from the row before the completion on; before it they are zeros (no loss looks at them).
        """
        parts = [self._row(index) for index in indices]

        def padded(tensor: Tensor, before: int, dim: int) -> Tensor:
            pad = [0, 0] * (tensor.dim() - 1 - dim % tensor.dim()) + [before, width - before - tensor.shape[dim]]
            return nn.functional.pad(tensor, pad)

        entry = torch.stack([padded(part[0], 0, 0) for part in parts])
        final = torch.stack([padded(part[1], self.rows[i].start - 1, 0) for part, i in zip(parts, indices, strict=True)])
        cache = torch.stack([padded(part[2], 0, -2) for part in parts], dim=1)  # [2 · N_s, B, kv_heads, width, d]
        return MainPass(entry, final, list(cache[0::2]), list(cache[1::2]))

    @torch.no_grad()
    def _row(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """Entry states [T, H], final states [completion, H], keys and values of the top layers in turn [2 · N_s, kv_heads, T, d]."""
        if index not in self._kept:
            row = self.rows[index]
            device = self.model.stream_vectors.device
            main = self.model.main_pass(make_batch([row]).ids.to(device))
            length = len(row.ids)
            cache = torch.stack([x[0, :, :length] for pair in zip(main.keys, main.values, strict=True) for x in pair])
            self._kept[index] = (main.entry[0, :length].clone(), main.final[0, row.start - 1 : length].clone(), cache)
        return self._kept[index]
