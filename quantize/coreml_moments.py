"""Second moments of the inputs of a package's products, gathered while the package runs. Arrays and weights' offsets only.

Products that share their input (queries, keys and values of a layer) share its moments. Memory: 4 bytes times the square of the
inputs for each input that is not shared: 0.4 GB for 135 M parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]


class Moments:
    """Sums of x xᵀ for each factor, by its offset in the file of weights."""

    def __init__(self) -> None:
        self._group: dict[int, int] = {}  # offset -> number of the sums it has
        self._sums: list[FloatArray] = []
        self._rows: list[int] = []
        self._last: tuple[Any, int] | None = None  # input seen last, and the number of its sums

    def add(self, offset: int, x: npt.NDArray[Any]) -> None:
        """Count the input of one product: [..., inputs]."""
        shared = self._last is not None and self._last[0] is x
        if offset not in self._group:
            if shared and self._last is not None:
                self._group[offset] = self._last[1]
            else:
                self._group[offset] = len(self._sums)
                self._sums.append(np.zeros((x.shape[-1], x.shape[-1]), dtype=np.float32))
                self._rows.append(0)
        number = self._group[offset]
        if shared and self._last is not None and self._last[1] == number:
            return  # counted already
        rows = x.reshape(-1, x.shape[-1]).astype(np.float32)
        rows = rows[np.isfinite(rows).all(axis=1)]
        self._sums[number] += rows.T @ rows
        self._rows[number] += len(rows)
        self._last = (x, number)

    def save(self, path: Path) -> None:
        """Means to a ``.npz``, for :func:`read_moments`."""
        means: dict[str, Any] = {
            f"m{number}": sums / max(rows, 1) for number, (sums, rows) in enumerate(zip(self._sums, self._rows, strict=True))
        }
        offsets = np.array(sorted(self._group), dtype=np.int64)
        np.savez(path, offsets=offsets, groups=np.array([self._group[int(offset)] for offset in offsets], dtype=np.int64), **means)


class _Read(Mapping[int, FloatArray]):
    """Means from a file, read when they are asked for."""

    def __init__(self, path: Path) -> None:
        self._file = np.load(path)
        self._group = dict(zip(self._file["offsets"].tolist(), self._file["groups"].tolist(), strict=True))

    def __getitem__(self, offset: int) -> FloatArray:
        means: FloatArray = self._file[f"m{self._group[offset]}"]
        return means

    def __iter__(self) -> Any:
        return iter(self._group)

    def __len__(self) -> int:
        return len(self._group)


def read_moments(path: Path) -> Mapping[int, FloatArray]:
    """Offset -> mean of x xᵀ, as :meth:`Moments.save` wrote it."""
    return _Read(path)
