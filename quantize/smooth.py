"""Moves the size of channels from activations into weights, exactly: ``x W = (x / s) (s W)`` (SmoothQuant, arXiv 2211.10438).

The division costs nothing, since what makes x can absorb it:

    x = RMSNormalization(_, scale), SkipSimplifiedLayerNormalization(_, _, scale)     scale / s
    x = Mul(silu(gate), up), up = h U                                                 U / s, by columns

Each x whose readers are all constant products of their own is a :class:`Group`. Which s is good is not known here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from specstream.quantize.formats import FloatArray

_NORMS = ("RMSNormalization", "SkipSimplifiedLayerNormalization", "SimplifiedLayerNormalization")


@dataclass(frozen=True, eq=False)
class _Part:
    """Entries of a weight that make the channels of a value: ``columns`` of its last dimension."""

    weight: ir.Value
    columns: slice


@dataclass(frozen=True, eq=False)
class Group:
    """A value whose channels can be scaled.

    Attributes:
        rows: the value x [..., K].
        readers: weights [K, N] of the products that read it.
    """

    rows: ir.Value
    readers: tuple[ir.Value, ...]
    makers: tuple[_Part, ...]

    def scale(self, factors: FloatArray) -> None:
        """Make x / factors of x, and factors · W of each weight that reads it. float32 [K]; all above zero."""
        for part in self.makers:
            _change(part.weight, _divided(part.columns, factors))
        for weight in self.readers:
            _change(weight, lambda matrix: matrix * factors[:, None])


def find_groups(model: ir.Model) -> list[Group]:
    """All values that can be scaled, in the graph's order."""
    groups = []
    for node in model.graph:
        for value in node.outputs[:1]:
            readers = _readers(value)
            makers = _makers(node) if readers else None
            if readers and makers:
                groups.append(Group(value, readers, makers))
    return groups


def _readers(value: ir.Value) -> tuple[ir.Value, ...] | None:
    """Weights of the products that read a value; None when anything else reads it too."""
    weights = []
    for use in value.uses():
        weight = use.node.inputs[1] if use.node.op_type == "MatMul" and use.idx == 0 else None
        if weight is None or not _own(weight, 2):
            return None
        weights.append(weight)
    return None if value.is_graph_output() else tuple(weights)


def _makers(node: ir.Node) -> tuple[_Part, ...] | None:
    if node.op_type in _NORMS:
        scale = node.inputs[2 if node.op_type == "SkipSimplifiedLayerNormalization" else 1]
        return (_Part(scale, slice(None)),) if scale is not None and _own(scale, 1) else None
    if node.op_type != "Mul":
        return None
    for value in node.inputs:
        # Either factor may take the division; a linear one can.
        parts = None if value is None else _linear(value)
        if parts is not None:
            return parts
    return None


def _linear(value: ir.Value) -> tuple[_Part, ...] | None:
    """Weights whose columns make this value's channels, when it is a linear map of something and nothing else reads it."""
    node = value.producer()
    if node is None or len(value.uses()) != 1 or value.is_graph_output():
        return None
    if node.op_type == "MatMul":
        weight = node.inputs[1]
        return (_Part(weight, slice(None)),) if weight is not None and _own(weight, 2) else None
    if node.op_type == "Add":
        found: list[_Part] = []
        for term in node.inputs:
            parts = None if term is None else (_Part(term, slice(None)),) if _own(term, 1) else _linear(term)
            if parts is None:
                return None
            found += parts
        return tuple(found)
    if node.op_type == "Split":
        return _split_part(node, value)
    return None


def _split_part(node: ir.Node, value: ir.Value) -> tuple[_Part, ...] | None:
    packed, sizes = node.inputs[0], node.inputs[1]
    whole = None if packed is None else _linear(packed)
    widths = None if sizes is None or sizes.const_value is None else sizes.const_value.numpy().tolist()
    if whole is None or widths is None or node.attributes.get_int("axis", 0) != -1:
        return None
    place = list(node.outputs).index(value)
    start = sum(widths[:place])
    if any(part.columns != slice(None) for part in whole):
        return None
    return tuple(_Part(part.weight, slice(start, start + widths[place])) for part in whole)


def _own(value: ir.Value, rank: int) -> bool:
    """Whether this is a float weight of that rank which one node reads."""
    tensor = value.const_value
    if not value.is_initializer() or tensor is None or len(value.uses()) != 1:
        return False
    return tensor.dtype == ir.DataType.FLOAT and len(tensor.shape) == rank


def _divided(columns: slice, factors: FloatArray) -> Callable[[Any], Any]:
    def apply(array: Any) -> Any:
        changed = np.array(array)
        changed[..., columns] /= factors
        return changed

    return apply


def _change(weight: ir.Value, apply: Callable[[Any], Any]) -> None:
    """Let a weight be computed from what it was, when it is read."""
    before = weight.const_value
    assert before is not None

    def compute() -> ir.Tensor[Any]:
        return ir.Tensor(np.ascontiguousarray(apply(before.numpy()), dtype=np.float32))

    weight.const_value = ir.LazyTensor(compute, dtype=before.dtype, shape=ir.Shape(before.shape.numpy()), name=weight.name)
