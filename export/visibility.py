"""Which slot of the cache each row of a call sees: committed rows, then the call's own rows, within a window of positions.

For tracing: masks are built once for each set of rows and window, and every layer reads the same value.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Visibility:
    """Additive masks over the cache's slots.

    Slots 0 .. past - 1 hold the positions of the same number, the next R slots the call's rows at ``positions``.

    Args:
        past_length: int32 [1], committed rows.
        capacity: slots of the cache when masks cover all of them; None for masks that end with the call's rows.
    """

    def __init__(self, past_length: Tensor, capacity: int | torch.SymInt | None = None) -> None:
        past = past_length.item()
        assert isinstance(past, int | torch.SymInt)
        torch._check(past >= 0)
        self._past = past
        self._capacity = capacity

    def set_rows(self, positions: Tensor, visible: Tensor) -> None:
        """See :meth:`specstream.models.attention.Cache.set_rows`."""
        self._positions, self._visible = positions, visible
        self._biases: dict[int | None, Tensor] = {}
        self._behind: int | torch.SymInt = 0
        if self._capacity is not None:
            self._behind = self._capacity - self._past - positions.shape[0]
            torch._check(self._behind >= 0)

    def bias(self, window: int | None) -> Tensor:
        """float [1, 1, R, past + R or C]: 0 where a row sees a slot, the least float elsewhere.

        With ``window``, a row sees positions greater than its own minus ``window``.
        """
        if window not in self._biases:
            mask = self._mask()
            if window is not None:
                slots = [torch.arange(self._past), self._positions]
                if self._capacity is not None:
                    slots.append(torch.zeros(1, dtype=torch.int64).expand(self._behind))
                mask = mask & (torch.cat(slots)[None, :] > self._positions[:, None] - window)
            self._biases[window] = torch.where(mask, 0.0, torch.finfo(torch.float32).min)[None, None]
        return self._biases[window]

    def _mask(self) -> Tensor:
        rows = self._visible.shape[0]
        pieces = [torch.ones(1, 1, dtype=torch.bool).expand(rows, self._past), self._visible]
        if self._capacity is not None:
            pieces.append(torch.zeros(1, 1, dtype=torch.bool).expand(rows, self._behind))
        return torch.cat(pieces, dim=1)
