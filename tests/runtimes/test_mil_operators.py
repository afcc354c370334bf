"""Each operator against what coremltools itself computes for constants, or against PyTorch or a formula where it computes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from specstream.runtimes.coreml_import import import_coremltools
from specstream.runtimes.mil_operators import LISTS, OPERATORS, VIEWS

ct = import_coremltools()
mb = ct.converters.mil.Builder

RANDOM = np.random.default_rng(3)


def floats(*shape: int) -> np.ndarray:
    return RANDOM.normal(0, 2, shape).astype(np.float32)


def positive(*shape: int) -> np.ndarray:
    return np.abs(floats(*shape)) + np.float32(0.1)


def ints(*shape: int, low: int = -5, high: int = 6) -> np.ndarray:
    return RANDOM.integers(low, high, shape, dtype=np.int32)


def bools(*shape: int) -> np.ndarray:
    return RANDOM.random(shape) < 0.5


def i32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def flags(*values: int) -> np.ndarray:
    return np.array(values, dtype=bool)


UNARY = ("abs", "ceil", "cos", "erf", "exp", "exp2", "floor", "identity", "relu", "round", "sigmoid", "sign", "sin", "softplus")
UNARY_POSITIVE = ("inverse", "log", "rsqrt", "sqrt", "square", "tanh")
BINARY = ("add", "equal", "floor_div", "greater", "greater_equal", "less", "less_equal", "maximum", "minimum", "mod", "mul", "not_equal")
REDUCE = ("l1_norm", "l2_norm", "log_sum_exp", "max", "mean", "min", "prod", "sum", "sum_square")
BEGIN_END = {"begin": i32(1, -3, 0), "end": i32(3, 5, 2)}

# Operator and parameters: coremltools computes the expected value.
CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {"x": floats(3, 4)}) for name in UNARY),
    *((name, {"x": positive(3, 4)}) for name in UNARY_POSITIVE),
    *((name, {"x": floats(2, 3, 4), "y": floats(3, 1)}) for name in (*BINARY, "sub", "real_div")),
    *((name, {"x": ints(2, 3), "y": ints(1, 3, low=1)}) for name in (*BINARY, "sub", "pow")),
    *((name, {"x": bools(4, 4), "y": bools(4)}) for name in ("logical_and", "logical_or", "logical_xor")),
    *((f"reduce_{name}", {"x": floats(2, 3, 4), "axes": i32(-1), "keep_dims": True}) for name in REDUCE),
    *((f"reduce_{name}", {"x": floats(2, 3, 4), "axes": i32(0, 2), "keep_dims": False}) for name in REDUCE),
    *((f"reduce_{name}", {"x": floats(2, 3)}) for name in REDUCE),
    *((f"reduce_{name}", {"x": floats(2, 3, 4), "axis": np.int32(1), "keep_dims": True}) for name in ("argmax", "argmin")),
    *((f"reduce_{name}", {"x": floats(2, 3, 4), "output_dtype": "uint16"}) for name in ("argmax", "argmin")),
    ("reduce_sum", {"x": ints(3, 4), "axes": i32(1)}),
    ("square", {"x": ints(3, 4)}),
    ("logical_not", {"x": bools(4)}),
    ("log", {"x": positive(3, 4), "epsilon": np.float32(0.5)}),
    ("rsqrt", {"x": positive(3, 4), "epsilon": np.float32(0.5)}),
    ("inverse", {"x": positive(3, 4), "epsilon": np.float32(0.5)}),
    ("pow", {"x": positive(3, 4), "y": np.float32(2.5)}),
    ("clip", {"x": floats(3, 4), "alpha": np.float32(-1), "beta": np.float32(0.5)}),
    ("gelu", {"x": floats(3, 4)}),
    ("gelu", {"x": floats(3, 4), "mode": "EXACT"}),
    ("gelu", {"x": floats(3, 4), "mode": "TANH_APPROXIMATION"}),
    ("gelu", {"x": floats(3, 4), "mode": "SIGMOID_APPROXIMATION"}),
    ("select", {"cond": bools(3, 4), "a": floats(3, 4), "b": floats(3, 4)}),
    *(("cast", {"x": floats(3, 4), "dtype": name}) for name in ("int32", "int8", "int16", "bool", "fp16", "fp32")),
    ("cast", {"x": ints(3, 4, low=0), "dtype": "uint16"}),
    ("cast", {"x": bools(5), "dtype": "fp16"}),
    ("softmax", {"x": floats(2, 3, 4)}),
    ("softmax", {"x": floats(2, 3, 4), "axis": np.int32(1)}),
    ("topk", {"x": floats(2, 7), "k": np.int32(3)}),
    ("topk", {"x": floats(7, 2), "k": np.int32(2), "axis": np.int32(0), "ascending": True}),
    ("topk", {"x": floats(2, 7), "k": np.int32(3), "return_indices": False}),
    ("cumsum", {"x": floats(3, 4), "axis": np.int32(1)}),
    ("cumsum", {"x": floats(3, 4), "axis": np.int32(0), "reverse": True}),
    ("layer_norm", {"x": floats(2, 3, 4), "axes": i32(-1), "gamma": floats(4), "beta": floats(4), "epsilon": np.float32(0.1)}),
    ("layer_norm", {"x": floats(2, 3, 4), "axes": i32(1, 2)}),
    ("l2_norm", {"x": floats(2, 3, 4), "epsilon": np.float32(0.1)}),
    ("l2_norm", {"x": floats(2, 2, 3, 4)}),
    ("matmul", {"x": floats(2, 3, 4), "y": floats(4, 5)}),
    ("matmul", {"x": floats(4, 3), "y": floats(5, 4), "transpose_x": True, "transpose_y": True}),
    ("matmul", {"x": ints(2, 3), "y": ints(3, 4)}),
    ("linear", {"x": floats(2, 3, 4), "weight": floats(5, 4), "bias": floats(5)}),
    ("linear", {"x": floats(3, 4), "weight": floats(5, 4)}),
    ("scaled_dot_product_attention", {"query": floats(1, 2, 3, 4), "key": floats(1, 2, 5, 4), "value": floats(1, 2, 5, 6)}),
    *(
        ("scaled_dot_product_attention", {"query": floats(2, 3, 4), "key": floats(2, 5, 4), "value": floats(2, 5, 4), "attn_mask": mask})
        for mask in (floats(3, 5), flags(1, 0, 1, 1, 0)[None], flags(1, 0, 1, 1, 0)[None] | bools(2, 3, 5))
    ),
    ("reshape", {"x": floats(2, 3, 4), "shape": i32(4, -1)}),
    ("reshape", {"x": floats(2, 50), "shape": i32(1, 0, -1, 0)}),
    ("transpose", {"x": floats(2, 3, 4), "perm": i32(1, -1, 0)}),
    ("expand_dims", {"x": floats(2, 3), "axes": i32(0, -1)}),
    ("squeeze", {"x": floats(1, 2, 1, 3), "axes": i32(-2)}),
    ("squeeze", {"x": floats(1, 2, 1, 3)}),
    ("concat", {"values": [floats(2, 3), floats(2, 1)], "axis": np.int32(1)}),
    ("stack", {"values": [floats(2, 3), floats(2, 3)], "axis": np.int32(1)}),
    ("stack", {"values": [np.float32(2), np.float32(3)], "axis": np.int32(0)}),
    ("split", {"x": floats(2, 6), "num_splits": np.int32(3), "axis": np.int32(1)}),
    ("split", {"x": floats(2, 6), "split_sizes": i32(1, 3, 2), "axis": np.int32(-1)}),
    ("tile", {"x": floats(2, 3), "reps": i32(2, 1)}),
    ("reverse", {"x": floats(2, 3), "axes": i32(-1)}),
    ("reverse", {"x": floats(2, 3)}),
    ("slice_by_index", {"x": floats(4, 5, 6), **BEGIN_END}),
    ("slice_by_index", {"x": floats(4, 5, 6), **BEGIN_END, "begin_mask": flags(1, 0, 0), "end_mask": flags(0, 1, 0)}),
    ("slice_by_index", {"x": floats(4, 5, 6), **BEGIN_END, "squeeze_mask": flags(1, 0, 1)}),
    ("slice_by_index", {"x": floats(9), "begin": i32(7), "end": i32(1), "stride": i32(-2)}),
    ("slice_by_index", {"x": ints(9), "begin": i32(0), "end": i32(0), "stride": i32(-1), "end_mask": flags(1), "begin_mask": flags(1)}),
    ("slice_by_size", {"x": floats(4, 5, 6), "begin": i32(1, 0, 2), "size": i32(2, 5, -1)}),
    ("slice_update", {"x": floats(4, 5, 6), "update": floats(2, 3, 2), **BEGIN_END}),
    ("slice_update", {"x": floats(4, 5, 6), "update": floats(3, 2), **BEGIN_END, "squeeze_mask": flags(1, 0, 0)}),
    (
        "slice_update",
        {
            "x": floats(4, 5, 6),
            "update": floats(3, 5, 3),
            **BEGIN_END,
            "begin_mask": flags(1, 1, 0),
            "end_mask": flags(0, 0, 1),
            "stride": i32(1, 1, 2),
        },
    ),
    ("band_part", {"x": floats(4, 4), "lower": np.int32(-1), "upper": np.int32(0)}),
    ("band_part", {"x": floats(3, 5), "lower": np.int32(1), "upper": np.int32(2)}),
    ("fill", {"shape": i32(2, 3), "value": np.float32(1.5)}),
    ("range_1d", {"end": np.int32(9), "start": np.int32(2), "step": np.int32(3)}),
    ("range_1d", {"end": np.float32(1), "start": np.float32(0), "step": np.float32(0.25)}),
    ("shape", {"x": floats(2, 3)}),
    ("gather", {"x": floats(5, 4), "indices": ints(2, 3, low=0, high=5)}),
    ("gather", {"x": floats(5, 4), "indices": np.int32(3), "axis": np.int32(-1)}),
    ("gather", {"x": floats(2, 5, 4), "indices": ints(2, 3, low=0, high=4), "axis": np.int32(2), "batch_dims": np.int32(1)}),
    ("gather_along_axis", {"x": floats(5, 4), "indices": ints(2, 4, low=0, high=5), "axis": np.int32(0)}),
    ("argsort", {"x": floats(3, 4)}),
    ("argsort", {"x": floats(3, 4), "axis": np.int32(0), "ascending": True}),
]


def title(case: tuple[str, dict[str, Any]]) -> str:
    name, parameters = case
    shown = (f"{key}={np.asarray(value).tolist()}" for key, value in parameters.items() if key in SHOWN)
    return f"{name}({', '.join(shown)})"


SHOWN = ("axis", "axes", "keep_dims", "squeeze_mask", "shape")


def computed_by_coremltools(name: str, parameters: dict[str, Any]) -> list[np.ndarray]:
    """The value that coremltools folds an operator with constant parameters to."""
    found: list[Any] = []

    @mb.program(input_specs=[], opset_version=ct.target.iOS18)
    def program() -> Any:
        result = getattr(mb, name)(**parameters)
        found.extend(result if isinstance(result, list | tuple) else [result])
        return result

    assert all(variable.val is not None for variable in found), "coremltools computes nothing here: the case needs a formula"
    return [np.asarray(variable.val) for variable in found]


def evaluated(name: str, parameters: dict[str, Any]) -> list[np.ndarray]:
    given = {key: value if isinstance(value, str | list) else np.asarray(value) for key, value in parameters.items()}
    result = OPERATORS[name](**given)
    return [np.asarray(value) for value in (result if isinstance(result, tuple) else (result,))]


def assert_equal(found: Sequence[np.ndarray], expected: Sequence[np.ndarray], tolerance: float = 2e-6) -> None:
    assert len(found) == len(expected)
    for have, want in zip(found, expected, strict=True):
        assert have.shape == want.shape
        assert have.dtype.kind == want.dtype.kind
        np.testing.assert_allclose(have, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", CASES, ids=title)
def test_agrees_with_coremltools(case: tuple[str, dict[str, Any]]) -> None:
    name, parameters = case
    assert_equal(evaluated(name, parameters), computed_by_coremltools(name, parameters))


def scattered(data: np.ndarray, function: Callable[[np.ndarray], None]) -> np.ndarray:
    result = data.copy()
    function(result)
    return result


def add_rows(result: np.ndarray) -> None:
    result[:, 3] += UPDATES[:, 0] + UPDATES[:, 2]  # index 3 twice
    result[:, 0] += UPDATES[:, 1]


def raise_to_peaks(result: np.ndarray) -> None:
    result[0, 1] = max(result[0, 1], PEAKS[0])
    result[2, 4] = max(result[2, 4], PEAKS[1])


DATA, UPDATES, POINTS = floats(3, 5), floats(3, 3), i32(3, 0, 3)
BATCHED, PLACES = floats(2, 3, 4), ints(2, 5, 1, low=0, high=3)
IMAGE, KERNEL, BIAS = floats(2, 3, 1, 5), floats(4, 3, 1, 1), floats(4)
ROWS, PEAKS = np.array([[0, 1], [2, 4]], dtype=np.int32), floats(2)
FACTOR, ALONG = floats(2, 4, 3), ints(2, 5, low=0, high=3)

# Operator, parameters and what they give.
FORMULAS: list[tuple[str, dict[str, Any], np.ndarray]] = [
    ("conv", {"x": IMAGE, "weight": KERNEL, "bias": BIAS}, torch.nn.functional.conv2d(*map(torch.tensor, (IMAGE, KERNEL, BIAS))).numpy()),
    ("einsum", {"values": [BATCHED, FACTOR], "equation": "bij,bjk->bik"}, BATCHED @ FACTOR),
    ("fill_like", {"ref_tensor": DATA, "value": np.float32(2)}, np.full((3, 5), 2, dtype=np.float32)),
    ("gather_nd", {"x": DATA, "indices": ROWS}, np.array([DATA[0, 1], DATA[2, 4]])),
    ("gather_nd", {"x": DATA, "indices": i32(2, 0)[:, None]}, DATA[[2, 0]]),
    (
        "gather_nd",
        {"x": BATCHED, "indices": PLACES, "batch_dims": np.int32(1)},
        torch.gather(torch.tensor(BATCHED), 1, torch.tensor(PLACES).long().expand(2, 5, 4)).numpy(),
    ),
    ("one_hot", {"indices": i32(2, 0), "one_hot_vector_size": np.int32(3)}, np.array([[0, 0, 1], [1, 0, 0]])),
    ("real_div", {"x": i32(7, -7, 6), "y": i32(2, 2, 3)}, i32(3, -3, 2)),
    ("scatter", {"data": DATA, "indices": POINTS, "updates": UPDATES, "axis": np.int32(1)}, scattered(DATA, add_rows)),
    (
        "scatter",
        {"data": DATA, "indices": i32(2, 0), "updates": DATA[:2], "mode": "update"},
        np.stack([DATA[1], DATA[1], DATA[0]]),
    ),
    (
        "scatter_along_axis",
        {"data": DATA, "indices": ALONG, "updates": DATA[:2], "axis": np.int32(0)},
        torch.tensor(DATA).scatter_add(0, torch.tensor(ALONG).long(), torch.tensor(DATA[:2])).numpy(),
    ),
    ("scatter_nd", {"data": DATA, "indices": ROWS, "updates": PEAKS, "mode": "max"}, scattered(DATA, raise_to_peaks)),
    ("topk", {"x": np.array([[1, 3, 3, 2, 3]], dtype=np.float32), "k": np.int32(2)}, np.array([[3, 3]], dtype=np.float32)),
    ("topk", {"x": i32(4, 9, -1), "k": np.int32(-1), "return_indices": False}, i32(9, 4, -1)),
    ("cumsum", {"x": i32(3, 4, 5), "exclusive": True}, i32(0, 3, 7)),
    ("silu", {"x": DATA}, torch.nn.functional.silu(torch.tensor(DATA)).numpy()),
    ("softmax", {"x": np.array([0, -np.inf], dtype=np.float32)}, np.array([1, 0], dtype=np.float32)),
]


@pytest.mark.parametrize("case", FORMULAS, ids=lambda case: case[0])
def test_agrees_with_a_formula(case: tuple[str, dict[str, Any], np.ndarray]) -> None:
    name, parameters, expected = case
    assert_equal(evaluated(name, parameters)[:1], [expected])


def test_every_operator_has_a_case() -> None:
    assert {case[0] for case in CASES} | {case[0] for case in FORMULAS} == set(OPERATORS)


@pytest.mark.parametrize("case", [case for case in CASES if case[0] not in VIEWS], ids=title)
def test_results_are_new_arrays_except_of_views(case: tuple[str, dict[str, Any]]) -> None:
    """The evaluator overwrites arrays by what it knows of this."""
    name, parameters = case
    given = {key: value if isinstance(value, str | list) else np.asarray(value) for key, value in parameters.items()}
    result = OPERATORS[name](**given)
    arrays = [array for value in given.values() for array in (value if isinstance(value, list) else [value])]
    for array in (array for array in arrays if isinstance(array, np.ndarray)):
        assert not any(np.may_share_memory(array, part) for part in (result if isinstance(result, tuple) else (result,)))


def test_every_parameter_is_one_of_the_definition() -> None:
    """Names of parameters, and which of them take lists, as coremltools defines the operators for iOS 18."""
    from inspect import signature

    from coremltools.converters.mil.mil.input_type import TupleInputType
    from coremltools.converters.mil.mil.ops.registry import SSAOpRegistry, _get_version_of_op

    for name, function in OPERATORS.items():
        defined = _get_version_of_op(SSAOpRegistry.core_ops[name], ct.target.iOS18).input_spec.input_types
        assert set(signature(function).parameters) == set(defined), name
        required = {key for key, parameter in signature(function).parameters.items() if parameter.default is parameter.empty}
        assert required >= {key for key, kind in defined.items() if not kind.optional}, name
        assert {(name, key) for key, kind in defined.items() if isinstance(kind, TupleInputType)} == {e for e in LISTS if e[0] == name}


def test_ties_go_to_the_first() -> None:
    values = np.array([1, 3, 3, 2, 3], dtype=np.float16)
    assert OPERATORS["topk"](x=values, k=np.int32(4))[1].tolist() == [1, 2, 4, 3]
    assert int(OPERATORS["reduce_argmax"](x=values)) == 1


def test_topk_of_a_whole_vocabulary() -> None:
    """Many equal values, as fp16 logits have."""
    values = RANDOM.normal(0, 2, (3, 50_000)).astype(np.float16)
    found, indices = OPERATORS["topk"](x=values, k=np.int32(64), output_indices_dtype="uint16")
    order = np.argsort(-values.astype(np.float32), axis=-1, kind="stable")[:, :64]
    assert np.array_equal(indices, order)
    assert indices.dtype == np.uint16
    assert np.array_equal(found, np.take_along_axis(values, order, axis=-1))


def test_nan_is_never_among_the_best() -> None:
    values = np.array([np.nan, 1, np.nan, 2], dtype=np.float32)
    assert OPERATORS["topk"](x=values, k=np.int32(2))[1].tolist() == [3, 1]


def test_halves_are_computed_in_single_precision() -> None:
    """The sum of 4,096 ones: float16 steps would stay at 2,048."""
    ones = np.ones(4096, dtype=np.float16)
    assert float(OPERATORS["reduce_sum"](x=ones)) == 4096
    assert float(OPERATORS["matmul"](x=ones[None], y=ones[:, None])[0, 0]) == 4096
    assert float(OPERATORS["mul"](x=np.float16(300) * ones[:1], y=np.float16(300) * ones[:1])[0]) == 90000  # the evaluator rounds: inf


def test_attention_of_a_row_that_sees_nothing_is_nan() -> None:
    x = np.ones((1, 2, 4), dtype=np.float32)
    with np.errstate(invalid="ignore"):
        found = OPERATORS["scaled_dot_product_attention"](query=x, key=x, value=x, attn_mask=np.array([[True, True], [False, False]]))
    assert np.isnan(found[0, 1]).all()
    assert np.allclose(found[0, 0], 1)


ONE = np.ones((1, 1, 2, 2), dtype=np.float32)


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("conv", {"x": ONE, "weight": ONE}, "a kernel \\[2, 2\\]"),
        ("conv", {"x": ONE, "weight": ONE[..., :1, :1], "strides": i32(2, 2)}, "strides"),
        ("concat", {"values": [ONE, ONE], "axis": np.int32(0), "interleave": True}, "interleaved"),
        ("gather", {"x": ONE, "indices": i32(1)}, "index 1 is outside 0..0"),
        ("gather", {"x": ONE, "indices": i32(-1)}, "index -1 is outside"),
        ("gather_nd", {"x": DATA, "indices": i32(1, 7)}, "index 7 is outside 0..4"),
        ("gather_along_axis", {"x": DATA, "indices": i32(-1)[None]}, "index -1 is outside"),
        ("scatter", {"data": DATA, "indices": i32(3), "updates": DATA[:1]}, "index 3 is outside 0..2"),
        ("scatter", {"data": DATA, "indices": i32(1), "updates": DATA[:1], "mode": "xor"}, "mode xor is unknown"),
        ("slice_update", {"x": DATA, "update": DATA, "begin": i32(1, 0), "end": i32(3, 5)}, "an update of shape \\[3, 5\\] for a slice of"),
        ("slice_by_index", {"x": DATA, "begin": i32(0), "end": i32(3)}, "1 begins and 1 ends for 2 axes"),
        ("slice_by_index", {"x": DATA, "begin": i32(3, 0), "end": i32(0, 0), "squeeze_mask": flags(1, 0)}, "index 3 is outside axis 0"),
        ("slice_by_size", {"x": DATA, "begin": i32(1, 0), "size": i32(3, 5)}, "3 values from 1 of axis 0, which has 3"),
        ("split", {"x": DATA, "split_sizes": i32(1, 1), "axis": np.int32(0)}, "parts \\[1, 1\\] of 3"),
        ("topk", {"x": DATA, "k": np.int32(6)}, "k is 6, 1 to 5 expected"),
        ("gelu", {"x": DATA, "mode": "FAST"}, "mode FAST"),
        ("cast", {"x": DATA, "dtype": "fp8"}, "type fp8"),
        ("scaled_dot_product_attention", {"query": np.ones((1, 4, 2, 2)), "key": ONE, "value": ONE}, "repeat heads first"),
        ("l2_norm", {"x": DATA}, "rank 2"),
    ],
)
def test_what_is_not_defined_or_not_implemented_is_an_error(name: str, parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OPERATORS[name](**parameters)


def test_erf_in_single_precision() -> None:
    x = np.linspace(-4, 4, 101, dtype=np.float32)
    assert np.abs(OPERATORS["erf"](x=x) - np.array([math.erf(float(value)) for value in x])).max() < 1e-7
