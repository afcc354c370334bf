"""Reshapes that do nothing.

    Reshape(Reshape(x, a), b)            ->  Reshape(x, b)
    Reshape(x [1, R, n], [1, -1, n])     ->  x

Targets are constants without zeros here, so that neither case depends on what lies between. Returns how many were dropped.
"""

from __future__ import annotations

import onnx_ir as ir

from specstream.export.passes.constants import integers


def drop_reshapes(model: ir.Model) -> int:
    count = 0
    for node in list(model.graph):
        target = _target(node)
        if target is None:
            continue
        source = node.inputs[0]
        assert source is not None
        inner = source.producer()
        if inner is not None and inner.op_type == "Reshape" and _target(inner) is not None:
            node.replace_input_with(0, inner.inputs[0])
            source = inner.inputs[0]
            assert source is not None
            count += 1
            if not inner.outputs[0].uses() and not inner.outputs[0].is_graph_output():
                model.graph.remove(inner, safe=True)
        if _keeps(source.shape, target) and not node.outputs[0].is_graph_output():
            node.outputs[0].replace_all_uses_with(source)
            model.graph.remove(node, safe=True)
            count += 1
    return count


def _target(node: ir.Node) -> list[int] | None:
    """The constant target of a reshape; None for other nodes, computed targets and targets that copy dimensions (0)."""
    if node.op_type != "Reshape" or node.domain != "":
        return None
    target = integers(node.inputs[1])
    return None if target is None or 0 in target else target


def _keeps(shape: ir.Shape | None, target: list[int]) -> bool:
    """Whether a reshape to ``target`` leaves this shape as it is: all but one dimension equal, the free one in its place."""
    if shape is None or len(shape) != len(target):
        return False
    free = [i for i, dim in enumerate(target) if dim == -1]
    return len(free) <= 1 and all(i in free or shape[i] == dim for i, dim in enumerate(target))
