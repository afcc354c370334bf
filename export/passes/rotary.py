"""Rotary embedding becomes one node.

    Add(Mul(x, cos), Mul(Concat(Neg(x[..., d/2:]), x[..., :d/2]), sin))  ->  RotaryEmbedding(x, cos[..., :d/2], sin[..., :d/2])

with x [1, heads, R, d] and cos, sin [1, 1, R, d] (both halves equal, as Hugging Face's ``rotate_half`` wants them). Without
position ids the standard operator (opset 23) takes cos and sin row by row, [1, R, d/2]: a tree's rows have any positions.
The halves of cos and sin are taken once for each set of rows: ``simplify`` joins the equal slices.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter import pattern

from specstream.export.passes.constants import integers


def _before(op: Any, x: Any, cos: Any, sin: Any, low: Any, mid: Any, top: Any, axis: Any) -> Any:
    second = op.Slice(x, mid, top, axis, _allow_other_inputs=True)
    first = op.Slice(x, low, mid, axis, _allow_other_inputs=True)
    turned = op.Concat(op.Neg(second), first, axis=-1)
    return op.Add(op.Mul(x, cos), op.Mul(turned, sin))


def _fits(context: Any, x: ir.Value, cos: ir.Value, low: ir.Value, mid: ir.Value, top: ir.Value, axis: ir.Value, **_: Any) -> bool:
    if x.shape is None or len(x.shape) != 4 or not isinstance(x.shape[3], int):
        return False
    size = x.shape[3]
    end = integers(top) or [0]
    same_size = cos.shape is not None and len(cos.shape) == 4 and cos.shape[1] == 1 and cos.shape[3] == size
    return same_size and integers(axis) in ([3], [-1]) and integers(low) == [0] and integers(mid) == [size // 2] and end[0] >= size


def _after(op: Any, x: ir.Value, cos: ir.Value, sin: ir.Value, low: ir.Value, mid: ir.Value, **_: Any) -> Any:
    def half(table: ir.Value) -> Any:
        return op.Squeeze(op.Slice(table, low, mid, op.Constant(value_ints=[3])), op.Constant(value_ints=[1]))

    return op.RotaryEmbedding(x, half(cos), half(sin))


_RULES = pattern.RewriteRuleSet([pattern.RewriteRule(_before, _after, _fits, name="rotary")], commute=True)


def fuse_rotary(model: ir.Model) -> int:
    return _RULES.apply_to_model(model)
