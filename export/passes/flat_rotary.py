"""Rotary embedding on rows as the projections leave them, without two transposes.

    Transpose(RotaryEmbedding(Transpose(x [1, R, heads, d]), cos, sin))
      ->  Reshape(RotaryEmbedding(Reshape(x, [1, R, heads * d]), cos, sin, num_heads=heads), [1, R, heads, d])

``drop_reshapes`` joins the reshapes with their neighbours.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter import pattern


def _before(op: Any, x: Any, cos: Any, sin: Any) -> Any:
    turned = op.RotaryEmbedding(op.Transpose(x, perm=[0, 2, 1, 3]), cos, sin, _allow_other_attributes=True)
    return op.Transpose(turned, perm=[0, 2, 1, 3])


def _fits(context: Any, x: ir.Value, **_: Any) -> bool:
    return x.shape is not None and len(x.shape) == 4 and all(isinstance(dim, int) for dim in (x.shape[2], x.shape[3]))


def _after(op: Any, x: ir.Value, cos: ir.Value, sin: ir.Value, **_: Any) -> Any:
    assert x.shape is not None
    heads, size = x.shape[2], x.shape[3]
    assert isinstance(heads, int)
    assert isinstance(size, int)
    flat = op.Reshape(x, op.Constant(value_ints=[1, -1, heads * size]))
    turned = op.RotaryEmbedding(flat, cos, sin, num_heads=heads)
    return op.Reshape(turned, op.Constant(value_ints=[1, -1, heads, size]))


_RULES = pattern.RewriteRuleSet([pattern.RewriteRule(_before, _after, _fits, name="flat_rotary")])


def flatten_rotary(model: ir.Model) -> int:
    return _RULES.apply_to_model(model)
