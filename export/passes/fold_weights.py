"""Weights that are transposed, scaled or gathered in the graph become weights stored that way.

    MatMul(x, Transpose(W [out, in]))               ->  MatMul(x, W' [in, out])
    MatMul(x, Transpose(Mul(B, 2.0)))               ->  MatMul(x, B')
    MatMul(x, Transpose(Gather(E, draft_vocab)))    ->  MatMul(x, D [in, Vd])

The new weight is computed when the file is written, one tensor at a time, so that no second copy of the model is in memory.
A tensor that the graph also reads as it is (the tied embedding) is left alone: it must not be stored twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

_Array = np.ndarray[Any, Any]


def fold_weights(model: ir.Model) -> int:
    count = 0
    for node in list(model.graph):
        folded = _fold(node)
        if folded is None:
            continue
        output = node.outputs[0]
        source = node.inputs[0]
        assert source is not None
        weight = ir.Value(name=_free_name(model.graph, source), type=source.type, shape=folded.shape, const_value=folded)
        model.graph.register_initializer(weight)
        output.replace_all_uses_with(weight)
        model.graph.remove(node, safe=True)
        if not source.uses() and source.is_initializer():
            assert source.name is not None
            name = source.name
            del model.graph.initializers[name]
            _rename(weight, name)
        count += 1
    return count


def _fold(node: ir.Node) -> ir.LazyTensor | None:
    """The node's result as a tensor computed on demand; None where the node stays."""
    if node.op_type not in ("Transpose", "Mul", "Gather") or node.domain != "" or node.outputs[0].is_graph_output():
        return None
    inputs = [None if value is None else _constant(value) for value in node.inputs]
    if any(tensor is None for tensor in inputs):
        return None
    first = inputs[0]
    assert first is not None
    if len(first.shape) != 2:
        return None
    apply: Callable[..., _Array]
    if node.op_type == "Transpose":
        source = node.inputs[0]
        assert source is not None
        if any(use.node.op_type == "Gather" and _constant(use.node.inputs[1]) is None for use in source.uses()):
            return None
        perm = node.attributes.get_ints("perm", (1, 0))
        apply = functools.partial(np.transpose, axes=tuple(perm))
        shape = [first.shape[axis] for axis in perm]
    elif node.op_type == "Gather":
        second = inputs[1]
        assert second is not None
        if node.attributes.get_int("axis", 0) != 0 or len(second.shape) != 1:
            return None
        apply = functools.partial(np.take, axis=0)
        shape = [second.shape[0], first.shape[1]]
    else:
        second = inputs[1]
        assert second is not None
        if second.size != 1:
            return None
        apply = np.multiply
        shape = list(first.shape)
    tensors = [tensor for tensor in inputs if tensor is not None]

    def compute() -> ir.Tensor:
        result = np.ascontiguousarray(apply(*(tensor.numpy() for tensor in tensors)))
        return ir.Tensor(result.reshape([int(dim) for dim in shape]))

    return ir.LazyTensor(compute, dtype=first.dtype, shape=ir.Shape(shape))


def _constant(value: ir.Value | None) -> ir.TensorProtocol | None:
    if value is None:
        return None
    if value.is_initializer():
        return value.const_value
    producer = value.producer()
    if producer is not None and producer.op_type == "Constant":
        attribute = producer.attributes.get("value")
        return None if attribute is None else attribute.as_tensor()
    return None


def _free_name(graph: ir.Graph, source: ir.Value) -> str:
    stem = f"{source.name}.folded"
    number = 0
    while f"{stem}{number or ''}" in graph.initializers:
        number += 1
    return f"{stem}{number or ''}"


def _rename(value: ir.Value, name: str) -> None:
    value.name = name
