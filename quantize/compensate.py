"""Rounds a matrix column by column, each column's error made up for by those that are not rounded yet. Arrays only.

The method is GPTQ's (Frantar et al. 2023, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", section 3):
with H the second moments of a product's inputs, the output's squared error of a row's change d is dᵀ H d. When input i is rounded by
e, the best change of the inputs behind it is -e / U[i, i] · U[i, i+1:], with U the upper Cholesky factor of H⁻¹.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
ByteArray = npt.NDArray[Any]  # int8 or uint8

DAMPING: Final = 0.01  # added to the moments' diagonal, as a share of its mean: inputs that always vary together would make H singular

SMALL: Final = 96  # rows of a triangular matrix that is inverted whole

# Rounds a column: (its number, values [outputs]) -> what is stored for it (integers or indices), and the values that mean.
RoundColumn = Callable[[int, FloatArray], tuple[ByteArray, FloatArray]]


def round_columns(
    matrix: FloatArray,
    moments: FloatArray,
    block_size: int,
    begin_block: Callable[[int, FloatArray], None],
    round_column: RoundColumn,
    dtype: type[np.int8] | type[np.uint8],
) -> ByteArray:
    """What is stored for a matrix.

    Args:
        matrix: [outputs, inputs].
        moments: [inputs, inputs], the mean of x xᵀ over inputs x.
        block_size: columns that are begun together; errors reach columns behind a block when it is done.
        begin_block: called with a block's first column and its values [outputs, block] as they are then, to choose scales by.
        round_column: see :data:`RoundColumn`.
        dtype: of what is stored.

    Returns:
        [outputs, inputs].
    """
    outputs, inputs = matrix.shape
    factor = _factor(moments)
    # Columns as rows: they are read and written one at a time.
    columns = np.ascontiguousarray(matrix.T)
    stored = np.empty((inputs, outputs), dtype=dtype)
    errors = np.empty((block_size, outputs), dtype=np.float32)
    for first in range(0, inputs, block_size):
        last = min(first + block_size, inputs)
        begin_block(first, columns[first:last].T)
        for column in range(first, last):
            stored[column], rounded = round_column(column, columns[column])
            error = errors[column - first] = (columns[column] - rounded) / factor[column, column]
            columns[column + 1 : last] -= factor[column, column + 1 : last, None] * error
        columns[last:] -= factor[first:last, last:].T @ errors[: last - first]
    return np.ascontiguousarray(stored.T)


def _factor(moments: FloatArray) -> FloatArray:
    """U with UᵀU = H⁻¹."""
    damped = moments.astype(np.float64)
    diagonal = np.einsum("ii->i", damped)
    diagonal += DAMPING * diagonal.mean() + 1e-12
    # H = L Lᵀ reversed in both axes gives H⁻¹ = UᵀU without inverting twice.
    lower = np.linalg.cholesky(damped[::-1, ::-1])
    upper = _triangular_inverse(lower.astype(np.float64, copy=False))[::-1, ::-1]
    return np.ascontiguousarray(upper, dtype=np.float32)


def _triangular_inverse(lower: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Inverse of a lower triangular matrix, by halves: a sixth of a general inverse's work."""
    size = len(lower)
    if size <= SMALL:
        whole: npt.NDArray[np.float64] = np.linalg.inv(lower).astype(np.float64, copy=False)
        return whole
    half = size // 2
    first, last = _triangular_inverse(lower[:half, :half]), _triangular_inverse(lower[half:, half:])
    inverse = np.zeros_like(lower)
    inverse[:half, :half], inverse[half:, half:] = first, last
    inverse[half:, :half] = -last @ (lower[half:, :half] @ first)
    return inverse
