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
    graph = model.graph
    names: dict[ir.Value, str] = {}  # of each new weight: what it shall be called
    for node in list(graph):
        folded = _fold(node)
        if folded is None:
            continue
        source = node.inputs[0]
        assert source is not None
        assert source.name is not None
        name = names.get(source, source.name) + (".rows" if node.op_type == "Gather" else "")
        weight = ir.Value(name=f"{name}.folded.{len(names)}", type=source.type, shape=folded.shape, const_value=folded)
        graph.register_initializer(weight)
        names[weight] = name
        node.outputs[0].replace_all_uses_with(weight)
        graph.remove(node, safe=True)
        if not source.uses() and source.is_initializer():
            del graph.initializers[source.name]
    # A weight has its old name again where nothing else is left of it.
    for weight, name in names.items():
        if weight.is_initializer() and name not in graph.initializers:
            weight.name = name
    return len(names)


def _fold(node: ir.Node) -> ir.LazyTensor | None:
    """The node's result as a tensor computed on demand; None where the node stays."""
    if node.op_type not in ("Transpose", "Mul", "Gather") or node.domain != "" or node.outputs[0].is_graph_output():
        return None
    tensors = [tensor for value in node.inputs if (tensor := _constant(value)) is not None]
    if len(tensors) != len(node.inputs) or len(tensors[0].shape) != 2:
        return None
    rows, columns = (int(dim) for dim in tensors[0].shape.numpy())
    apply: Callable[..., _Array]
    if node.op_type == "Transpose":
        source = node.inputs[0]
        assert source is not None
        if any(use.node.op_type == "Gather" and _constant(use.node.inputs[1]) is None for use in source.uses()):
            return None
        apply, shape = np.transpose, (columns, rows)
        if tuple(node.attributes.get_ints("perm", (1, 0))) != (1, 0):
            return None
    elif node.op_type == "Gather":
        if node.attributes.get_int("axis", 0) != 0 or len(tensors[1].shape) != 1:
            return None
        apply, shape = functools.partial(np.take, axis=0), (tensors[1].size, columns)
    else:
        if tensors[1].size != 1:
            return None
        apply, shape = np.multiply, (rows, columns)

    def compute() -> ir.Tensor[Any]:
        result = np.ascontiguousarray(apply(*(tensor.numpy() for tensor in tensors)))
        return ir.Tensor(result.reshape(shape))

    return ir.LazyTensor(compute, dtype=tensors[0].dtype, shape=ir.Shape(shape))


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
