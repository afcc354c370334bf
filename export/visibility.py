"""Which slot of the cache each row of a call sees: committed rows, then the call's own rows, within a window of positions."""

from __future__ import annotations

import torch
from torch import Tensor


class Visibility:
    """Masks over the slots 0 .. past + R - 1, built once for each set of rows and window.

    Slots of committed rows hold their positions in order; slots behind them hold the call's rows, at ``positions``.

    Args:
        past_length: int32 [1], committed rows.
    """

    def __init__(self, past_length: Tensor) -> None:
        past = past_length.item()
        assert isinstance(past, int | torch.SymInt)
        torch._check(past >= 0)
        self.past = past

    def set_rows(self, positions: Tensor, visible: Tensor) -> None:
        """See :meth:`specstream.models.attention.Cache.set_rows`."""
        self._positions, self._visible = positions, visible
        self._masks: dict[int | None, Tensor] = {}

    def mask(self, window: int | None) -> Tensor:
        """bool [R, past + R]; with ``window``, a row sees positions greater than its own minus ``window``."""
        if None not in self._masks:
            committed = torch.ones(1, 1, dtype=torch.bool).expand(self._visible.shape[0], self.past)
            self._masks[None] = torch.cat([committed, self._visible], dim=1)
        if window not in self._masks:
            slots = torch.cat([torch.arange(self.past), self._positions])
            near = slots[None, :] > self._positions[:, None] - window
            self._masks[window] = self._masks[None] & near
        return self._masks[window]
