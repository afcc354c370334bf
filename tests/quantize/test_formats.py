"""Rounding of matrices and activations, in arrays."""

from __future__ import annotations

import numpy as np
import pytest

from specstream.models.errors import UserError
from specstream.quantize.formats import BlockFormat, IntegerFormat, from_blocks, round_rows, to_blocks, to_integers


def matrix(inner: int = 64, columns: int = 40, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((inner, columns)).astype(np.float32)


@pytest.mark.parametrize(("bits", "symmetric", "most"), [(4, True, 0.13), (4, False, 0.11), (8, True, 0.01), (8, False, 0.01)])
def test_blocks_come_back_close(bits: int, symmetric: bool, most: float) -> None:
    form = BlockFormat(bits, 16, 4, symmetric)  # type: ignore[arg-type]
    blocks = to_blocks(matrix(), form)
    assert blocks.packed.shape == (40, 4, 16 * bits // 8)
    assert blocks.scales.shape == (40, 4)
    assert (blocks.zero_points is None) == symmetric
    error = np.linalg.norm(from_blocks(blocks, form) - matrix()) / np.linalg.norm(matrix())
    assert 0 < error < most


def test_a_block_size_must_divide() -> None:
    with pytest.raises(UserError, match="block size 32 does not divide the 48 inputs of down"):
        to_blocks(matrix(48), BlockFormat(4, 32), "down")


@pytest.mark.parametrize(("size", "level", "message"), [(33, 4, "block size 33"), (32, 3, "accuracy level 3")])
def test_what_no_kernel_takes_is_refused(size: int, level: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        BlockFormat(4, size, level)


def test_integers_use_the_whole_range_of_each_column() -> None:
    integers, scales = to_integers(matrix())
    assert (np.abs(integers).max(axis=0) == 127).all()
    assert np.abs(integers * scales - matrix()).max() <= scales.max() / 2 + 1e-6


def test_a_column_of_zeros_stays_zero() -> None:
    integers, scales = to_integers(np.zeros((8, 2), dtype=np.float32))
    assert not integers.any()
    assert np.isfinite(scales).all()


def test_rows_are_rounded_each_for_itself() -> None:
    rows = matrix(6, 32)
    for form in (IntegerFormat(0.02), IntegerFormat(1 / 127, normalised=True)):
        together = round_rows(rows, form)
        alone = np.concatenate([round_rows(rows[i : i + 1], form) for i in range(len(rows))])
        np.testing.assert_array_equal(together, alone)


def test_normalised_rows_survive_an_outlier_row() -> None:
    rows = matrix(6, 32)
    rows[0] *= 1000
    fixed = IntegerFormat(float(np.abs(rows).max()) / 127)
    assert not round_rows(rows, fixed)[1:].any()  # all else is rounded away
    kept = round_rows(rows, IntegerFormat(1 / 127, normalised=True))
    assert np.linalg.norm(kept - rows, axis=1).max() / np.linalg.norm(rows, axis=1).max() < 0.01
    np.testing.assert_allclose(kept[1], rows[1], atol=np.abs(rows[1]).max() / 200)
