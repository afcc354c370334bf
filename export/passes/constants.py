"""Reading constants off a graph's values. What passes share."""

from __future__ import annotations

import onnx_ir as ir


def scalar(value: ir.Value | None) -> float | None:
    """The one number that a constant holds; None for anything else."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    if tensor is None or tensor.size != 1:
        return None
    return float(tensor.numpy().item())


def integers(value: ir.Value | None) -> list[int] | None:
    """The entries of a constant vector of integers (such as a target shape); None for anything else."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    if tensor is None or len(tensor.shape) > 1 or tensor.dtype not in (ir.DataType.INT64, ir.DataType.INT32):
        return None
    return [int(entry) for entry in tensor.numpy().reshape(-1)]
