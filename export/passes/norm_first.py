"""Norms of queries and keys come before the transpose to heads, not behind it (Gemma 3).

    RMSNormalization(Transpose(x [1, R, heads, d]), scale)  ->  Transpose(RMSNormalization(x, scale))

The norm runs over the last axis, which stays. ``flatten_rotary`` then finds transpose and rotary side by side.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter import pattern


def _before(op: Any, x: Any, scale: Any) -> Any:
    return op.RMSNormalization(op.Transpose(x, perm=[0, 2, 1, 3]), scale, _allow_other_attributes=True, _outputs=["normed"])


def _after(op: Any, x: ir.Value, scale: ir.Value, normed: ir.Value, **_: Any) -> Any:
    node = normed.producer()
    assert node is not None
    epsilon = node.attributes.get_float("epsilon", 1e-5)
    result = op.RMSNormalization(x, scale, axis=-1, epsilon=epsilon, stash_type=1)
    result.shape, result.type = x.shape, x.type  # the next pass reads them
    return op.Transpose(result, perm=[0, 2, 1, 3])


_RULES = pattern.RewriteRuleSet([pattern.RewriteRule(_before, _after, name="norm_first")])


def norms_first(model: ir.Model) -> int:
    return _RULES.apply_to_model(model)
