"""Passes that save nodes of small calls: the graph computes what it did."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
import transformers
from onnx import TensorProto, helper

from specstream.export.parity import check
from specstream.export.passes.block_argmax import block_argmax
from specstream.export.passes.log_sum_exp import split_log_sum_exp
from specstream.export.passes.pack_projections import pack_projections
from specstream.export.passes.packed_attention import fuse_packed_attention

from . import tiny
from .test_delayed import written

CONTEXT = 512


# Layers whose attention takes packed projections: of Qwen 3 none, since norms stand between (as in Gemma 3), nor of Phi 3, whose own packed
# projections are sliced; of SmolLM 3 one has no rotary. Qwen 2 has biases, Granite a scale of its own.
PACKED = {"Llama": 2, "Qwen2": 2, "Granite": 2, "SmolLM3": 1, "Qwen3": 0, "Phi3": 0}


@pytest.fixture(autouse=True)
def _wider_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime turns heads of a multiple of 16 entries only."""
    monkeypatch.setattr(tiny, "HIDDEN", 64)
    monkeypatch.setattr(tiny, "HEAD_DIM", 16)
    plain = tiny.tiny_base

    def with_biases(architecture: str) -> transformers.PreTrainedModel:
        base = plain(architecture)  # equal biases, such as zeros, are one weight, which is not packed
        for name, parameter in base.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.1)
        return base

    monkeypatch.setattr(tiny, "tiny_base", with_biases)


@pytest.mark.parametrize("architecture", PACKED)
def test_attention_that_takes_packed_projections_says_the_same(architecture: str, tmp_path: Path) -> None:
    graph, streams, reference = written(architecture, "ort", tmp_path)
    counts = []
    for path in (graph, streams):
        model = ir.load(path)
        pack_projections(model)
        counts.append(fuse_packed_attention(model, CONTEXT, 1 << 20))
        kinds = [node.op_type for node in model.graph]
        assert ("RotaryEmbedding" in kinds) == ("Cos" in kinds) == (PACKED[architecture] == 0)
        ir.save(model, path)
    assert counts[0] == PACKED[architecture]
    assert counts[1] <= 1  # the streams run in one layer
    result = check(graph, reference, streams)
    assert result["ok"], result


def test_heads_of_other_sizes_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "HIDDEN", 32)
    monkeypatch.setattr(tiny, "HEAD_DIM", 8)
    model = ir.load(written("Llama", "ort", tmp_path)[0])
    pack_projections(model)
    assert fuse_packed_attention(model, CONTEXT, 1 << 20) == 0


def test_tables_that_are_too_large_are_not_made(tmp_path: Path) -> None:
    graph, _, _ = written("Llama", "ort", tmp_path)
    model = ir.load(graph)
    pack_projections(model)
    before = [node.op_type for node in model.graph]
    assert fuse_packed_attention(model, CONTEXT, 1000) == 0
    assert [node.op_type for node in model.graph] == before


def argmax_model(width: int | str) -> ir.Model:
    node = helper.make_node("ArgMax", ["logits"], ["best"], axis=-1, keepdims=0)
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["L", width])
    best = helper.make_tensor_value_info("best", TensorProto.INT64, ["L"])
    model = helper.make_model(helper.make_graph([node], "g", [logits], [best]), opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    return ir.from_proto(model)


def test_the_best_logit_is_found_in_blocks() -> None:
    model = argmax_model(8192)
    assert block_argmax(model) == 1
    assert "ReduceMax" in {node.op_type for node in model.graph}
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(0)
    # Small whole numbers: many logits are the largest, and the first of them counts.
    for logits in (rng.standard_normal((7, 8192)), rng.integers(0, 4, (7, 8192)), np.zeros((1, 8192))):
        (best,) = session.run(None, {"logits": logits.astype(np.float32)})
        assert best.tolist() == logits.argmax(axis=1).tolist()


@pytest.mark.parametrize("width", [4096 + 1, 64, "V"])
def test_widths_without_blocks_are_left_alone(width: int | str) -> None:
    assert block_argmax(argmax_model(width)) == 0


def test_log_sum_exp_of_large_and_small_numbers() -> None:
    node = helper.make_node("ReduceLogSumExp", ["x", "axes"], ["y"], keepdims=1)
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["L", width]) for name, width in (("x", 512), ("y", 1))]
    axes = helper.make_tensor("axes", TensorProto.INT64, [1], [-1])
    graph = helper.make_graph([node], "g", values[:1], values[1:], initializer=[axes])
    model = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10))
    assert split_log_sum_exp(model) == 1
    assert "ReduceLogSumExp" not in {node.op_type for node in model.graph}
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    x = np.random.default_rng(0).standard_normal((5, 512)).astype(np.float32) * np.array([[1], [30], [0], [1e4], [1e-4]], dtype=np.float32)
    (found,) = session.run(None, {"x": x})
    np.testing.assert_allclose(found, torch.logsumexp(torch.from_numpy(x), dim=1, keepdim=True).numpy(), rtol=1e-6, atol=1e-5)
