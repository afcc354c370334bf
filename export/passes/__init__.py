"""Graph passes: what makes a traced graph small and cheap to call.

A pass is a plain function on an onnx-ir model, in a file of its own, and returns how often it applied. Their order is the
literal lists below.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from specstream.export.contract import Profile
from specstream.export.passes.block_argmax import block_argmax
from specstream.export.passes.finish import finish
from specstream.export.passes.flat_rotary import flatten_rotary
from specstream.export.passes.fold_weights import fold_weights
from specstream.export.passes.log_sum_exp import split_log_sum_exp
from specstream.export.passes.norm_first import norms_first
from specstream.export.passes.reshapes import drop_reshapes
from specstream.export.passes.rms_norm import fuse_rms_norm
from specstream.export.passes.rotary import fuse_rotary
from specstream.export.passes.simplify import simplify
from specstream.export.passes.skip_norm import fuse_skip_norm
from specstream.export.passes.tied_head import share_tied_head

Pass = Callable[[ir.Model], int]

_FIRST: list[Pass] = [
    fold_weights,  # first, so that constant folding meets small tensors only and never copies a weight
    simplify,  # puts every pattern below into one form: constants are initializers, equal subexpressions one value
    share_tied_head,  # as simplify leaves it
    fuse_rms_norm,
    fuse_rotary,
]
_LAST: list[Pass] = [
    simplify,  # joins equal slices that the fusions made; finds shapes of new values, which the next pass needs
    drop_reshapes,
    finish,
]

PORTABLE: list[Pass] = [*_FIRST, *_LAST]

ORT: list[Pass] = [
    *_FIRST,
    norms_first,  # makes way for the next pass
    flatten_rotary,  # needs rotary nodes; GroupQueryAttention takes flat rows, Attention does not
    fuse_skip_norm,  # needs fused norms; a contrib operator
    block_argmax,
    split_log_sum_exp,
    *_LAST,
]


def run_passes(model: ir.Model, profile: Profile) -> dict[str, int]:
    """Apply the profile's passes in order; returns how often each applied (a pass that runs twice: the sum)."""
    counts: dict[str, int] = {}
    for apply in ORT if profile == "ort" else PORTABLE:
        counts[apply.__name__] = counts.get(apply.__name__, 0) + apply(model)
    return counts
