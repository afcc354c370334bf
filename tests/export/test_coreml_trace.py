"""Packages on disk: functions, fused attention, weights stored once, the same bytes each time, what they say about themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from specstream.export import coreml_module
from specstream.export.coreml_contract import VALUE_CACHE
from specstream.export.coreml_package import CONTRACT_KEY, MANIFEST, MODEL, WEIGHTS, PackageMetadata, canonicalise
from specstream.export.coreml_trace import export_package, plan_contract
from specstream.runtimes.mil_evaluator import MilModel

from ..coreml_tiny import CAPACITY, METADATA, TinyPackage, streams_model, tiny_package
from .tiny import HEAD_DIM, HIDDEN, KV_HEADS, LAYERS, VOCAB


@pytest.fixture(scope="module")
def package() -> TinyPackage:
    return tiny_package("Llama", "delayed")


def spec_of(package: Path) -> object:
    from coremltools.proto import Model_pb2

    spec = Model_pb2.Model()
    spec.ParseFromString((package / MODEL).read_bytes())
    return spec


def test_functions_share_states(package: TinyPackage) -> None:
    names = ["decode_1", "tree_8", "prefill_64", "draft"]
    assert MilModel.functions(package.path) == names
    models = [MilModel(package.path, name) for name in names]
    shape = (LAYERS, KV_HEADS, package.sizes.slots, HEAD_DIM)
    for model in models:
        assert {name: (kind.dtype, kind.shape) for name, kind in model.states.items()} == {
            "keyCache": ("fp16", shape),
            VALUE_CACHE: ("fp16", shape),
        }
    assert MilModel(package.path).function == "decode_1"


def test_inputs_and_outputs_are_those_of_the_contract(package: TinyPackage) -> None:
    tree, prompt, draft = (MilModel(package.path, name) for name in ("tree_8", "prefill_64", "draft"))

    def types(values: object) -> dict[str, str]:
        return {name: f"{kind.dtype}{list(kind.shape)}" for name, kind in values.items()}  # type: ignore[attr-defined]

    cache = {"past_length": "int32[1]", "commit_start": "int32[1]", "commit_rows": "int32[8]"}
    assert types(tree.inputs) == {"input_ids": "int32[1, 8]", "position_ids": "int32[1, 8]", "tree_mask": "fp16[8, 8]", **cache}
    assert types(tree.outputs) == {
        "next_ids": "int32[8]",
        "logits": f"fp16[8, {VOCAB}]",
        "entry_states": f"fp16[8, {HIDDEN}]",
    }
    assert types(prompt.inputs)["logit_rows"] == "int32[1]"
    assert types(prompt.outputs)["entry_states"] == f"fp16[1, {HIDDEN}]"
    assert types(draft.inputs) == {"entry_state": f"fp16[1, {HIDDEN}]", "root_id": "int32[1]", **cache}
    assert types(draft.outputs) == {
        "stream_ids": "int32[1, 3, 4]",
        "stream_logprobs": "fp16[1, 3, 4]",
        "stream_pairs": "fp16[1, 3, 4, 4]",
    }


def test_attention_is_fused_in_every_layer(package: TinyPackage) -> None:
    counts = {name: operators.get("scaled_dot_product_attention", 0) for name, operators in package.info.operators.items()}
    assert counts == {"decode_1": LAYERS, "tree_8": LAYERS, "prefill_64": LAYERS, "draft": 1}
    assert all("softmax" not in operators for operators in package.info.operators.values())


def test_a_lost_fusion_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def by_hand(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor) -> Tensor:
        return torch.softmax(query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5 + attn_mask, dim=-1) @ value

    monkeypatch.setattr(coreml_module.nn.functional, "scaled_dot_product_attention", by_hand)
    model = streams_model("Llama", "none")
    with pytest.raises(RuntimeError, match="decode_1: 0 fused attentions of 2"):
        export_package(model, tmp_path / "model.mlpackage", plan_contract(model, CAPACITY, (8,)), METADATA)
    assert not list(tmp_path.iterdir())


def test_weights_are_stored_once(package: TinyPackage) -> None:
    """Of all functions, the tied head and the streams' layers: nothing twice, and no merged copy of the top layers."""
    parameters = sum(p.numel() for p in package.model.parameters())  # side matrices of the streams' LoRA included
    tables = 2 * package.sizes.slots * HEAD_DIM  # rotary
    assert package.model.config is not None
    tables += VOCAB * package.model.config.correction_rank + 2 * VOCAB * package.model.config.pair_rank
    # Each weight begins at a multiple of 64, behind a header. Zeros in the place of biases are the slack: an embedding stored
    # twice, or merged top layers, would be more.
    least = 2 * (parameters + tables)
    assert least * 0.9 < package.info.weight_bytes < least + VOCAB * HIDDEN + 64 * 60


@pytest.mark.parametrize("seed", ["1"])
def test_the_same_bytes_each_time(package: TinyPackage, tmp_path: Path, seed: str) -> None:
    """Another process, in another folder, with other hashes of strings."""
    program = (
        "import sys; from pathlib import Path; from tests.coreml_tiny import write_package; "
        "write_package('Llama', 'delayed', Path(sys.argv[1]))"
    )
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(root)}
    again = tmp_path / "elsewhere" / "other.mlpackage"
    again.parent.mkdir()
    subprocess.run([sys.executable, "-c", program, str(again)], check=True, env=environment, cwd=tmp_path, capture_output=True)
    files = sorted(path.relative_to(package.path) for path in package.path.rglob("*") if path.is_file())
    assert (
        files
        == sorted(path.relative_to(again) for path in again.rglob("*") if path.is_file())
        == sorted(map(Path, (MANIFEST, MODEL, WEIGHTS)))
    )
    for file in files:
        assert (package.path / file).read_bytes() == (again / file).read_bytes(), file


def test_canonical_form_is_stable(package: TinyPackage) -> None:
    before = {path: path.read_bytes() for path in package.path.rglob("*") if path.is_file()}
    canonicalise(package.path)
    assert {path: path.read_bytes() for path in package.path.rglob("*") if path.is_file()} == before


def test_identifiers_follow_content(package: TinyPackage, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "copy.mlpackage"
    shutil.copytree(package.path, copy)
    data = bytearray((copy / WEIGHTS).read_bytes())
    data[-1] ^= 1
    (copy / WEIGHTS).write_bytes(data)
    canonicalise(copy)
    one, other = (json.loads((path / MANIFEST).read_text()) for path in (package.path, copy))
    assert one["rootModelIdentifier"] == other["rootModelIdentifier"]  # the program is the same
    assert len(set(one["itemInfoEntries"]) & set(other["itemInfoEntries"])) == 1
    assert {entry["path"] for entry in other["itemInfoEntries"].values()} == {"com.apple.CoreML/weights", "com.apple.CoreML/model.mlmodel"}


def test_what_a_package_says_of_itself(package: TinyPackage) -> None:
    metadata = spec_of(package.path).description.metadata  # type: ignore[attr-defined]
    assert (metadata.shortDescription, metadata.author, metadata.license, metadata.versionString) == ("a tiny model", "tests", "none", "1")
    assert set(metadata.userDefined) == {"key", CONTRACT_KEY}
    assert json.loads(metadata.userDefined[CONTRACT_KEY]) == json.loads(json.dumps(asdict(package.sizes)))


def test_a_random_date_does_not_stay(package: TinyPackage, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "copy.mlpackage"
    shutil.copytree(package.path, copy)
    spec = spec_of(copy)
    spec.description.metadata.userDefined["com.github.apple.coremltools.conversion_date"] = "2025-01-01"  # type: ignore[attr-defined]
    (copy / MODEL).write_bytes(spec.SerializeToString())  # type: ignore[attr-defined]
    canonicalise(copy)
    assert (copy / MODEL).read_bytes() == (package.path / MODEL).read_bytes()
    canonicalise(copy, PackageMetadata("other", "", "", "", {}))
    assert dict(spec_of(copy).description.metadata.userDefined) == {}  # type: ignore[attr-defined]


def test_the_model_is_as_before(package: TinyPackage) -> None:
    assert not any(isinstance(module, coreml_module.SafeRmsNorm) for module in package.model.modules())
    assert isinstance(package.model.decoder.norm, nn.Module)
