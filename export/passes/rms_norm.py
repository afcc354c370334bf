"""RMS normalisation becomes one node.

    Mul(scale, Mul(x, Reciprocal(Sqrt(Add(ReduceMean(Pow(x, 2), -1), epsilon)))))  ->  RMSNormalization(x, scale)

The standard operator of opset 23, in both profiles.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter import pattern

from specstream.export.passes.constants import scalar


def _before(op: Any, x: Any, scale: Any, epsilon: Any) -> Any:
    mean = op.ReduceMean(op.Pow(x, 2.0), [-1], keepdims=1, _allow_other_attributes=True)
    return op.Mul(op.Mul(x, op.Reciprocal(op.Sqrt(op.Add(mean, epsilon)))), scale)


def _fits(context: Any, x: ir.Value, scale: ir.Value, epsilon: ir.Value, **_: Any) -> bool:
    return scale.shape is not None and len(scale.shape) == 1 and scalar(epsilon) is not None


def _after(op: Any, x: ir.Value, scale: ir.Value, epsilon: ir.Value, **_: Any) -> Any:
    return op.RMSNormalization(x, scale, axis=-1, epsilon=scalar(epsilon), stash_type=1)


_RULES = pattern.RewriteRuleSet([pattern.RewriteRule(_before, _after, _fits, name="rms_norm")], commute=True)


def fuse_rms_norm(model: ir.Model) -> int:
    return _RULES.apply_to_model(model)
