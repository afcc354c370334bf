"""`.ort` files: what the graph computes, the same bytes each time, and the operators that a reduced build needs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from specstream.export import ort_format
from specstream.export.contract import Profile
from specstream.export.ort_format import (
    INLINE_BYTES,
    canonicalise,
    config_text,
    convert,
    onnx_operators,
    operators,
    share_weights,
    stored_weights,
)
from specstream.export.parity import check, write_reference
from specstream.export.trace import GRAPH_FILE, STREAMS_FILE, export_graph, export_streams
from specstream.models.errors import UserError

from .tiny import tiny_model

PROMPT = [5, 9, 11, 3, 60, 7, 8, 30, 2, 44, 19]
GRAPHS = (GRAPH_FILE, STREAMS_FILE)


@pytest.fixture(scope="module", params=["ort", "portable"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both graphs of a model with delayed streams, PyTorch's outputs, and both in ``.ort`` form."""
    profile: Profile = request.param
    made = tmp_path_factory.mktemp(profile)
    model = tiny_model("Qwen3", delayed=True)
    write_reference(model, PROMPT, made / "reference.npz")
    export_graph(model, made, profile)
    export_streams(model, made, profile)
    for name in GRAPHS:
        convert(made / name, made / ort_name(name))
    return made


def ort_name(graph: str) -> str:
    return f"{Path(graph).stem}.ort"


def test_it_computes_what_the_network_computes(folder: Path) -> None:
    result = check(folder / "model.ort", folder / "reference.npz", folder / "streams.ort")
    assert result["ok"], result


def test_another_process_writes_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    for seed, name in enumerate(GRAPHS, 1):
        out = tmp_path / ort_name(name)
        command = [sys.executable, "-P", "-m", "specstream.export.ort_format", str(folder / name), str(out)]
        subprocess.run(command, check=True, env=os.environ | {"PYTHONHASHSEED": str(seed)})
        assert out.read_bytes() == (folder / ort_name(name)).read_bytes()


def test_a_head_in_any_order_becomes_the_same(folder: Path, tmp_path: Path) -> None:
    """What ONNX Runtime writes differs in its first bytes alone, from process to process; the canonical head stays as it is."""
    wanted = (folder / "model.ort").read_bytes()
    again = tmp_path / "again.ort"
    again.write_bytes(wanted)
    canonicalise(again)
    assert again.read_bytes() == wanted
    raw = tmp_path / "raw.ort"
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(raw)
    options.add_session_config_entry("session.save_model_format", "ORT")
    options.add_session_config_entry("session.qdqisint8allowed", "1")
    ort.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"], disabled_optimizers=["NchwcTransformer"])
    assert raw.read_bytes() != wanted
    canonicalise(raw)
    assert raw.read_bytes() == wanted
    assert not list(tmp_path.glob(".*"))


def official_config(files: list[Path], out: Path) -> dict[tuple[str, int], set[str]]:
    """What ONNX Runtime's own tool says that these files need (it leaves files open, which is an error here)."""
    program = "import sys; from pathlib import Path; from onnxruntime.tools.ort_format_model import create_config_from_models as create\n"
    program += "create([Path(name) for name in sys.argv[2:]], Path(sys.argv[1]), False)"
    subprocess.run([sys.executable, "-c", program, str(out), *map(str, files)], check=True, capture_output=True)
    return parsed(out.read_text())


def parsed(config: str) -> dict[tuple[str, int], set[str]]:
    found = {}
    for line in config.splitlines():
        if not line.startswith("#"):
            domain, version, names = line.split(";")
            found[domain, int(version)] = set(names.split(","))
    return found


def test_the_list_of_operators_is_that_of_the_official_tool(folder: Path, tmp_path: Path) -> None:
    files = [folder / ort_name(name) for name in GRAPHS]
    assert operators(files) == official_config(files, tmp_path / "official.config")
    assert parsed(config_text([operators(files)], ["a", "b"])) == operators(files)


def test_the_list_covers_every_node_of_the_graphs(folder: Path) -> None:
    needed = [operators([folder / ort_name(name) for name in GRAPHS]), *(onnx_operators(folder / name) for name in GRAPHS)]
    listed = {name for names in parsed(config_text(needed, GRAPHS)).values() for name in names}
    for graph in GRAPHS:
        model = onnx.load(folder / graph, load_external_data=False)
        assert {node.op_type for node in model.graph.node} <= listed
        assert len(model.graph.node) > 20
    # One that is left out is seen to be missing.
    assert not {"Gather"} <= {name for names in parsed(config_text(needed, GRAPHS).replace("Gather,", "")).values() for name in names}


def test_operators_of_subgraphs_are_listed(tmp_path: Path) -> None:
    def branch(kind: str) -> onnx.GraphProto:
        node = helper.make_node(kind, ["x"], ["y"])
        return helper.make_graph([node], kind, [], [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])])

    choose = helper.make_node("If", ["c"], ["y"], then_branch=branch("Cos"), else_branch=branch("Tanh"))
    inputs = [helper.make_tensor_value_info("c", TensorProto.BOOL, []), helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])]
    graph = helper.make_graph([choose], "g", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), tmp_path / "g.onnx")
    convert(tmp_path / "g.onnx", tmp_path / "g.ort")
    for found in (operators([tmp_path / "g.ort"]), onnx_operators(tmp_path / "g.onnx")):
        assert set.union(*found.values()) == {"If", "Cos", "Tanh"}
    assert onnx_operators(tmp_path / "g.onnx") == operators([tmp_path / "g.ort"])


def test_onnx_graphs_take_their_weights_from_the_ort_files(folder: Path, tmp_path: Path) -> None:
    files = []
    for name in GRAPHS:
        files.append(tmp_path / ort_name(name))
        files[-1].write_bytes((folder / ort_name(name)).read_bytes())
    for name in GRAPHS:
        shared = share_weights(folder / name, tmp_path / name, files)
        assert shared > 0.9 * (folder / f"{name}.data").stat().st_size
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.onnx", "model.ort", "streams.onnx", "streams.ort"]
    result = check(tmp_path / GRAPH_FILE, folder / "reference.npz", tmp_path / STREAMS_FILE)
    assert result["ok"], result
    # They are the bytes in those files: another byte there is another weight here.
    offset, _ = max(stored_weights(files[0]), key=lambda place: len(place[1]))
    with open(files[0], "r+b") as stream:
        stream.seek(offset)
        stream.write(np.full(64, 3.0, dtype=np.float32).tobytes())
    assert not check(tmp_path / GRAPH_FILE, folder / "reference.npz", tmp_path / STREAMS_FILE)["ok"]


def test_weights_that_no_ort_file_has_get_a_file_of_their_own(folder: Path, tmp_path: Path) -> None:
    assert share_weights(folder / GRAPH_FILE, tmp_path / GRAPH_FILE, []) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]
    result = check(tmp_path / GRAPH_FILE, folder / "reference.npz", folder / STREAMS_FILE)
    assert result["ok"], result


def test_links_to_weights_are_as_good_as_the_files(folder: Path, tmp_path: Path) -> None:
    """ONNX Runtime refuses weights behind a link out of the folder, and onnx_ir those with a second name."""
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / GRAPH_FILE).write_bytes((folder / GRAPH_FILE).read_bytes())
    (linked / f"{GRAPH_FILE}.data").symlink_to(folder / f"{GRAPH_FILE}.data")
    with pytest.raises(UserError, match=r"model\.onnx: ONNX Runtime .* cannot convert it"):
        convert(linked / GRAPH_FILE, tmp_path / "out.ort")
    convert(linked / GRAPH_FILE, tmp_path / "out.ort", [linked / f"{GRAPH_FILE}.data"])
    assert (tmp_path / "out.ort").read_bytes() == (folder / "model.ort").read_bytes()
    assert share_weights(linked / GRAPH_FILE, tmp_path / GRAPH_FILE, [tmp_path / "out.ort"]) > INLINE_BYTES


def test_what_cannot_be_converted_is_said(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.onnx").write_bytes(b"not a graph")
    with pytest.raises(UserError, match=r"broken\.onnx: ONNX Runtime .* cannot convert it"):
        convert(tmp_path / "broken.onnx", tmp_path / "broken.ort")
    (tmp_path / "broken.ort").write_bytes(b"\0" * 64)
    with pytest.raises(ValueError, match=r"not an \.ort file"):
        operators([tmp_path / "broken.ort"])
    monkeypatch.setattr(ort_format, "LARGEST_FILE", 1000)
    with pytest.raises(UserError, match=r"in \.ort form, which holds 2\.14 GB at most; quantize"):
        convert(folder / GRAPH_FILE, tmp_path / "large.ort")
