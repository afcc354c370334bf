"""How one matrix is stored and multiplied: packed blocks of few bits, or 8-bit integers times 8-bit activations. Arrays only, no graphs.

A format belongs to one product; which product gets which is a scheme's business (``schemes.py``), and putting it into a graph that
of ``rewrite.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from specstream.models.errors import UserError
from specstream.quantize.compensate import round_columns

FloatArray = npt.NDArray[np.float32]

BLOCK_SIZES = (16, 32, 64, 128, 256)  # what ONNX Runtime's kernels take
ACCURACY_LEVELS = (0, 1, 4)  # 0 and 1: float32 activations; 4: 8-bit activations, quantized row by row and block by block in the kernel
SHRINKS = np.linspace(0.76, 1.0, 9, dtype=np.float32)  # of a block's range that are tried; below 1 the largest values are cut off
ZERO = 128  # the activation's zero point: unsigned bytes around it


@dataclass(frozen=True)
class BlockFormat:
    """``com.microsoft.MatMulNBits``: a scale for each ``block_size`` weights of a column.

    Attributes:
        bits: 4 or 8.
        block_size: consecutive rows of K that share a scale (and a zero point).
        accuracy_level: how activations are rounded, see ``ACCURACY_LEVELS``.
        symmetric: no zero points; blocks are centred on zero.
    """

    bits: Literal[4, 8]
    block_size: int = 32
    accuracy_level: int = 4
    symmetric: bool = False

    def __post_init__(self) -> None:
        if self.block_size not in BLOCK_SIZES:
            raise UserError(f"block size {self.block_size} is not one of {', '.join(map(str, BLOCK_SIZES))}")
        if self.accuracy_level not in ACCURACY_LEVELS:
            raise UserError(f"accuracy level {self.accuracy_level} is not one of {', '.join(map(str, ACCURACY_LEVELS))}")


@dataclass(frozen=True)
class IntegerFormat:
    """``QuantizeLinear`` + ``com.microsoft.MatMulIntegerToFloat``: weights of a column share a scale, activations one that is fixed.

    Attributes:
        scale: of the activations: ``round(x / scale) + 128`` in 0..255. With ``normalised`` that of x over its row's maximum.
        normalised: each row is divided by its largest magnitude first and the result multiplied back.
    """

    scale: float
    normalised: bool = False

    def __post_init__(self) -> None:
        if not self.scale > 0:
            raise ValueError(f"activation scale {self.scale}: above zero expected")


Format = BlockFormat | IntegerFormat


@dataclass(frozen=True, eq=False)
class Blocks:
    """A matrix [K, N] in blocks along K.

    Attributes:
        packed: uint8 [N, K / block_size, block_size * bits / 8], low bits first.
        scales: float32 [N, K / block_size].
        zero_points: uint8 [N, ceil(K / block_size * bits / 8)], packed like the weights; None where symmetric.
    """

    packed: npt.NDArray[np.uint8]
    scales: FloatArray
    zero_points: npt.NDArray[np.uint8] | None


def to_blocks(matrix: FloatArray, form: BlockFormat, name: str = "matrix", moments: FloatArray | None = None) -> Blocks:
    """Round to nearest by ONNX Runtime's own quantizer, or so that errors are made up for.

    Args:
        matrix: [K, N].
        moments: [K, K], the mean of x xᵀ over the product's inputs x; with them each error is made up for by the rows of K behind it, see
            :mod:`specstream.quantize.compensate`.

    Raises:
        UserError: the block size does not divide K.
    """
    from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, DefaultWeightOnlyQuantizer

    if matrix.shape[0] % form.block_size:
        raise UserError(f"block size {form.block_size} does not divide the {matrix.shape[0]} inputs of {name}; choose a smaller one")
    if moments is not None:
        return _compensated_blocks(matrix, form, moments)
    config = DefaultWeightOnlyQuantConfig(block_size=form.block_size, is_symmetric=form.symmetric, bits=form.bits)
    packed, scales, zero_points = DefaultWeightOnlyQuantizer(config).qbits_block_quant(np.ascontiguousarray(matrix))
    return Blocks(packed, scales, None if form.symmetric else zero_points)


def _compensated_blocks(matrix: FloatArray, form: BlockFormat, moments: FloatArray) -> Blocks:
    inputs, columns = matrix.shape
    scales = np.empty((columns, inputs // form.block_size), dtype=np.float32)
    zero_points = np.empty(scales.shape, dtype=np.uint8)
    # What an input's error counts for, whatever the other inputs make up for.
    weights = np.maximum(np.diag(moments), 1e-6 * np.trace(moments) / inputs + 1e-30).astype(np.float32)

    def begin_block(first: int, values: FloatArray) -> None:
        block = first // form.block_size
        scales[:, block], zero_points[:, block] = _best_range(values, weights[first : first + form.block_size], form)

    def round_column(column: int, values: FloatArray) -> tuple[npt.NDArray[np.uint8], FloatArray]:
        scale, zero = scales[:, column // form.block_size], zero_points[:, column // form.block_size].astype(np.float32)
        steps = np.clip(np.rint(values / scale) + zero, 0, (1 << form.bits) - 1)
        return steps.astype(np.uint8), (steps - zero) * scale

    stored = round_columns(np.ascontiguousarray(matrix.T), moments, form.block_size, begin_block, round_column, np.uint8)
    packed = _pack(stored, form.bits).reshape(columns, inputs // form.block_size, -1)
    return Blocks(packed, scales, None if form.symmetric else _pack(zero_points, form.bits))


def _best_range(values: FloatArray, weights: FloatArray, form: BlockFormat) -> tuple[FloatArray, npt.NDArray[np.uint8]]:
    """Scales and zero points [N] of blocks [N, block]: those of the ``SHRINKS`` of a block's range that err least in weighted squares."""
    most, middle = (1 << form.bits) - 1, 1 << (form.bits - 1)
    low, high = np.minimum(values.min(axis=1), 0), np.maximum(values.max(axis=1), 0)
    best = np.full(len(values), np.inf, dtype=np.float32)
    scales = np.empty(len(values), dtype=np.float32)
    zero_points = np.empty(len(values), dtype=np.uint8)
    for shrink in SHRINKS:
        if form.symmetric:
            # There is one more step below zero than above: it goes to the larger side, if need be by a scale below zero.
            scale = np.where(high > -low, high, low) * (-shrink / middle)
            zero = np.full(len(values), middle, dtype=np.float32)
        else:
            scale = (high - low) * (shrink / most)
            zero = np.clip(np.rint(-low * shrink / np.maximum(scale, np.float32(1e-12))), 0, most)
        scale = np.where(np.abs(scale) < 1e-12, np.float32(1e-12), scale).astype(np.float32)
        rounded = np.clip(np.rint(values / scale[:, None]) + zero[:, None], 0, most) - zero[:, None]
        error = np.square(rounded * scale[:, None] - values) @ weights
        better = error < best
        best[better], scales[better], zero_points[better] = error[better], scale[better], zero[better].astype(np.uint8)
    return scales, zero_points


def _pack(integers: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint8]:
    """Rows of integers [N, C] as bytes [N, ceil(C * bits / 8)], low bits first."""
    if bits == 8:
        return integers
    even = np.pad(integers, ((0, 0), (0, integers.shape[1] % 2)))
    return (even[:, ::2] | even[:, 1::2] << 4).astype(np.uint8)


def from_blocks(blocks: Blocks, form: BlockFormat) -> FloatArray:
    """The matrix [K, N] that the kernels multiply with."""
    columns, count, _ = blocks.packed.shape

    def unpack(array: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
        flat = array.reshape(columns, -1)
        return flat if form.bits == 8 else np.stack([flat & 15, flat >> 4], axis=-1).reshape(columns, -1)

    zero = 1 << (form.bits - 1) if blocks.zero_points is None else unpack(blocks.zero_points)[:, :count, None].astype(np.float32)
    values = unpack(blocks.packed).reshape(columns, count, form.block_size).astype(np.float32)
    matrix: FloatArray = np.ascontiguousarray(((values - zero) * blocks.scales[:, :, None]).reshape(columns, -1).T)
    return matrix


def to_integers(matrix: FloatArray) -> tuple[npt.NDArray[np.int8], FloatArray]:
    """A matrix [K, N] as int8 and the scales [N] of its columns; -128 is left out, so that the range is even."""
    scales = np.maximum(np.abs(matrix).max(axis=0), np.float32(1e-12)) / np.float32(127)
    return np.rint(matrix / scales).astype(np.int8), scales.astype(np.float32)


def round_rows(rows: FloatArray, form: IntegerFormat) -> FloatArray:
    """What is left of activations [R, K] after ``form``: the values that the product sees."""
    largest = np.abs(rows).max(axis=-1, keepdims=True) if form.normalised else np.ones((len(rows), 1), dtype=np.float32)
    largest = np.maximum(largest, np.float32(1e-12))
    steps = np.clip(np.rint(rows / largest / form.scale), -ZERO, 255 - ZERO)
    rounded: FloatArray = (steps * np.float32(form.scale) * largest).astype(np.float32)
    return rounded
