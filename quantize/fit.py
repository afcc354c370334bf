"""Chooses smoothing factors and activation scales from sample rows: for each product the ones with the least error of its result.

Arrays and a graph's weights; nothing of files or text. Errors are relative and by row: the mean over rows of |y' - y|² / |y|², so
that a few rows of enormous activations count for what they are, a few rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from specstream.quantize.calibrate import Sample
from specstream.quantize.formats import BlockFormat, FloatArray, Format, IntegerFormat, round_rows, to_integers
from specstream.quantize.smooth import Group, find_groups

STRENGTHS = (0.0, 0.35, 0.5, 0.65, 0.8)  # α of SmoothQuant's equation 4; 0 leaves channels as they are
CLIPS = (1.0, 0.85, 0.7, 0.55)  # of the largest magnitude seen: what is above is cut, what is below is finer
SEARCH_ROWS = 64
MOST_PRODUCTS = 300_000_000  # multiplications of one trial: about a tenth of a second on a core


@dataclass(frozen=True)
class Fit:
    """The best scale of each kind for one weight, with its error.

    Attributes:
        static: fixed scale of all rows.
        normalised: fixed scale of rows divided by their maxima.
        error_static, error_normalised: relative squared errors of the result.
    """

    static: IntegerFormat
    normalised: IntegerFormat
    error_static: float
    error_normalised: float

    def joined(self, other: Fit) -> Fit:
        """What suits two products that share a weight: the wider scale, the larger errors."""
        return Fit(
            max(self.static, other.static, key=lambda form: form.scale),
            self.normalised,
            max(self.error_static, other.error_static),
            max(self.error_normalised, other.error_normalised),
        )


def find_factors(model: ir.Model, samples: Mapping[str, Sample]) -> dict[str, FloatArray]:
    """Smoothing factors float32 [K] of each value that is better off with some; the samples become those of the scaled values."""
    found = {}
    for group in find_groups(model):
        name = group.rows.name or ""
        if name in samples and (factors := _best_factors(group, samples[name])) is not None:
            found[name] = factors
            samples[name].largest /= factors
            samples[name].rows /= factors
    return found


def apply_factors(model: ir.Model, factors: Mapping[str, FloatArray]) -> int:
    """Scale the graph's values by factors that :func:`find_factors` found; returns how many."""
    groups = [group for group in find_groups(model) if group.rows.name in factors]
    for group in groups:
        group.scale(factors[group.rows.name or ""])
    return len(groups)


def fit(matrices: Sequence[FloatArray], sample: Sample) -> Fit:
    """Scales for products of the same input from rows of it (after smoothing, if any).

    Args:
        matrices: of the products, [K, N] each.
        sample: of the input.
    """
    matrix = matrices[0] if len(matrices) == 1 else np.concatenate(matrices, axis=1)
    # A head is wide: a few rows of it say as much as many of a projection.
    rows = sample.rows[:: max(1, matrix.size * len(sample.rows) // MOST_PRODUCTS)]
    exact = rows @ matrix
    integers, scales = to_integers(matrix)
    stored = (integers * scales).astype(np.float32)

    def best(normalised: bool) -> tuple[float, IntegerFormat]:
        largest = 1.0 if normalised else max(float(sample.largest.max()), 1e-12)
        forms = [IntegerFormat(float(np.float32(clip * largest / 127)), normalised) for clip in (CLIPS[:1] if normalised else CLIPS)]
        return min(((row_error(exact, round_rows(rows, form) @ stored), form) for form in forms), key=lambda pair: pair[0])

    error_static, static = best(False)
    error_normalised, normalised = best(True)
    return Fit(static, normalised, error_static, error_normalised)


def row_error(exact: FloatArray, found: FloatArray) -> float:
    """Mean over rows of |found - exact|² / |exact|²."""
    wrong = np.square(found - exact).sum(axis=1, dtype=np.float64)
    return float((wrong / np.maximum(np.square(exact).sum(axis=1, dtype=np.float64), 1e-20)).mean())


def _best_factors(group: Group, sample: Sample) -> FloatArray | None:
    """Factors [K] of the best strength; None when that is to leave channels as they are."""
    matrices = [weight.const_value.numpy() for weight in group.readers if weight.const_value is not None]
    rows = sample.rows[:: max(1, len(sample.rows) // SEARCH_ROWS)]
    exact = [rows @ matrix for matrix in matrices]
    largest_weight = np.maximum(np.max([np.abs(matrix).max(axis=1) for matrix in matrices], axis=0), np.float32(1e-6))
    largest = np.maximum(sample.largest, np.float32(1e-6))
    best: tuple[float, FloatArray | None] = (np.inf, None)
    for strength in STRENGTHS:
        factors = np.ones_like(largest)
        if strength:
            factors = (largest**strength / largest_weight ** (1 - strength)).astype(np.float32)
            factors /= np.exp(np.log(factors).mean())  # the mean size stays
        rounded = round_rows((rows / factors).astype(np.float32), IntegerFormat(float(np.float32((largest / factors).max() / 127))))
        errors = []
        for matrix, right in zip(matrices, exact, strict=True):
            integers, scales = to_integers(matrix * factors[:, None])
            errors.append(row_error(right, rounded @ (integers * scales)))
        error = float(np.mean(errors))
        if error < best[0]:
            best = (error, factors if strength else None)
    return best[1]


def choose(found: Fit, limit: float, fixed_limit: float, blocks: BlockFormat) -> Format:
    """The cheapest kind that errs little enough: a fixed scale within ``fixed_limit``, normalised rows within ``limit``, else blocks
    (whatever their error is)."""
    if found.error_static <= fixed_limit:
        return found.static
    return found.normalised if found.error_normalised <= limit else blocks
