"""The operators of Core ML's model intermediate language (MIL) that our programs use, each a small NumPy function.

A function's parameters have the names and defaults of the operator's definition (coremltools, ``converters/mil/mil/ops/defs``). Values
are arrays, scalars are arrays of rank 0, names of modes are strings. A float16 operator computes in float32; the evaluator rounds its
result once to the declared type. That is the best that a device may do: inside an operator (a sum, an attention) it may round more
often, and between operators it rounds where this does. Each fp16 overflow of a result shows as inf here.

An operator that is defined for more than is implemented raises ValueError for the rest. Where a definition leaves the result open (an
index outside, ties) this module raises ValueError, or says below what it does. Knows nothing of programs, states or files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from specstream.export.weight_blob import NUMPY

Array = npt.NDArray[Any]
Operator = Callable[..., Any]

_erf = np.vectorize(math.erf, otypes=[np.float64])


def widen(x: Array) -> Array:
    """float16 as float32, all else as it is."""
    return x.astype(np.float32) if x.dtype == np.float16 else x


def _flag(x: Array | bool) -> bool:
    return bool(x)


def _axes(axes: Array | None, rank: int) -> tuple[int, ...]:
    return tuple(range(rank)) if axes is None else tuple(int(axis) % rank for axis in np.ravel(axes))


def _within(indices: Array, size: int) -> Array:
    """Indices as NumPy takes them. Since iOS 17 negative ones are outside too, and what then happens is not defined."""
    indices = indices.astype(np.int64)
    if indices.size and not (indices.min() >= 0 and indices.max() < size):
        raise ValueError(f"index {int(indices.min() if indices.min() < 0 else indices.max())} is outside 0..{size - 1}")
    return indices


# --- one value at a time ---------------------------------------------------------------------------------------------------------------


def _unary(function: Callable[[Array], Any]) -> Operator:
    def operator(x: Array) -> Any:
        return function(widen(x))

    return operator


def _binary(function: Callable[[Array, Array], Any]) -> Operator:
    def operator(x: Array, y: Array) -> Any:
        return function(widen(x), widen(y))

    return operator


def real_div(x: Array, y: Array) -> Any:
    """Quotient; of integers truncated towards zero."""
    if x.dtype.kind in "iu":
        return np.trunc(x.astype(np.float64) / y).astype(x.dtype)
    return widen(x) / widen(y)


def cast(x: Array, dtype: str) -> Array:
    """The values as another type: floats to integers lose what is behind the point, everything but zero is true."""
    if dtype not in NUMPY:
        raise ValueError(f"type {dtype} is unknown")
    return x.astype(NUMPY[dtype])


def sigmoid(x: Array) -> Any:
    return 1 / (1 + np.exp(-widen(x)))


def silu(x: Array) -> Any:
    return widen(x) * sigmoid(x)


def erf(x: Array) -> Array:
    return np.asarray(_erf(x), dtype=np.float32)


def gelu(x: Array, mode: str = "EXACT") -> Any:
    wide = widen(x)
    if mode == "EXACT":
        return wide * (1 + erf(wide * np.float32(math.sqrt(0.5)))) / 2
    if mode == "TANH_APPROXIMATION":
        return wide * (1 + np.tanh(np.float32(math.sqrt(2 / math.pi)) * (wide + np.float32(0.044715) * wide**3))) / 2
    if mode == "SIGMOID_APPROXIMATION":
        return wide * sigmoid(np.float32(1.702) * wide)
    raise ValueError(f"mode {mode} is unknown")


def rsqrt(x: Array, epsilon: Array | float = 1e-12) -> Any:
    return 1 / np.sqrt(widen(x) + np.float32(epsilon))


def log(x: Array, epsilon: Array | float = 1e-45) -> Any:
    return np.log(widen(x) + np.float32(epsilon))


def inverse(x: Array, epsilon: Array | float = 1e-4) -> Any:
    return 1 / (widen(x) + np.float32(epsilon))


def clip(x: Array, alpha: Array, beta: Array) -> Any:
    return np.minimum(np.maximum(x, alpha), beta)


def softplus(x: Array) -> Any:
    return np.logaddexp(widen(x), np.float32(0))


def select(cond: Array, a: Array, b: Array) -> Any:
    return np.where(cond, a, b)


# --- along axes ------------------------------------------------------------------------------------------------------------------------


def softmax(x: Array, axis: Array | int = -1) -> Any:
    """A row of -inf only gives nan, as in PyTorch: no program should rely on it."""
    wide = widen(x)
    powers = np.exp(wide - wide.max(axis=int(axis), keepdims=True))
    return powers / powers.sum(axis=int(axis), keepdims=True)


def _reduce(function: Callable[..., Any]) -> Operator:
    def operator(x: Array, axes: Array | None = None, keep_dims: Array | bool = False) -> Any:
        return function(widen(x), axis=_axes(axes, x.ndim), keepdims=_flag(keep_dims))

    return operator


def _sum_square(x: Array, axis: tuple[int, ...], keepdims: bool) -> Any:
    return np.square(x).sum(axis=axis, keepdims=keepdims)


def _l2_norm(x: Array, axis: tuple[int, ...], keepdims: bool) -> Any:
    return np.sqrt(_sum_square(x, axis, keepdims))


def _l1_norm(x: Array, axis: tuple[int, ...], keepdims: bool) -> Any:
    return np.abs(x).sum(axis=axis, keepdims=keepdims)


def _log_sum_exp(x: Array, axis: tuple[int, ...], keepdims: bool) -> Any:
    largest = x.max(axis=axis, keepdims=True)
    total = np.log(np.exp(x - largest).sum(axis=axis, keepdims=True)) + largest
    return total if keepdims else total.squeeze(axis)


def reduce_argmax(x: Array, axis: Array | int = -1, keep_dims: Array | bool = False, output_dtype: str = "int32") -> Any:
    """Of equal values the first; Core ML may give another."""
    return np.argmax(x, axis=int(axis), keepdims=_flag(keep_dims)).astype(NUMPY[output_dtype])


def reduce_argmin(x: Array, axis: Array | int = -1, keep_dims: Array | bool = False, output_dtype: str = "int32") -> Any:
    """Of equal values the first; Core ML may give another."""
    return np.argmin(x, axis=int(axis), keepdims=_flag(keep_dims)).astype(NUMPY[output_dtype])


def topk(
    x: Array,
    k: Array | int = 1,
    axis: Array | int = -1,
    ascending: Array | bool = False,
    sort: Array | bool = True,
    return_indices: Array | bool = True,
    output_indices_dtype: str = "int32",
) -> Any:
    """The k largest (or smallest) values and where they are, always sorted; of equal values the first."""
    rows = np.moveaxis(x, int(axis), -1)
    count = rows.shape[-1] if int(k) == -1 else int(k)
    if not 0 < count <= rows.shape[-1]:
        raise ValueError(f"k is {count}, 1 to {rows.shape[-1]} expected")
    keys: Array = rows.astype(np.int64 if rows.dtype.kind in "iu" else np.float32)
    keys = (keys if _flag(ascending) else np.negative(keys)).reshape(-1, rows.shape[-1])
    # Only the values up to the k-th need sorting: a row may be a whole vocabulary. A nan sorts last, and so goes with none of them.
    limits = np.partition(keys, count - 1, axis=-1)[:, count - 1]
    order = np.empty((len(keys), count), dtype=np.int64)
    for row, (values, limit) in enumerate(zip(keys, limits, strict=True)):
        near = np.flatnonzero(values <= limit) if limit == limit else np.arange(values.size)
        order[row] = near[np.argsort(values[near], kind="stable")[:count]]
    indices = np.moveaxis(order.reshape(*rows.shape[:-1], count), -1, int(axis))
    largest = np.take_along_axis(x, indices, axis=int(axis))
    return (largest, indices.astype(NUMPY[output_indices_dtype])) if _flag(return_indices) else largest


def argsort(x: Array, axis: Array | int = -1, ascending: Array | bool = False) -> Any:
    """Of equal values the first comes first."""
    keys = x.astype(np.int64 if x.dtype.kind in "iu" else np.float32)
    return np.argsort(keys if _flag(ascending) else np.negative(keys), axis=int(axis), kind="stable").astype(np.int32)


def cumsum(x: Array, axis: Array | int = 0, exclusive: Array | bool = False, reverse: Array | bool = False) -> Any:
    wide = np.flip(widen(x), int(axis)) if _flag(reverse) else widen(x)
    total = np.cumsum(wide, axis=int(axis), dtype=wide.dtype)
    if _flag(exclusive):
        total = total - wide
    return np.flip(total, int(axis)) if _flag(reverse) else total


def layer_norm(
    x: Array, axes: Array | None = None, gamma: Array | None = None, beta: Array | None = None, epsilon: Array | float = 1e-5
) -> Any:
    wide, over = widen(x), _axes(axes, x.ndim)
    centred = wide - wide.mean(axis=over, keepdims=True)
    normal = centred / np.sqrt(np.square(centred).mean(axis=over, keepdims=True) + np.float32(epsilon))
    shape = [size if axis in over else 1 for axis, size in enumerate(x.shape)]
    if gamma is not None:
        normal = normal * widen(gamma).reshape(shape)
    return normal if beta is None else normal + widen(beta).reshape(shape)


def l2_norm(x: Array, epsilon: Array | float = 1e-6) -> Any:
    """Over the last three axes together."""
    if x.ndim < 3:
        raise ValueError(f"rank {x.ndim} given, 3 or more expected")
    wide = widen(x)
    return wide / np.sqrt(np.square(wide).sum(axis=(-3, -2, -1), keepdims=True) + np.float32(epsilon))


# --- products --------------------------------------------------------------------------------------------------------------------------


def matmul(x: Array, y: Array, transpose_x: Array | bool = False, transpose_y: Array | bool = False) -> Any:
    wide_x, wide_y = widen(x), widen(y)
    if _flag(transpose_x) and x.ndim > 1:
        wide_x = wide_x.swapaxes(-1, -2)
    if _flag(transpose_y) and y.ndim > 1:
        wide_y = wide_y.swapaxes(-1, -2)
    return wide_x @ wide_y


def linear(x: Array, weight: Array, bias: Array | None = None) -> Any:
    product = widen(x) @ widen(weight).T
    return product if bias is None else product + widen(bias)


def einsum(values: Sequence[Array], equation: str) -> Any:
    return np.einsum(equation, *(widen(value) for value in values))


def conv(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    strides: Array | None = None,
    pad_type: str = "valid",
    pad: Array | None = None,
    dilations: Array | None = None,
    groups: Array | int = 1,
) -> Any:
    """Only kernels of one point, which are products over the channels.

    Args:
        x: [n, inputs, *D].
        weight: [outputs, inputs, 1, ...].
    """
    if any(size != 1 for size in weight.shape[2:]) or int(groups) != 1:
        raise ValueError(f"a kernel {list(weight.shape[2:])} in {int(groups)} groups; only kernels of size 1 in one group can be evaluated")
    if (strides is not None and np.any(strides != 1)) or (pad_type == "custom" and pad is not None and np.any(pad != 0)):
        raise ValueError("strides or padding; only strides of 1 without padding can be evaluated")
    count, inputs, *points = x.shape
    product = widen(weight).reshape(weight.shape[0], inputs) @ widen(x).reshape(count, inputs, -1)
    if bias is not None:
        product = product + widen(bias)[:, None]
    return product.reshape(count, weight.shape[0], *points)


def scaled_dot_product_attention(query: Array, key: Array, value: Array, attn_mask: Array | None = None) -> Any:
    """softmax(query keyᵀ / √E + mask) value. The definition has no grouped queries: batch and heads of all three are the same.

    Args:
        query: [*B, L, E].
        key: [*B, S, E].
        value: [*B, S, V].
        attn_mask: what [*B, L, S] can be made of: true where a row sees a key, or numbers to be added.
    """
    if not query.shape[:-2] == key.shape[:-2] == value.shape[:-2]:
        raise ValueError(
            f"batch and heads {list(query.shape[:-2])} of the query, {list(key.shape[:-2])} of the key and "
            f"{list(value.shape[:-2])} of the value differ; repeat heads first"
        )
    scores = widen(query) @ widen(key).swapaxes(-1, -2) / np.float32(math.sqrt(query.shape[-1]))
    if attn_mask is not None:
        scores = np.where(attn_mask, scores, np.float32(-np.inf)) if attn_mask.dtype == np.bool_ else scores + widen(attn_mask)
    return softmax(scores) @ widen(value)


# --- shapes ----------------------------------------------------------------------------------------------------------------------------


def reshape(x: Array, shape: Array) -> Array:
    """-1 takes what is left; 0 keeps the size of the same axis, counted from the last (iOS 17)."""
    wanted = shape.tolist()
    for back in range(1, len(wanted) + 1):
        if wanted[-back] == 0:
            wanted[-back] = x.shape[-back] if back <= x.ndim else 1
    return x.reshape(wanted)


def transpose(x: Array, perm: Array) -> Array:
    return x.transpose([int(axis) for axis in perm])


def expand_dims(x: Array, axes: Array) -> Array:
    return np.expand_dims(x, tuple(int(axis) for axis in np.ravel(axes)))


def squeeze(x: Array, axes: Array | None = None) -> Array:
    return x.squeeze() if axes is None else x.squeeze(_axes(axes, x.ndim))


def concat(values: Sequence[Array], axis: Array, interleave: Array | bool = False) -> Array:
    if _flag(interleave):
        raise ValueError("interleaved values; only one behind the other can be evaluated")
    return np.concatenate(values, axis=int(axis))


def stack(values: Sequence[Array], axis: Array) -> Array:
    return np.stack(values, axis=int(axis))


def split(x: Array, axis: Array, num_splits: Array | None = None, split_sizes: Array | None = None) -> Any:
    if split_sizes is not None:
        if int(split_sizes.sum()) != x.shape[int(axis)]:
            raise ValueError(f"parts {split_sizes.tolist()} of {x.shape[int(axis)]}")
        return tuple(np.split(x, np.cumsum(split_sizes)[:-1], axis=int(axis)))
    if num_splits is None:
        raise ValueError("neither num_splits nor split_sizes")
    return tuple(np.split(x, int(num_splits), axis=int(axis)))


def tile(x: Array, reps: Array) -> Array:
    return np.tile(x, tuple(int(rep) for rep in reps))


def reverse(x: Array, axes: Array | None = None) -> Array:
    return np.flip(x, _axes(axes, x.ndim))


def _slices(
    x: Array, begin: Array, end: Array, stride: Array | None, begin_mask: Array | None, end_mask: Array | None, squeeze_mask: Array | None
) -> tuple[slice | int, ...]:
    """What of each axis: from begin (masked: the first) to before end (masked: the last); with squeeze_mask only begin, without its axis.

    Negative begins and ends count from behind, as NumPy's.
    """
    if len(begin) != x.ndim or len(end) != x.ndim:
        raise ValueError(f"{len(begin)} begins and {len(end)} ends for {x.ndim} axes")
    found: list[slice | int] = []
    for axis in range(x.ndim):
        start = None if begin_mask is not None and begin_mask[axis] else int(begin[axis])
        stop = None if end_mask is not None and end_mask[axis] else int(end[axis])
        step = 1 if stride is None else int(stride[axis])
        if squeeze_mask is not None and squeeze_mask[axis]:
            at = start or 0
            if not -x.shape[axis] <= at < x.shape[axis]:
                raise ValueError(f"index {at} is outside axis {axis} of size {x.shape[axis]}")
            found.append(at)
        else:
            found.append(slice(start, stop, step))
    return tuple(found)


def slice_by_index(
    x: Array,
    begin: Array,
    end: Array,
    stride: Array | None = None,
    begin_mask: Array | None = None,
    end_mask: Array | None = None,
    squeeze_mask: Array | None = None,
) -> Array:
    """See :func:`_slices`."""
    return np.asarray(x[_slices(x, begin, end, stride, begin_mask, end_mask, squeeze_mask)])


def slice_update(
    x: Array,
    update: Array,
    begin: Array,
    end: Array,
    stride: Array | None = None,
    begin_mask: Array | None = None,
    end_mask: Array | None = None,
    squeeze_mask: Array | None = None,
) -> Array:
    """A copy of x with ``update`` in the place that :func:`_slices` says."""
    return slice_update_in_place(x.copy(), update, begin, end, stride, begin_mask, end_mask, squeeze_mask)


def slice_update_in_place(
    x: Array,
    update: Array,
    begin: Array,
    end: Array,
    stride: Array | None = None,
    begin_mask: Array | None = None,
    end_mask: Array | None = None,
    squeeze_mask: Array | None = None,
) -> Array:
    """:func:`slice_update` for an x that nobody needs any more: it is written to and returned."""
    place = _slices(x, begin, end, stride, begin_mask, end_mask, squeeze_mask)
    if x[place].shape != update.shape:
        raise ValueError(f"an update of shape {list(update.shape)} for a slice of shape {list(x[place].shape)}")
    x[place] = update
    return x


def slice_by_size(x: Array, begin: Array, size: Array) -> Array:
    """``size`` values of each axis from ``begin``; -1 takes all that are left."""
    found = []
    for axis, (start, count) in enumerate(zip(begin.tolist(), size.tolist(), strict=True)):
        start += x.shape[axis] if start < 0 else 0
        stop = x.shape[axis] if count == -1 else start + count
        if not 0 <= start <= stop <= x.shape[axis]:
            raise ValueError(f"{count} values from {start} of axis {axis}, which has {x.shape[axis]}")
        found.append(slice(start, stop))
    return x[tuple(found)]


def band_part(x: Array, lower: Array | int = -1, upper: Array | int = -1) -> Array:
    """Zero outside a band of ``lower`` diagonals below the main one and ``upper`` above it; -1: all."""
    row, column = np.arange(x.shape[-2])[:, None], np.arange(x.shape[-1])
    inside = ((int(lower) < 0) | (row - column <= int(lower))) & ((int(upper) < 0) | (column - row <= int(upper)))
    return np.where(inside, x, np.zeros((), dtype=x.dtype))


def fill(shape: Array, value: Array | float = 0.0) -> Array:
    return np.full(shape.tolist(), value, dtype=np.asarray(value).dtype)


def fill_like(ref_tensor: Array, value: Array | float = 0.0) -> Array:
    return np.full(ref_tensor.shape, value, dtype=np.asarray(value).dtype)


def range_1d(end: Array, start: Array, step: Array) -> Array:
    values: Array = np.arange(start.item(), end.item(), step.item()).astype(start.dtype)
    return values


def shape(x: Array) -> Array:
    return np.array(x.shape, dtype=np.int32)


def one_hot(
    indices: Array, one_hot_vector_size: Array, axis: Array | int = -1, on_value: Array | int = 1, off_value: Array | int = 0
) -> Array:
    """An index outside gives a row of ``off_value``."""
    hot = indices[..., None] == np.arange(int(one_hot_vector_size))
    return np.moveaxis(np.where(hot, on_value, off_value), -1, int(axis))


# --- gather and scatter ----------------------------------------------------------------------------------------------------------------


def gather(x: Array, indices: Array, axis: Array | int = 0, batch_dims: Array | int = 0, validate_indices: Array | bool = False) -> Array:
    """[*D] and [*N] give D[:axis] + N[batch_dims:] + D[axis+1:]."""
    along, batch = int(axis) % x.ndim, int(batch_dims)
    found = _within(indices, x.shape[along])
    if batch == 0:
        return np.take(x, found, axis=along)
    rows = [np.take(x[at], found[at], axis=along - batch) for at in np.ndindex(*x.shape[:batch])]
    return np.stack(rows).reshape(*x.shape[:batch], *rows[0].shape)


def gather_along_axis(x: Array, indices: Array, axis: Array | int = 0, validate_indices: Array | bool = False) -> Array:
    return np.take_along_axis(x, _within(indices, x.shape[int(axis)]), axis=int(axis))


def gather_nd(x: Array, indices: Array, batch_dims: Array | int = 0, validate_indices: Array | bool = False) -> Array:
    """The last axis of ``indices`` [*K, n] names a place along the n axes behind the batch's."""
    batch = int(batch_dims)

    def take(array: Array, where: Array) -> Array:
        return np.asarray(array[tuple(_within(where[..., axis], array.shape[axis]) for axis in range(where.shape[-1]))])

    if batch == 0:
        return take(x, indices)
    rows = [take(x[at], indices[at]) for at in np.ndindex(*x.shape[:batch])]
    return np.stack(rows).reshape(*x.shape[:batch], *rows[0].shape)


_SCATTER: Final[dict[str, Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "max": np.maximum, "min": np.minimum,
}  # fmt: skip


def _scatter(data: Array, place: Any, updates: Array, mode: str) -> Array:
    result = widen(data).copy()
    if mode == "update":
        result[place] = updates
    elif mode in _SCATTER:
        _SCATTER[mode].at(result, place, widen(updates))
    else:
        raise ValueError(f"mode {mode} is unknown")
    return result


def scatter(
    data: Array, indices: Array, updates: Array, axis: Array | int = 0, mode: str = "add", validate_indices: Array | bool = False
) -> Array:
    along = int(axis) % data.ndim
    place = (*([slice(None)] * along), _within(indices, data.shape[along]))
    return _scatter(data, place, updates, mode)


def scatter_along_axis(
    data: Array, indices: Array, updates: Array, axis: Array | int = 0, mode: str = "add", validate_indices: Array | bool = False
) -> Array:
    along = int(axis) % data.ndim
    place: list[Array] = list(np.indices(indices.shape, sparse=True))
    place[along] = _within(indices, data.shape[along])
    return _scatter(data, tuple(place), updates, mode)


def scatter_nd(data: Array, indices: Array, updates: Array, mode: str = "add", validate_indices: Array | bool = False) -> Array:
    place = tuple(_within(indices[..., axis], data.shape[axis]) for axis in range(indices.shape[-1]))
    return _scatter(data, place, updates, mode)


def identity(x: Array) -> Array:
    return x


OPERATORS: Final[dict[str, Operator]] = {
    "abs": _unary(np.abs),
    "add": _binary(np.add),
    "argsort": argsort,
    "band_part": band_part,
    "cast": cast,
    "ceil": _unary(np.ceil),
    "clip": clip,
    "concat": concat,
    "conv": conv,
    "cos": _unary(np.cos),
    "cumsum": cumsum,
    "einsum": einsum,
    "equal": _binary(np.equal),
    "erf": erf,
    "exp": _unary(np.exp),
    "exp2": _unary(np.exp2),
    "expand_dims": expand_dims,
    "fill": fill,
    "fill_like": fill_like,
    "floor": _unary(np.floor),
    "floor_div": _binary(np.floor_divide),
    "gather": gather,
    "gather_along_axis": gather_along_axis,
    "gather_nd": gather_nd,
    "gelu": gelu,
    "greater": _binary(np.greater),
    "greater_equal": _binary(np.greater_equal),
    "identity": identity,
    "inverse": inverse,
    "l2_norm": l2_norm,
    "layer_norm": layer_norm,
    "less": _binary(np.less),
    "less_equal": _binary(np.less_equal),
    "linear": linear,
    "log": log,
    "logical_and": _binary(np.logical_and),
    "logical_not": _unary(np.logical_not),
    "logical_or": _binary(np.logical_or),
    "logical_xor": _binary(np.logical_xor),
    "matmul": matmul,
    "maximum": _binary(np.maximum),
    "minimum": _binary(np.minimum),
    "mod": _binary(np.mod),
    "mul": _binary(np.multiply),
    "not_equal": _binary(np.not_equal),
    "one_hot": one_hot,
    "pow": _binary(np.power),
    "range_1d": range_1d,
    "real_div": real_div,
    "reduce_argmax": reduce_argmax,
    "reduce_argmin": reduce_argmin,
    "reduce_l1_norm": _reduce(_l1_norm),
    "reduce_l2_norm": _reduce(_l2_norm),
    "reduce_log_sum_exp": _reduce(_log_sum_exp),
    "reduce_max": _reduce(np.max),
    "reduce_mean": _reduce(np.mean),
    "reduce_min": _reduce(np.min),
    "reduce_prod": _reduce(np.prod),
    "reduce_sum": _reduce(np.sum),
    "reduce_sum_square": _reduce(_sum_square),
    "relu": _unary(lambda x: np.maximum(x, x.dtype.type(0))),
    "reshape": reshape,
    "reverse": reverse,
    "round": _unary(np.rint),
    "rsqrt": rsqrt,
    "scaled_dot_product_attention": scaled_dot_product_attention,
    "scatter": scatter,
    "scatter_along_axis": scatter_along_axis,
    "scatter_nd": scatter_nd,
    "select": select,
    "shape": shape,
    "sigmoid": sigmoid,
    "sign": _unary(np.sign),
    "silu": silu,
    "sin": _unary(np.sin),
    "slice_by_index": slice_by_index,
    "slice_by_size": slice_by_size,
    "slice_update": slice_update,
    "softmax": softmax,
    "softplus": softplus,
    "split": split,
    "sqrt": _unary(np.sqrt),
    "square": _unary(np.square),
    "squeeze": squeeze,
    "stack": stack,
    "sub": _binary(np.subtract),
    "tanh": _unary(np.tanh),
    "tile": tile,
    "topk": topk,
    "transpose": transpose,
}

# Parameters that take a list of values.
LISTS: Final = frozenset({("concat", "values"), ("stack", "values"), ("einsum", "values")})

# Parameters that are factors of a product: where a float16 weight stands, it is kept as float32.
FACTORS: Final = frozenset({("linear", "weight"), ("conv", "weight"), ("matmul", "x"), ("matmul", "y")})

# Operators whose result may be the memory of what they are given. All others make new arrays.
VIEWS: Final = frozenset(
    {"einsum", "expand_dims", "identity", "reshape", "reverse", "slice_by_index", "slice_by_size", "split", "squeeze", "transpose"}
)
