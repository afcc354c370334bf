"""How one matrix is stored in a Core ML package: integers with scales, or indices into tables of values. Arrays only.

Which matrix gets which form is a scheme's business (``coreml_schemes.py``). A matrix is [outputs, inputs], as `linear` has it, so a row
is an output channel; of a vocabulary's table a row is a token.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from specstream.models.errors import UserError
from specstream.quantize.compensate import round_columns

FloatArray = npt.NDArray[np.float32]
HalfArray = npt.NDArray[np.float16]

# Factors of a block's range that are tried for its scale. Below 1 the largest values are cut off, and the others get finer steps.
SHRINKS: Final = np.linspace(0.7, 1.0, 13, dtype=np.float32)

LLOYD_STEPS: Final = 60  # at most; most tables stand still before
CHUNK: Final = 1 << 22  # values that are worked on at a time
COMPENSATED_TOGETHER: Final = 64  # columns whose errors reach the columns behind them at once, where no block says so


@dataclass(frozen=True)
class Integers:
    """``value = scale · integer``, a scale for each block of a row.

    Attributes:
        bits: 4 or 8.
        block_size: inputs that share a scale; None: the whole row does.
    """

    bits: int
    block_size: int | None = None

    @property
    def dtype(self) -> str:
        """Of the integers, by MIL's name."""
        return f"int{self.bits}"


@dataclass(frozen=True)
class Palette:
    """Indices into a table of 2^bits values, one table for ``group_size`` rows.

    Attributes:
        bits: 1, 2, 3, 4, 6 or 8.
        group_size: consecutive rows that share a table.
    """

    bits: int
    group_size: int

    @property
    def dtype(self) -> str:
        """Of the indices, by MIL's name."""
        return f"uint{self.bits}"


Form = Integers | Palette


def check_fits(form: Form, shape: tuple[int, int], name: str) -> None:
    """Look whether a matrix can be stored so.

    Raises:
        UserError: blocks or groups do not divide it.
    """
    if isinstance(form, Integers) and form.block_size is not None and shape[1] % form.block_size:
        raise UserError(f"block size {form.block_size} does not divide the {shape[1]} inputs of {name}; choose another one")
    if isinstance(form, Palette) and shape[0] % form.group_size:
        raise UserError(
            f"group size {form.group_size} does not divide the {shape[0]} outputs of {name}; choose another one, or int8 for it"
        )


def to_integers(matrix: FloatArray, form: Integers, moments: FloatArray | None = None) -> tuple[npt.NDArray[np.int8], HalfArray]:
    """Round to the nearest integer. Of 4-bit blocks the scale is the one of ``SHRINKS`` that errs least in squares.

    Args:
        matrix: [outputs, inputs].
        moments: [inputs, inputs] of the product's inputs; with them errors are made up for, see :mod:`specstream.quantize.compensate`.

    Returns:
        integers [outputs, inputs], -127 to 127 or -8 to 7; scales [outputs, blocks].
    """
    if moments is not None:
        return _compensated_integers(matrix, form, moments)
    outputs, inputs = matrix.shape
    size = form.block_size or inputs
    integers = np.empty((outputs, inputs), dtype=np.int8)
    scales = np.empty((outputs, inputs // size), dtype=np.float16)
    step = max(1, CHUNK // inputs)
    for first in range(0, outputs, step):
        blocks = matrix[first : first + step].reshape(-1, inputs // size, size)
        found, scale = _round_blocks(blocks, form)
        integers[first : first + step] = found.reshape(-1, inputs)
        scales[first : first + step] = scale
    return integers, scales


def _compensated_integers(matrix: FloatArray, form: Integers, moments: FloatArray) -> tuple[npt.NDArray[np.int8], HalfArray]:
    outputs, inputs = matrix.shape
    size = form.block_size or inputs
    scales = np.empty((outputs, inputs // size), dtype=np.float16)
    low, high = (-127, 127) if form.bits == 8 else (-8, 7)

    def begin_block(first: int, values: FloatArray) -> None:
        if first % size == 0:  # a scale for the whole row is that of the row as it was
            block = values if form.block_size is not None else matrix
            scales[:, first // size] = _round_blocks(block[:, None], form)[1][:, 0]

    def round_column(column: int, values: FloatArray) -> tuple[npt.NDArray[np.int8], FloatArray]:
        scale = scales[:, column // size].astype(np.float32)
        integers = np.clip(np.rint(values / scale), low, high)
        return integers.astype(np.int8), integers * scale

    width = form.block_size or COMPENSATED_TOGETHER
    return round_columns(matrix, moments, width, begin_block, round_column, np.int8), scales


def _round_blocks(blocks: FloatArray, form: Integers) -> tuple[npt.NDArray[np.int8], HalfArray]:
    return _round_eight(blocks) if form.bits == 8 else _round_four(blocks)


def _as_scale(scale: FloatArray) -> HalfArray:
    """float16, and never zero: a block of zeros is zero by its integers."""
    return np.maximum(scale, np.float32(2.0**-24)).astype(np.float16)


def _round_eight(blocks: FloatArray) -> tuple[npt.NDArray[np.int8], HalfArray]:
    scale = _as_scale(np.abs(blocks).max(axis=-1) / 127)
    return np.clip(np.rint(blocks / scale[..., None].astype(np.float32)), -127, 127).astype(np.int8), scale


def _round_four(blocks: FloatArray) -> tuple[npt.NDArray[np.int8], HalfArray]:
    # The range of integers has one more below zero: a scale must cover the larger of the two sides.
    full = np.maximum(blocks.max(axis=-1) / 7, -blocks.min(axis=-1) / 8)
    best = np.full(full.shape, np.inf, dtype=np.float32)
    chosen = _as_scale(full)
    integers = np.zeros(blocks.shape, dtype=np.int8)
    for shrink in SHRINKS:
        scale = _as_scale(full * shrink)
        wide = scale[..., None].astype(np.float32)
        rounded = np.clip(np.rint(blocks / wide), -8, 7)
        error = np.square(rounded * wide - blocks).sum(axis=-1)
        better = error < best
        best[better], chosen[better] = error[better], scale[better]
        integers[better] = rounded[better].astype(np.int8)
    return integers, chosen


def from_integers(integers: npt.NDArray[np.int8], scales: HalfArray) -> HalfArray:
    """The matrix that Core ML multiplies with."""
    size = integers.shape[1] // scales.shape[1]
    return (integers.astype(np.float32) * np.repeat(scales.astype(np.float32), size, axis=1)).astype(np.float16)


def to_palette(matrix: FloatArray, form: Palette, moments: FloatArray | None = None) -> tuple[npt.NDArray[np.uint8], HalfArray]:
    """Tables that err little in squares, by k-means in one dimension: on sorted values, and the same each time.

    Args:
        matrix: [outputs, inputs].
        moments: [inputs, inputs] of the product's inputs; with them a value counts by its input's second moment, and errors are made
            up for, see :mod:`specstream.quantize.compensate`.

    Returns:
        indices [outputs, inputs]; tables [groups, 2^bits], ascending.
    """
    outputs, inputs = matrix.shape
    groups = outputs // form.group_size
    weights = np.ones(inputs) if moments is None else np.maximum(np.diag(moments), 1e-9 * np.trace(moments) / inputs + 1e-30)
    tables = np.empty((groups, 1 << form.bits), dtype=np.float16)
    for group in range(groups):
        values = matrix[group * form.group_size : (group + 1) * form.group_size]
        tables[group] = np.sort(_lloyd(values, weights, 1 << form.bits).astype(np.float16))
    wide = tables.astype(np.float32)
    borders = (wide[:, 1:] + wide[:, :-1]) / 2
    if moments is None:
        rows = matrix.reshape(groups, -1)
        found = np.stack([np.searchsorted(border, row) for border, row in zip(borders, rows, strict=True)])
        return found.astype(np.uint8).reshape(outputs, inputs), tables

    def round_column(_: int, values: FloatArray) -> tuple[npt.NDArray[np.uint8], FloatArray]:
        grouped = values.reshape(groups, -1)
        indices = (grouped[..., None] > borders[:, None]).sum(axis=-1)
        return indices.astype(np.uint8).reshape(-1), np.take_along_axis(wide, indices, axis=1).reshape(-1)

    stored = round_columns(matrix, moments, COMPENSATED_TOGETHER, lambda _first, _values: None, round_column, np.uint8)
    return stored, tables


def _lloyd(values: FloatArray, weights: npt.NDArray[np.floating[Any]], count: int) -> npt.NDArray[np.float64]:
    """``count`` values in ascending order, each the weighted mean of those nearest to it.

    Args:
        values: [rows, inputs].
        weights: [inputs], above zero.
    """
    order = np.argsort(values, axis=None, kind="stable")
    ordered = values.reshape(-1)[order].astype(np.float64)
    counted = np.broadcast_to(weights, values.shape).reshape(-1)[order].astype(np.float64)
    sizes = np.concatenate([[0.0], np.cumsum(counted)])
    sums = np.concatenate([[0.0], np.cumsum(counted * ordered)])
    edges = _split(sizes, sums, count)
    for _ in range(LLOYD_STEPS):
        table = np.diff(sums[edges]) / np.diff(sizes[edges])
        moved = np.concatenate([[0], np.searchsorted(ordered, (table[1:] + table[:-1]) / 2), [len(ordered)]])
        if np.array_equal(moved, edges) or (np.diff(moved) == 0).any():
            break
        edges = moved
    table = np.diff(sums[edges]) / np.diff(sizes[edges])
    return np.pad(table, (0, count - len(table)), mode="edge")


def _split(sizes: npt.NDArray[np.float64], sums: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.int64]:
    """Edges of up to ``count`` parts of sorted values: the part whose halving saves most is halved, again and again.

    Halving values of weight n and sum s into n' and s', n'' and s'' saves s'²/n' + s''²/n'' - s²/n in squares. Starting from quantiles
    instead, Lloyd's method stays where it errs two to three times as much when a distribution has long tails, as weights have.

    Args:
        sizes: [values + 1], weight of all values before each.
        sums: as ``sizes``, of weighted values.
    """

    def best_cut(first: int, last: int) -> tuple[float, int, int, int]:
        """(minus what it saves, first, last, where to cut)."""
        if last - first < 2:
            return 0.0, first, last, first
        size, whole = sizes[last] - sizes[first], sums[last] - sums[first]
        left, part = sizes[first + 1 : last] - sizes[first], sums[first + 1 : last] - sums[first]
        saved = part**2 / left + (whole - part) ** 2 / (size - left)
        at = int(np.argmax(saved))
        return float(whole**2 / size - saved[at]), first, last, first + 1 + at

    parts = [best_cut(0, len(sums) - 1)]
    while len(parts) < count and parts[0][0] < 0:
        _, first, last, cut = heapq.heappop(parts)
        heapq.heappush(parts, best_cut(first, cut))
        heapq.heappush(parts, best_cut(cut, last))
    return np.array([*sorted(first for _, first, _, _ in parts), len(sums) - 1], dtype=np.int64)


def from_palette(indices: npt.NDArray[np.uint8], tables: HalfArray) -> HalfArray:
    """The matrix that Core ML multiplies with."""
    outputs, inputs = indices.shape
    flat = indices.reshape(len(tables), -1)
    return np.take_along_axis(tables, flat.astype(np.int64), axis=1).reshape(outputs, inputs)
