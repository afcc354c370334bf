"""Low-rank updates of linear layers, for all rows or for stream rows only. Knows nothing of streams' meaning or of files."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn


class RowGate:
    """Which rows of the current call a gated update touches.

    ``rows`` is None (no row: main rows alone), True (all rows: stream rows alone) or a float tensor [R, 1] of ones and zeros.
    """

    def __init__(self) -> None:
        self.rows: Tensor | bool | None = None


class LoraLinear(nn.Module):
    """``y = W x + b + (alpha / rank) B A x`` (LoRA, arXiv 2106.09685), the last term on gated rows only.

    Args:
        base: the frozen linear layer, kept as it is.
        rank: rank of the update.
        alpha: scale numerator.
        gate: rows that get the update; None for all rows of every call.
    """

    def __init__(self, base: nn.Linear, rank: int, alpha: float, gate: RowGate | None) -> None:
        super().__init__()
        self.base = base
        self.scale = alpha / rank
        self.gate = gate
        self.lora_A = nn.Parameter(torch.empty(rank, base.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        rows = True if self.gate is None else self.gate.rows
        if rows is None:
            return y  # type: ignore[no-any-return]
        low = nn.functional.linear(x, self.lora_A.to(x.dtype))
        if isinstance(rows, Tensor):
            low = low * rows.to(x.dtype)
        update = (self.lora_B * self.scale).to(x.dtype)
        if not torch.is_grad_enabled():
            return y + nn.functional.linear(low, update)  # type: ignore[no-any-return]
        flat = torch.addmm(y.flatten(0, -2), low.flatten(0, -2), update.t())  # one pass over y instead of two
        return flat.view(y.shape)

    @torch.no_grad()
    def merge(self) -> nn.Linear:
        """The base layer with the update added to its weight, computed in fp32."""
        update = self.scale * (self.lora_B.float() @ self.lora_A.float())
        self.base.weight.copy_((self.base.weight.float() + update).to(self.base.weight.dtype))
        return self.base


def linear_names(module: nn.Module) -> list[str]:
    """Names, inside ``module``, of its linear layers."""
    return [name for name, child in module.named_modules() if isinstance(child, nn.Linear)]


def wrap(root: nn.Module, names: Iterable[str], rank: int, alpha: float, gate: RowGate | None) -> dict[str, LoraLinear]:
    """Put a :class:`LoraLinear` around the linear layers of ``root`` with these names; returns them by name."""
    wrapped = {}
    for name in names:
        parent_name, _, leaf = name.rpartition(".")
        parent = root.get_submodule(parent_name)
        layer = getattr(parent, leaf)
        if not isinstance(layer, nn.Linear):
            raise TypeError(f"{name} is a {type(layer).__name__}, not a linear layer")
        wrapped[name] = LoraLinear(layer, rank, alpha, gate)
        setattr(parent, leaf, wrapped[name])
    return wrapped


def unwrap(root: nn.Module, merge: bool) -> int:
    """Take every :class:`LoraLinear` of ``root`` away, merging its update when asked; returns how many there were."""
    found = [(name, module) for name, module in root.named_modules() if isinstance(module, LoraLinear)]
    for name, module in found:
        parent_name, _, leaf = name.rpartition(".")
        setattr(root.get_submodule(parent_name), leaf, module.merge() if merge else module.base)
    return len(found)
