"""Attention takes packed projections and turns them itself.

    q, k, v = Split(x)
    GroupQueryAttention(RotaryEmbedding(q, cos, sin), RotaryEmbedding(k, cos, sin), v, ..., bias)
      ->  GroupQueryAttention(x, , , ..., cos_table, sin_table, positions, bias, do_rotary=1)

Three nodes of a layer are gone, and a copy of x; with the last layer also what made cosines and sines in each call. The tables have a row
for each position of the context, computed as the graph computes them, cos(position · frequency) · factor: where a graph does that in
another way, or the tables would be larger than they may, it stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx_ir.passes import common

SIZES = 8  # ONNX Runtime turns heads of a multiple of 16 entries
_SHAPING = ("Squeeze", "Unsqueeze", "Slice")


@dataclass(frozen=True)
class _Angles:
    """cos(position · frequency) · factor of positions int64 [1, R]."""

    positions: ir.Value
    frequencies: npt.NDArray[np.float32]  # [d / 2]
    factor: float


def fuse_packed_attention(model: ir.Model, context: int, most_bytes: int) -> int:
    """Returns how many attention nodes take packed projections now.

    Args:
        context: positions that the model can have.
        most_bytes: that the tables may take; more, and nothing is changed.
    """
    graph = model.graph
    tables: dict[tuple[ir.Value, ir.Value], tuple[ir.Value, ir.Value, ir.Value] | None] = {}
    count = 0
    for node in list(graph):
        if node.op_type != "GroupQueryAttention":
            continue
        found = _rotated(node)
        if found is None:
            continue
        packed, cos, sin = found
        if (cos, sin) not in tables:
            tables[cos, sin] = _tables(node, cos, sin, context, most_bytes)
        made = tables[cos, sin]
        if made is None:
            continue
        inputs = [packed, None, None, *node.inputs[3:7], *made, *node.inputs[10:]]
        fused = ir.node("GroupQueryAttention", inputs, {}, domain=node.domain, num_outputs=len(node.outputs), name=node.name)
        for attribute in node.attributes.values():
            fused.attributes.add(attribute)
        fused.attributes.add(ir.AttrInt64("do_rotary", 1))
        graph.insert_before(node, fused)
        superfluous = [part for value in node.inputs[:3] if value is not None and (part := value.producer()) is not None]
        for old, new in zip(node.outputs, fused.outputs, strict=True):
            new.shape, new.type = old.shape, old.type
            name = old.name
            old.replace_all_uses_with(new, replace_graph_outputs=old.is_graph_output())
            old.name = None
            new.name = name
        split = superfluous[-1]
        graph.remove([node, *superfluous[:-1], split], safe=True)
        count += 1
    if count:
        common.RemoveUnusedNodesPass()(model)
    return count


def _rotated(node: ir.Node) -> tuple[ir.Value, ir.Value, ir.Value] | None:
    """The packed projections, cos and sin of an attention node of the form above."""
    query, key, value = node.inputs[:3]
    if node.attributes.get_int("do_rotary", 0) or any(x is not None for x in node.inputs[7:10]) or None in (query, key, value):
        return None
    assert query is not None
    assert key is not None
    assert value is not None
    turned = [query.producer(), key.producer()]
    split = value.producer()
    if split is None or split.op_type != "Split" or len(split.outputs) != 3 or split.attributes.get_int("axis", 0) != -1:
        return None
    for place, rotary in enumerate(turned):
        if rotary is None or rotary.op_type != "RotaryEmbedding" or len(rotary.inputs) != 3:
            return None
        if rotary.attributes.get_int("interleaved", 0) or rotary.attributes.get_int("rotary_embedding_dim", 0):
            return None
        if rotary.inputs[0] is not split.outputs[place] or len(rotary.outputs[0].uses()) != 1 or len(split.outputs[place].uses()) != 1:
            return None
    first, second = turned
    assert first is not None
    assert second is not None
    packed, (cos, sin) = split.inputs[0], first.inputs[1:3]
    if split.outputs[2] is not value or len(value.uses()) != 1 or tuple(second.inputs[1:3]) != (cos, sin):
        return None
    return None if packed is None or cos is None or sin is None else (packed, cos, sin)


def _tables(node: ir.Node, cos: ir.Value, sin: ir.Value, context: int, most_bytes: int) -> tuple[ir.Value, ir.Value, ir.Value] | None:
    """New weights with the cosines and sines of all positions [context, d / 2], and the positions of the call's rows [1, R], made before
    ``node`` where they have another shape."""
    graph = node.graph
    assert graph is not None
    angles, other = _angles(cos, "Cos"), _angles(sin, "Sin")
    if angles is None or other is None or angles.positions is not other.positions or angles.factor != other.factor:
        return None
    if 2 * context * angles.frequencies.nbytes > most_bytes or len(angles.frequencies) % SIZES:
        return None
    turns = np.arange(context, dtype=np.float32)[:, None] * angles.frequencies
    made = []
    for name, table in (("rotary_cos", np.cos(turns)), ("rotary_sin", np.sin(turns))):
        tensor = ir.tensor((table * np.float32(angles.factor)).astype(np.float32))
        known = graph.initializers.get(name)  # of other rows of the same graph, or of layers that turn otherwise
        if known is not None:
            assert known.const_value is not None
            if not np.array_equal(known.const_value.numpy(), tensor.numpy()):
                return None
            made.append(known)
            continue
        made.append(ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(turns.shape), const_value=tensor))
        graph.register_initializer(made[-1])
    positions = angles.positions
    if positions.shape is not None and len(positions.shape) == 1:
        axes = ir.tensor(np.array([0], dtype=np.int64))
        axis = ir.Value(name=f"{positions.name}.row", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([1]), const_value=axes)
        graph.register_initializer(axis)
        row = ir.node("Unsqueeze", [positions, axis])
        graph.insert_before(node, row)
        positions = row.outputs[0]
    return made[0], made[1], positions


def _angles(value: ir.Value, function: str) -> _Angles | None:
    """How a graph computes half of its cosines (or sines): see the module."""
    factor = 1.0
    node = value.producer()
    while node is not None and (node.op_type in _SHAPING or node.op_type == "Mul"):
        if node.op_type == "Mul":
            constant = node.inputs[1].const_value if node.inputs[1] is not None else None
            if constant is None or constant.size != 1:
                return None
            factor *= float(constant.numpy().reshape(()))
        node = _before(node)
    if node is None or node.op_type != function:
        return None
    node = _before(node)
    if node is None or node.op_type != "Concat" or len(node.inputs) != 2 or node.inputs[0] is not node.inputs[1]:
        return None
    node = _before(node)
    if node is None or node.op_type != "Transpose":
        return None
    node = _before(node)
    frequencies = None if node is None or node.op_type != "MatMul" or node.inputs[0] is None else node.inputs[0].const_value
    if node is None or frequencies is None or node.inputs[1] is None:
        return None
    cast = node.inputs[1].producer()
    positions = None if cast is None or cast.op_type != "Cast" else cast.inputs[0]
    while positions is not None and positions.shape is not None and len(positions.shape) > 2:
        made_by = positions.producer()
        positions = None if made_by is None or made_by.op_type != "Unsqueeze" else made_by.inputs[0]
    if positions is None or positions.shape is None or len(positions.shape) not in (1, 2) or positions.dtype != ir.DataType.INT64:
        return None
    return _Angles(positions, frequencies.numpy().astype(np.float32).reshape(-1), factor)


def _before(node: ir.Node) -> ir.Node | None:
    value = node.inputs[0]
    return None if value is None else value.producer()
