"""Rounding with compensation: what products lose is less, and without anything to make up for it is plain rounding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from specstream.quantize.compensate import DAMPING, _factor
from specstream.quantize.coreml_formats import Form, Integers, Palette, from_integers, from_palette, to_integers, to_palette
from specstream.quantize.coreml_moments import Moments, read_moments
from specstream.quantize.formats import BlockFormat, from_blocks, to_blocks

RANDOM = np.random.default_rng(1)
MATRIX = RANDOM.standard_t(5, (32, 64)).astype(np.float32)
# Inputs that vary together, some much more than others, as those of a network do.
INPUTS = ((RANDOM.normal(0, 1, (2000, 24)) @ RANDOM.normal(0, 1, (24, 64)) + 0.3 * RANDOM.normal(0, 1, (2000, 64))) * RANDOM.gamma(1, 1, 64)).astype(np.float32)  # fmt: skip  # noqa: E501
MOMENTS = INPUTS.T @ INPUTS / len(INPUTS)
FORMS: list[Form] = [Integers(8), Integers(4, 16), Palette(4, 8), Palette(6, 8)]
# 64 inputs have an odd number of blocks of 64: zero points are padded to whole bytes.
BLOCKS = [BlockFormat(4, 16), BlockFormat(4, 64), BlockFormat(4, 16, symmetric=True), BlockFormat(8, 32, symmetric=True)]


def rounded(form: Form | BlockFormat, moments: np.ndarray | None) -> np.ndarray:
    if isinstance(form, BlockFormat):
        return from_blocks(to_blocks(np.ascontiguousarray(MATRIX.T), form, moments=moments), form).T
    if isinstance(form, Integers):
        return from_integers(*to_integers(MATRIX, form, moments)).astype(np.float32)
    return from_palette(*to_palette(MATRIX, form, moments)).astype(np.float32)


def lost(matrix: np.ndarray) -> float:
    """Squared error of the products with the inputs."""
    return float(np.square(INPUTS @ (matrix - MATRIX).T).sum())


@pytest.mark.parametrize("form", [*FORMS, *BLOCKS])
def test_products_lose_less(form: Form | BlockFormat) -> None:
    plain, compensated = lost(rounded(form, None)), lost(rounded(form, MOMENTS.astype(np.float32)))
    assert compensated < 0.5 * plain


@pytest.mark.parametrize("form", FORMS)
def test_inputs_that_do_not_vary_together_leave_plain_rounding(form: Form) -> None:
    assert np.array_equal(rounded(form, np.eye(64, dtype=np.float32)), rounded(form, None))


def test_blocks_cut_their_range_where_that_errs_less() -> None:
    """Without anything to make up for errors, ranges alone: never worse than those of the largest values, which round to nearest has."""
    moments = np.eye(64, dtype=np.float32)
    for form in BLOCKS:
        cut, whole = (np.square(rounded(form, given) - MATRIX).sum() for given in (moments, None))
        assert cut < 1.001 * whole


@pytest.mark.parametrize("form", [*FORMS, *BLOCKS])
def test_inputs_that_are_never_there(form: Form | BlockFormat) -> None:
    """Their rows and columns of the moments are zero, and so may all be."""
    moments = MOMENTS.astype(np.float32).copy()
    moments[:5] = 0
    moments[:, :5] = 0
    for given in (moments, np.zeros_like(moments)):
        found = rounded(form, given)
        assert np.isfinite(found).all()
        assert np.abs(found[:, :5] - MATRIX[:, :5]).max() < 4


@pytest.mark.parametrize("size", [1, 96, 97, 300])
def test_factor_is_of_the_inverse(size: int) -> None:
    inputs = RANDOM.normal(0, 1, (2 * size, size))
    moments = (inputs.T @ inputs / len(inputs)).astype(np.float32)
    factor = _factor(moments)
    assert np.array_equal(factor, np.triu(factor))
    damped = moments + DAMPING * np.diag(moments).mean() * np.eye(size)
    assert np.allclose(factor.T @ factor @ damped, np.eye(size), atol=1e-3)


def test_how_many_columns_go_together_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = rounded(Palette(6, 8), MOMENTS.astype(np.float32))
    monkeypatch.setattr("specstream.quantize.coreml_formats.COMPENSATED_TOGETHER", 7)
    assert np.mean(rounded(Palette(6, 8), MOMENTS.astype(np.float32)) != whole) < 0.01  # sums in another order


def test_tables_follow_the_inputs_that_count() -> None:
    """With one input that counts, the table is that of its weights."""
    moments = np.zeros((64, 64), dtype=np.float32)
    moments[3, 3] = 1
    _, tables = to_palette(MATRIX, Palette(4, 8), moments)
    for group, table in enumerate(tables):
        nearest = np.abs(MATRIX[8 * group : 8 * group + 8, 3, None] - table.astype(np.float32)).min(axis=1)
        assert nearest.max() < 2e-3


def test_moments_are_means_and_shared(tmp_path: Path) -> None:
    moments = Moments()
    first, second = (RANDOM.normal(0, 1, (1, 6, 4)).astype(np.float16) for _ in range(2))
    other = RANDOM.normal(0, 1, (3, 2)).astype(np.float32)
    for x in (first, second):
        moments.add(64, x)
        moments.add(128, x)  # the same array: the same sums
        moments.add(256, other)
    moments.save(tmp_path / "moments.npz")
    read = read_moments(tmp_path / "moments.npz")
    assert sorted(read) == [64, 128, 256]
    rows = np.concatenate([first, second], axis=1)[0].astype(np.float32)
    assert np.allclose(read[64], rows.T @ rows / 12, atol=1e-5)
    assert np.array_equal(read[64], read[128])
    assert np.allclose(read[256], other.T @ other / 3, atol=1e-6)
    assert len(np.load(tmp_path / "moments.npz").files) == 4
    with pytest.raises(KeyError):
        read[512]


def test_rows_that_overflowed_do_not_count(tmp_path: Path) -> None:
    moments = Moments()
    moments.add(64, np.array([[1, 2], [np.inf, 0]], dtype=np.float16))
    moments.save(tmp_path / "moments.npz")
    assert read_moments(tmp_path / "moments.npz")[64].tolist() == [[1, 2], [2, 4]]
