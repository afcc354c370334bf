"""The check of a saved package: it passes for what the exporter writes, and fails for each kind of fault."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specstream.export import contract
from specstream.export.coreml_contract import COMMIT_ROWS, COMMIT_START, FUSED_STREAM_ROWS
from specstream.export.coreml_package import WEIGHTS
from specstream.export.parity import write_reference
from specstream.models.errors import UserError
from specstream.runtimes.coreml_session import CoreMLSession
from specstream.runtimes.mil_evaluator import MilModel
from specstream.toolchain.coreml_parity import check, read_sizes

from ..coreml_tiny import TinyPackage, tiny_package
from ..export.tiny import HIDDEN, VOCAB

PROMPT = [5, 9, 11, 3, 60, 7, 8, 30, 2, 44, 19]


def checked(package: TinyPackage, folder: Path, path: Path | None = None) -> dict[str, Any]:
    write_reference(package.model, PROMPT, folder / "reference.npz", FUSED_STREAM_ROWS)
    return check(path or package.path, package.sizes, folder / "reference.npz")


# Llama: LoRA beside a tied head; Gemma 3: windows, norms on queries and keys, scale; the others are in `slow` below.
@pytest.mark.parametrize(("architecture", "streams"), [("Llama", "delayed"), ("Llama", "fused"), ("Gemma3", "delayed"), ("Qwen2", "none")])
def test_packages_compute_what_the_network_computes(architecture: str, streams: str, tmp_path: Path) -> None:
    result = checked(tiny_package(architecture, streams), tmp_path)
    assert result["ok"], result
    assert 0 < result["max_abs_diff"] < 0.1  # 16 bits are noticed
    assert result["near_tie"] >= 2 * result["max_abs_diff"]
    with_streams = [case["stream_max_abs_diff"] for case in result["cases"].values() if case["stream_max_abs_diff"] is not None]
    assert len(with_streams) == {"delayed": 4, "fused": 3, "none": 0}[streams]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["Qwen3", "Mistral", "Phi3", "SmolLM3", "Olmo2", "Granite", "Gemma2"])
def test_other_architectures(architecture: str, tmp_path: Path) -> None:
    result = checked(tiny_package(architecture, "delayed"), tmp_path)
    assert result["ok"], result


@pytest.fixture
def package() -> TinyPackage:
    return tiny_package("Llama", "delayed")


def test_one_changed_weight_is_caught(package: TinyPackage, tmp_path: Path) -> None:
    """One entry of a projection in the first layer, found in the file by its neighbours; the file's structure stays whole."""
    copy = tmp_path / "copy.mlpackage"
    shutil.copytree(package.path, copy)
    weight = package.model.decoder.layers[0].mlp.down_proj.weight.detach().numpy().astype(np.float16)
    data = (copy / WEIGHTS).read_bytes()
    place = data.find(weight.tobytes())
    assert place > 0
    changed = bytearray(data)
    largest = int(np.abs(weight).argmax())
    changed[place + 2 * largest : place + 2 * largest + 2] = (weight.flat[largest] * np.float16(-4)).tobytes()
    (copy / WEIGHTS).write_bytes(changed)
    result = checked(package, tmp_path, copy)
    assert not result["ok"]
    assert not any(case["ok"] for case in result["cases"].values())


def test_a_wrong_mask_is_caught(package: TinyPackage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    predict = MilModel.predict

    def all_seen(self: MilModel, inputs: Any, state: Any = None) -> Any:
        if contract.TREE_MASK in inputs:
            rows = inputs[contract.TREE_MASK].shape[0]
            inputs = inputs | {contract.TREE_MASK: np.tri(rows, dtype=np.float16)}
        return predict(self, inputs, state)

    monkeypatch.setattr(MilModel, "predict", all_seen)
    result = checked(package, tmp_path)
    assert {name: case["ok"] for name, case in result["cases"].items()} == {
        "prompt": True,  # a triangle is its mask
        "token": True,
        "tree": False,
        "tree_all_streams": False,
        "tree_no_streams": False,
    }


def test_a_skipped_commit_is_caught(package: TinyPackage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    predict = MilModel.predict

    def nothing_moves(self: MilModel, inputs: Any, state: Any = None) -> Any:
        rows = inputs[COMMIT_START][0] + np.arange(len(inputs[COMMIT_ROWS]), dtype=np.int32)
        return predict(self, inputs | {COMMIT_ROWS: rows}, state)

    monkeypatch.setattr(MilModel, "predict", nothing_moves)
    result = checked(package, tmp_path)
    assert result["cases"]["prompt"]["ok"]
    assert result["cases"]["token"]["ok"]
    assert not result["cases"]["tree_all_streams"]["ok"]  # the first call behind a commit that moves rows


def test_a_wrong_entry_state_is_caught(package: TinyPackage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits are right then; only the streams tell."""
    draft = CoreMLSession.draft

    def from_zeros(self: CoreMLSession, token: int) -> Any:
        self._entry = np.zeros((self.sizes.slots, HIDDEN), dtype=np.float16)
        return draft(self, token)

    monkeypatch.setattr(CoreMLSession, "draft", from_zeros)
    result = checked(package, tmp_path)
    assert result["top1_agreement"] == 1.0
    assert not result["ok"]


def test_the_process_says_what_it_found(package: TinyPackage, tmp_path: Path) -> None:
    write_reference(package.model, PROMPT, tmp_path / "reference.npz")
    (tmp_path / "sizes.json").write_text(json.dumps(asdict(package.sizes)))
    command = [sys.executable, "-m", "specstream.toolchain.coreml_parity", str(package.path), "sizes.json", "reference.npz"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert json.loads(done.stdout)["ok"]


def test_sizes_of_another_kind(package: TinyPackage, tmp_path: Path) -> None:
    file = tmp_path / "sizes.json"
    file.write_text(json.dumps(asdict(package.sizes)))
    assert read_sizes(file) == package.sizes
    file.write_text(json.dumps(asdict(package.sizes) | {"slots": "many"}))
    with pytest.raises(UserError, match=r"sizes\.json: slots is 'many' \(int was expected\)"):
        read_sizes(file)
    assert package.sizes.vocab_size == VOCAB
