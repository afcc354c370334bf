"""Last touches: nodes in order, no metadata of the tracing machine, only operator sets that are used."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common


def finish(model: ir.Model) -> int:
    """Returns how many weights the file holds."""
    for apply in (
        common.RemoveUnusedNodesPass(),
        common.RemoveUnusedOpsetsPass(),
        common.TopologicalSortPass(),
        common.ClearMetadataAndDocStringPass(),
        common.NameFixPass(),
    ):
        apply(model)
    model.producer_name = "specstream"
    return len(model.graph.initializers)
