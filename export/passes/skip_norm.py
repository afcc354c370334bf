"""The residual sum and the norm that follows become one node (``ort`` profile).

    s = Add(x, y); RMSNormalization(s, scale)  ->  SkipSimplifiedLayerNormalization(x, y, scale), which also returns s

ONNX Runtime does not find this itself behind the standard RMSNormalization.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter import pattern


def _before(op: Any, x: Any, y: Any, scale: Any) -> Any:
    total = op.Add(x, y)
    return op.RMSNormalization(total, scale, _allow_other_attributes=True, _outputs=["normed"]), total


def _fits(context: Any, x: ir.Value, y: ir.Value, scale: ir.Value, **_: Any) -> bool:
    def size(value: ir.Value) -> object:
        return value.shape[2] if value.shape is not None and len(value.shape) == 3 else None

    width = scale.shape[0] if scale.shape is not None else None
    return isinstance(width, int) and size(x) == width and size(y) == width


def _after(op: Any, x: ir.Value, y: ir.Value, scale: ir.Value, normed: ir.Value, **_: Any) -> Any:
    node = normed.producer()
    assert node is not None
    epsilon = node.attributes.get_float("epsilon", 1e-5)
    result, _mean, _deviation, total = op.SkipSimplifiedLayerNormalization(
        x, y, scale, epsilon=epsilon, _domain="com.microsoft", _outputs=4
    )
    return result, total


_RULES = pattern.RewriteRuleSet([pattern.RewriteRule(_before, _after, _fits, name="skip_norm")])


def fuse_skip_norm(model: ir.Model) -> int:
    return _RULES.apply_to_model(model)
