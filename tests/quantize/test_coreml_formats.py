"""Matrices in the forms of Core ML: what they err, beside bounds and beside scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.cluster import KMeans

from specstream.models.errors import UserError
from specstream.quantize.coreml_formats import Integers, Palette, check_fits, from_integers, from_palette, to_integers, to_palette

MATRIX = np.random.default_rng(1).standard_t(5, (64, 96)).astype(np.float32)


def test_eight_bits_err_half_a_step() -> None:
    integers, scales = to_integers(MATRIX, Integers(8))
    assert scales.shape == (64, 1)
    assert np.abs(integers.astype(int)).max() == 127
    step = np.abs(MATRIX).max(axis=1, keepdims=True) / 127
    rounding = np.abs(MATRIX) * 2.0**-10  # of the scale and of the product, to float16
    assert (np.abs(from_integers(integers, scales) - MATRIX) <= step * 0.501 + rounding).all()


def test_four_bits_err_less_than_rounding_to_the_full_range() -> None:
    integers, scales = to_integers(MATRIX, Integers(4, 32))
    assert scales.shape == (64, 3)
    assert (integers.min(), integers.max()) == (-8, 7)
    blocks = MATRIX.reshape(64, 3, 32)
    full = (np.maximum(blocks.max(-1) / 7, -blocks.min(-1) / 8)).astype(np.float16)[..., None].astype(np.float32)
    plain = np.square(np.clip(np.rint(blocks / full), -8, 7) * full - blocks).sum()
    ours = np.square(from_integers(integers, scales).astype(np.float32) - MATRIX).sum()
    assert ours < 0.95 * plain


def test_a_matrix_on_the_grid_comes_back_exactly() -> None:
    grid = np.random.default_rng(2).integers(-8, 8, (8, 64))
    grid[:, ::32] = -8  # each block has its whole range
    matrix = grid.astype(np.float32) * np.float32(0.25)
    assert np.array_equal(from_integers(*to_integers(matrix, Integers(4, 32))), matrix)
    grid[:, 0] = 127
    matrix = grid.astype(np.float32) * np.float32(0.25)
    assert np.array_equal(from_integers(*to_integers(matrix, Integers(8))), matrix)


@pytest.mark.parametrize("form", [Integers(8), Integers(4, 32)])
def test_zeros_stay_zeros(form: Integers) -> None:
    integers, scales = to_integers(np.zeros((4, 64), dtype=np.float32), form)
    assert not integers.any()
    assert (scales > 0).all()


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = to_integers(MATRIX, Integers(4, 32))
    monkeypatch.setattr("specstream.quantize.coreml_formats.CHUNK", 500)
    for one, other in zip(whole, to_integers(MATRIX, Integers(4, 32)), strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("bits", [4, 6])
def test_tables_err_about_as_little_as_those_of_scikit_learn(bits: int) -> None:
    indices, tables = to_palette(MATRIX, Palette(bits, 16))
    assert tables.shape == (4, 1 << bits)
    assert indices.max() < 1 << bits
    assert (np.diff(tables.astype(np.float32)) >= 0).all()
    error = np.square(from_palette(indices, tables).astype(np.float32) - MATRIX).reshape(4, -1).sum(axis=1)
    for group, ours in enumerate(error):
        values = MATRIX[16 * group : 16 * (group + 1)].reshape(-1, 1)
        theirs = KMeans(1 << bits, n_init=2, random_state=0).fit(values).inertia_
        assert ours < 1.15 * theirs
    assert all(np.array_equal(one, other) for one, other in zip(to_palette(MATRIX, Palette(bits, 16)), (indices, tables), strict=True))


def test_each_value_gets_the_nearest_entry() -> None:
    indices, tables = to_palette(MATRIX, Palette(4, 16))
    distances = np.abs(MATRIX.reshape(4, -1)[..., None] - tables[:, None].astype(np.float32))
    assert np.allclose(np.take_along_axis(distances, indices.reshape(4, -1)[..., None].astype(int), axis=2)[..., 0], distances.min(-1))


def test_few_different_values_come_back_exactly() -> None:
    matrix = np.random.default_rng(3).choice(np.array([-2, -0.5, 0, 1, 7], dtype=np.float32), (16, 32))
    assert np.array_equal(from_palette(*to_palette(matrix, Palette(4, 16))), matrix)
    assert not from_palette(*to_palette(np.zeros((16, 32), dtype=np.float32), Palette(4, 16))).any()


def test_sizes_must_divide() -> None:
    check_fits(Integers(8), (61, 35), "w")
    with pytest.raises(UserError, match="block size 32 does not divide the 80 inputs of w"):
        check_fits(Integers(4, 32), (64, 80), "w")
    with pytest.raises(UserError, match="group size 16 does not divide the 61 outputs of w; choose another one, or int8"):
        check_fits(Palette(4, 16), (61, 64), "w")
