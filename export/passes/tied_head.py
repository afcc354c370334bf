"""The head of a model with a tied embedding reads the embedding's own tensor.

    MatMul(h, Transpose(E))  ->  Gemm(h, E, transB=1)            h [L, H], E [V, H]

As a transposed weight it would be stored, or kept by the runtime's constant folding, a second time.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter import pattern


def _before(op: Any, hidden: Any, table: Any) -> Any:
    return op.MatMul(hidden, op.Transpose(table, perm=[1, 0]))


def _fits(context: Any, hidden: ir.Value, table: ir.Value, **_: Any) -> bool:
    return table.is_initializer() and hidden.shape is not None and len(hidden.shape) == 2


def _after(op: Any, hidden: ir.Value, table: ir.Value, **_: Any) -> Any:
    return op.Gemm(hidden, table, transB=1)


_RULES = pattern.RewriteRuleSet([pattern.RewriteRule(_before, _after, _fits, name="tied_head")])


def share_tied_head(model: ir.Model) -> int:
    return _RULES.apply_to_model(model)
