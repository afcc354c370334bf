"""The check itself: it passes a right graph, in a process without PyTorch, and fails a wrong one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from specstream.export import contract
from specstream.export.parity import LIMIT, check, compare, main, read_reference, write_reference
from specstream.export.trace import GRAPH_FILE

from .conftest import Export


def test_right_graph_in_a_process_of_its_own(export: Export, tmp_path: Path) -> None:
    exported = export("Llama", "ort")
    write_reference(exported.model, list(range(3, 20)), tmp_path / "reference.npz")
    code = (
        "import sys; from specstream.export.parity import main; code = main(sys.argv[1:]); sys.exit(code or 7 * ('torch' in sys.modules))"
    )
    command = [sys.executable, "-c", code, str(exported.folder / GRAPH_FILE), str(tmp_path / "reference.npz")]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    result = json.loads(child.stdout)
    assert result["ok"]
    assert result["top1_agreement"] == 1.0
    assert 0.0 < result["max_abs_diff"] <= LIMIT
    assert list(result["cases"]) == ["prompt", "token", "tree", "tree_all_streams", "tree_no_streams"]
    assert result["cases"]["token"]["stream_max_abs_diff"] is None
    assert result["cases"]["tree_all_streams"]["stream_top1_agreement"] == 1.0


def test_wrong_weight_fails(export: Export, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exported = export("Llama", "ort")
    write_reference(exported.model, list(range(3, 20)), tmp_path / "reference.npz")
    model = ir.load(exported.folder / GRAPH_FILE)
    scale = model.graph.initializers["model.layers.1.mlp.up_proj.weight"]
    assert scale.const_value is not None
    scale.const_value = ir.tensor(scale.const_value.numpy() * 1.01)
    ir.save(model, tmp_path / GRAPH_FILE, external_data="wrong.data")
    assert main([str(tmp_path / GRAPH_FILE), str(tmp_path / "reference.npz")]) == 1
    result = json.loads(capsys.readouterr().out)
    assert not result["ok"]
    assert result["max_abs_diff"] > LIMIT


def test_reference_survives_its_file(export: Export, tmp_path: Path) -> None:
    exported = export("Llama", "ort", streams=False)
    write_reference(exported.model, [5, 6, 7], tmp_path / "reference.npz")
    calls, outputs = read_reference(tmp_path / "reference.npz")
    assert [int(call.inputs[contract.PAST_LENGTH][0]) for call in calls] == [0, 3, 4, 7, 9]
    assert calls[2].commit == [0, 4, 6]
    assert all(set(found) == {contract.NEXT_IDS, contract.LOGITS} for found in outputs)
    assert check(exported.folder / GRAPH_FILE, tmp_path / "reference.npz")["ok"]


def logits(*rows: list[float]) -> dict[str, np.ndarray]:
    values = np.array(rows, dtype=np.float32)
    return {contract.NEXT_IDS: values.argmax(axis=1), contract.LOGITS: values}


def test_near_tie_is_reported_and_passes() -> None:
    result = compare(logits([1.0, 1.0002, 0.0]), logits([1.0003, 1.0, 0.0]))
    assert result["ok"]
    assert (result["agreeing"], result["near_ties"]) == (0, 1)


def test_other_argmax_fails() -> None:
    assert not compare(logits([1.0, 1.01, 0.0]), logits([1.01, 1.0, 0.0]))["ok"]


def test_no_number_fails() -> None:
    result = compare(logits([1.0, 2.0]), logits([float("nan"), 2.0]) | {contract.NEXT_IDS: np.array([1])})
    assert not result["ok"]
    assert result["max_abs_diff"] == float("inf")


def test_other_streams_fail() -> None:
    main_rows = logits([0.0, 1.0])
    streams = {contract.STREAM_IDS: np.array([[[3, 4]]]), contract.STREAM_LOGPROBS: np.array([[[-0.1, -2.0]]], dtype=np.float32)}
    swapped = {**streams, contract.STREAM_IDS: np.array([[[4, 3]]])}
    assert compare(main_rows | streams, main_rows | streams)["ok"]
    assert not compare(main_rows | streams, main_rows | swapped)["ok"]
