"""Names, operators and weights of a graph, and how often each pass applied: a lost fusion fails here."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from specstream.export import contract
from specstream.export.trace import DATA_FILE, GRAPH_FILE, OPSET

from .conftest import Export, Exported
from .tiny import HEAD_DIM, HIDDEN, KV_HEADS, LAYERS, VOCAB

PROFILES = ("ort", "portable")


@pytest.mark.parametrize("profile", PROFILES)
def test_contract(export: Export, profile: contract.Profile) -> None:
    session = export("Llama", profile).graph.session
    cache = ["tensor(float)", [1, KV_HEADS, "C", HEAD_DIM]]
    inputs = {
        contract.INPUT_IDS: ["tensor(int64)", [1, "T"]],
        contract.POSITION_IDS: ["tensor(int64)", [1, "T"]],
        contract.TREE_MASK: ["tensor(bool)", ["T", "T"]],
        contract.PAST_LENGTH: ["tensor(int32)", [1]],
        contract.LOGIT_ROWS: ["tensor(int64)", ["L"]],
        contract.STREAM_ROWS: ["tensor(int64)", ["S"]],
    }
    outputs = {
        contract.NEXT_IDS: ["tensor(int64)", ["L"]],
        contract.LOGITS: ["tensor(float)", ["L", VOCAB]],
        contract.STREAM_IDS: ["tensor(int64)", ["S", 3, 4]],
        contract.STREAM_LOGPROBS: ["tensor(float)", ["S", 3, 4]],
    }
    for layer in range(LAYERS):
        inputs |= {contract.past_key(layer): cache, contract.past_value(layer): cache}
        outputs |= {contract.present_key(layer): cache, contract.present_value(layer): cache}
    assert {value.name: [value.type, value.shape] for value in session.get_inputs()} == inputs
    assert {value.name: [value.type, value.shape] for value in session.get_outputs()} == outputs


@pytest.mark.parametrize("architecture", ["Llama", "Gemma3"])
def test_portable_graph_is_standard_onnx(export: Export, architecture: str) -> None:
    exported = export(architecture, "portable")
    model = onnx.load(exported.folder / GRAPH_FILE)
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", OPSET)]
    assert not model.functions
    onnx.checker.check_model(model, full_check=True)


# What one tiny graph holds: two layers, the top one with streams and LoRA around its seven linear layers.
COUNTS = {
    ("Llama", "ort"): {"fuse_rms_norm": 6, "fuse_rotary": 4, "norms_first": 0, "flatten_rotary": 4, "fuse_skip_norm": 2},
    ("Llama", "portable"): {"fuse_rms_norm": 6, "fuse_rotary": 4},
    ("Qwen3", "ort"): {"fuse_rms_norm": 10, "fuse_rotary": 4, "norms_first": 0, "flatten_rotary": 4, "fuse_skip_norm": 2},
    ("Gemma3", "ort"): {"fuse_rms_norm": 14, "fuse_rotary": 4, "norms_first": 4, "flatten_rotary": 4, "fuse_skip_norm": 4},
    ("Gemma3", "portable"): {"fuse_rms_norm": 14, "fuse_rotary": 4},
}


@pytest.mark.parametrize(("architecture", "profile"), COUNTS)
def test_every_fusion_is_found(export: Export, architecture: str, profile: contract.Profile) -> None:
    info = export(architecture, profile).info
    expected = COUNTS[architecture, profile]
    assert {name: info.passes[name] for name in expected} == expected
    operators = info.operators
    for leftover in ("Pow", "ReduceMean", "Reciprocal", "Neg"):
        assert leftover not in operators, operators
    assert operators["RotaryEmbedding"] == 2 * LAYERS
    if profile == "ort":
        assert operators["com.microsoft::GroupQueryAttention"] == LAYERS
        assert operators["RMSNormalization"] + operators["com.microsoft::SkipSimplifiedLayerNormalization"] == expected["fuse_rms_norm"]
    else:
        assert operators["Attention"] == LAYERS
        assert operators["TensorScatter"] == 2 * LAYERS


def test_masks_are_built_once(export: Export) -> None:
    """One Where for each set of rows (main; main and streams) and window that occurs there."""
    assert export("Llama", "ort").info.operators["Where"] == 2
    assert export("Gemma3", "ort").info.operators["Where"] == 2  # full attention below, a window above


@pytest.mark.parametrize("profile", PROFILES)
def test_no_transposed_weights(export: Export, profile: contract.Profile) -> None:
    exported = export("Llama", profile)
    model = ir.load(exported.folder / GRAPH_FILE)
    assert not [node for node in model.graph if node.op_type == "Transpose" and node.inputs[0] and node.inputs[0].is_initializer()]
    by_name = {name: value.shape for name, value in model.graph.initializers.items()}
    assert by_name["model.layers.0.mlp.down_proj.weight"] == ir.Shape([48, HIDDEN])


@pytest.mark.parametrize("profile", PROFILES)
def test_tied_table_is_stored_once(export: Export, profile: contract.Profile) -> None:
    exported = export("Llama", profile)
    parameters = sum(p.numel() for p in exported.model.parameters() if p.numel())
    unused = sum(p.numel() for name, p in exported.model.named_parameters() if name.startswith("prune_"))
    assert 4 * (parameters - unused) <= exported.info.weight_bytes < 4 * (parameters - unused) + 2_000
    assert "lm_head.weight" not in ir.load(exported.folder / GRAPH_FILE).graph.initializers


def test_untied_head_is_kept(export: Export) -> None:
    exported = export("Qwen2", "ort")
    weights = ir.load(exported.folder / GRAPH_FILE).graph.initializers
    head = weights["lm_head.weight"].const_value
    assert head is not None
    stored = head.numpy() if head.shape[0] == VOCAB else head.numpy().T
    np.testing.assert_array_equal(stored, exported.model.base.lm_head.weight.numpy())


def test_large_tied_table_is_not_packed(export: Export, monkeypatch: pytest.MonkeyPatch) -> None:
    from specstream.export.passes import tied_head

    exported = export("Llama", "ort")
    model = ir.load(exported.folder / GRAPH_FILE)
    assert tied_head.share_tied_head(model) == 0
    monkeypatch.setattr(tied_head, "PACKED_LIMIT", 100)
    assert tied_head.share_tied_head(model) == 2  # main rows and streams
    ir.save(model, exported.folder / "large.onnx", external_data="large.data")
    inputs = {
        contract.INPUT_IDS: np.arange(6, dtype=np.int64)[None],
        contract.POSITION_IDS: np.arange(6, dtype=np.int64)[None],
        contract.TREE_MASK: np.tril(np.ones((6, 6), dtype=bool)),
        contract.PAST_LENGTH: np.zeros(1, dtype=np.int32),
        contract.LOGIT_ROWS: np.array([0, 5], dtype=np.int64),
        contract.STREAM_ROWS: np.array([2], dtype=np.int64),
    }
    other = Exported(exported.model, exported.folder, exported.info).graph.__class__(exported.folder / "large.onnx", 32)
    expected, found = exported.graph.run(inputs), other.run(inputs)
    for name in (contract.LOGITS, contract.STREAM_LOGPROBS):
        np.testing.assert_allclose(found[name], expected[name], atol=1e-4)


def test_files(export: Export) -> None:
    folder = export("Mistral", "ort").folder
    assert sorted(path.name for path in folder.iterdir()) == [GRAPH_FILE, DATA_FILE]
    text = (folder / GRAPH_FILE).read_bytes()
    assert b"site-packages" not in text
    assert b"stack_trace" not in text
