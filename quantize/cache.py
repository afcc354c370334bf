"""Keys and values of the cache as 8-bit integers: a quarter of the memory, and attention that reads a quarter of the bytes.

Each channel of each head has one fixed scale: ``GroupQueryAttention`` rounds what it writes, ``x ≈ scale · q`` with q in [-128, 127].
A row's keys and values do not depend on which rows are beside it, so rows stay independent. Keys are rounded with their rotation, as
the cache holds them: a few of their channels are much larger than the others (KIVI, Liu et al. 2024).

Knows graph contract v1; nothing of texts or bundles.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import onnx_ir as ir

from specstream.export import contract
from specstream.quantize.formats import FloatArray
from specstream.quantize.products import constant

LARGEST: Final = 127  # of the integers: what the prompts' largest value becomes
_PAST, _PRESENT, _SCALES = (3, 4), (1, 2), (12, 13)  # places of key and value among the operator's inputs and outputs


def round_cache(model: ir.Model, largest: FloatArray) -> int:
    """Give the attention of a graph an 8-bit cache.

    Args:
        model: graph of contract v1, profile ``ort``, with a float32 cache; changed in place.
        largest: float32 [layers, 2, kv_heads, head_dim]: largest magnitude of each channel of keys and values, as
            :func:`specstream.quantize.calibrate.collect_cache` finds them. What is larger later on is cut off there.

    Returns:
        How many nodes there were. A graph of the top layers alone takes their part of ``largest``.
    """
    layers = {contract.past_key(layer): layer for layer in range(len(largest))}
    # A channel that was always zero keeps a scale that can be divided by.
    scales = np.maximum(largest, np.finfo(np.float32).tiny * LARGEST) / np.float32(LARGEST)
    count = 0
    for node in model.graph:
        if node.op_type != "GroupQueryAttention":
            continue
        past = node.inputs[_PAST[0]]
        layer = layers[(past.name if past is not None else None) or ""]
        node.resize_inputs(_SCALES[1] + 1)
        for which, kind in enumerate(("key", "value")):
            scale = constant(model.graph, f"cache.{layer}.{kind}.scale", scales[layer, which][None, :, None, :])
            node.replace_input_with(_SCALES[which], scale)
            for value in (node.inputs[_PAST[which]], node.outputs[_PRESENT[which]]):
                assert value is not None
                value.dtype = ir.DataType.INT8
        for name in ("k_quant_type", "v_quant_type"):
            node.attributes[name] = ir.AttrString(name, "PER_CHANNEL")
        node.attributes["kv_cache_bit_width"] = ir.AttrInt64("kv_cache_bit_width", 8)
        count += 1
    return count
