"""Projections of the same rows become one product.

    MatMul(x, Q), MatMul(x, K), MatMul(x, V)            ->  Split(MatMul(x, [Q K V]))
    Add(MatMul(x, Q), q), Add(MatMul(x, K), k), ...     ->  Split(Add(MatMul(x, [Q K V]), [q k v]))

Each number is the sum of the same products as before. The packed weight is computed when the file is written, so that no second copy of
the model is in memory. Low-rank updates (``.lora_``) are left alone: they belong to single projections, and so are weights that
something else reads too. Gate and up projections stay apart: what splits them copies a row of twice the MLP's width, which takes longer
than a second product does (1 % of a call with int4 weights, more with w8a8).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import onnx_ir as ir

PARTS: Final = ("q_proj", "k_proj", "v_proj")
# Parts -> what Hugging Face calls them where an architecture has them in one matrix.
_NAMES: Final[dict[tuple[str, ...], str]] = {PARTS: "qkv_proj"}


def pack_projections(model: ir.Model) -> int:
    """Returns how many products are left fewer."""
    groups: dict[ir.Value, list[ir.Node]] = {}
    for node in model.graph:
        if _is_projection(node):
            rows = node.inputs[0]
            assert rows is not None
            groups.setdefault(rows, []).append(node)
    count = 0
    for rows, nodes in groups.items():
        if len(nodes) >= len(PARTS):
            _pack(model.graph, rows, nodes)
            count += len(nodes) - 1
    return count


def _is_projection(node: ir.Node) -> bool:
    if node.op_type != "MatMul" or node.domain != "" or node.outputs[0].is_graph_output():
        return False
    rows, weight = node.inputs
    if rows is None or rows.is_initializer() or weight is None:
        return False
    return _only_reader(weight, 2) and ".lora_" not in (weight.name or "")


def _only_reader(value: ir.Value, rank: int) -> bool:
    """Whether this is a weight of that many dimensions that one node reads."""
    return value.is_initializer() and value.shape is not None and len(value.shape) == rank and len(value.uses()) == 1


def _bias(node: ir.Node) -> tuple[ir.Node, ir.Value] | None:
    """The node that adds a constant vector to a projection and alone reads it, and the vector."""
    uses = list(node.outputs[0].uses())
    if len(uses) != 1 or uses[0].node.op_type != "Add":
        return None
    add = uses[0].node
    vector = add.inputs[1 - uses[0].idx]
    if vector is None or not _only_reader(vector, 1) or add.outputs[0].is_graph_output():
        return None
    return add, vector


def _pack(graph: ir.Graph, rows: ir.Value, nodes: list[ir.Node]) -> None:
    weights = [weight for node in nodes if (weight := node.inputs[1]) is not None]
    packed = _joined(graph, weights)
    made = [ir.node("MatMul", [rows, packed])]
    ends, old_weights = nodes, weights
    biases = [bias for node in nodes if (bias := _bias(node)) is not None]
    if len(biases) == len(nodes):
        ends, vectors = [end for end, _ in biases], [vector for _, vector in biases]
        made.append(ir.node("Add", [made[0].outputs[0], _joined(graph, vectors)]))
        old_weights = [*weights, *vectors]
    widths = np.array([_sizes(weight)[-1] for weight in weights], dtype=np.int64)
    for node in made if rows.shape is not None else []:
        assert rows.shape is not None
        node.outputs[0].name = f"{packed.name}.{node.op_type.lower()}"
        node.outputs[0].shape, node.outputs[0].type = _widened(rows.shape, int(widths.sum())), rows.type
    sizes = _register(graph, f"{packed.name}.sizes", ir.tensor(widths))
    split = ir.node("Split", [made[-1].outputs[0], sizes], {"axis": -1}, num_outputs=len(nodes))
    graph.insert_before(nodes[0], [*made, split])
    for end, part in zip(ends, split.outputs, strict=True):
        old = end.outputs[0]
        part.name, part.shape, part.type = old.name, old.shape, old.type
        old.replace_all_uses_with(part)
        old.name = None
    graph.remove(list({*nodes, *ends}), safe=True)
    for value in old_weights:
        assert value.name is not None
        del graph.initializers[value.name]


def _sizes(weight: ir.Value) -> list[int]:
    assert weight.const_value is not None
    return [int(size) for size in weight.const_value.shape.numpy()]


def _widened(shape: ir.Shape, width: int) -> ir.Shape:
    changed: ir.Shape = shape.copy()
    changed[-1] = width
    return changed


def _register(graph: ir.Graph, name: str, tensor: ir.TensorProtocol) -> ir.Value:
    value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape.numpy()), const_value=tensor)
    graph.register_initializer(value)
    return value


def _joined(graph: ir.Graph, parts: Sequence[ir.Value]) -> ir.Value:
    """A new weight: the parts side by side along their last dimension."""
    tensors = [tensor for part in parts if (tensor := part.const_value) is not None]
    shape = ir.Shape([*_sizes(parts[0])[:-1], sum(_sizes(part)[-1] for part in parts)])

    def compute() -> ir.Tensor[Any]:
        return ir.Tensor(np.concatenate([tensor.numpy() for tensor in tensors], axis=-1))

    name = _packed_name([part.name or "" for part in parts])
    return _register(graph, name, ir.LazyTensor(compute, dtype=tensors[0].dtype, shape=shape, name=name))


def _packed_name(names: Sequence[str]) -> str:
    """``layers.0.self_attn.q_proj.weight`` and its neighbours -> ``layers.0.self_attn.qkv_proj.weight``."""
    split = [name.split(".") for name in names]
    if all(len(parts) >= 3 for parts in split) and len({(*parts[:-2], parts[-1]) for parts in split}) == 1:
        leaves = tuple(parts[-2] for parts in split)
        return ".".join([*split[0][:-2], _NAMES.get(leaves, "_".join(leaves)), split[0][-1]])
    return "+".join(names)
