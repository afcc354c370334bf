"""A bundle of two graphs: both quantized, on samples of both, sharing one file of weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from specstream.export import contract
from specstream.export.parity import Graph, make_calls
from specstream.export.passes.pack_projections import pack_projections
from specstream.export.trace import GRAPH_FILE, STREAMS_FILE, export_graph, export_streams
from specstream.quantize import schemes
from specstream.quantize.calibrate import Sample, collect, collect_moments, read_samples
from specstream.quantize.formats import BlockFormat, Blocks, IntegerFormat, from_blocks
from specstream.quantize.products import find_products
from specstream.quantize.schemes import Options, Quantizer

from ..export.tiny import HIDDEN, VOCAB, tiny_model

GRAPHS = [GRAPH_FILE, STREAMS_FILE]
TEXTS = [([5, 9, 11, 3, 60, 7, 8, 30], [2, 44, 19, 6, 71, 12]), ([1, 80, 33], [4, 5, 90, 17, 21])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("delayed")
    model = tiny_model("Llama", delayed=True)
    export_graph(model, folder, "ort")
    export_streams(model, folder, "ort")
    return folder


@pytest.fixture(scope="module")
def samples(folder: Path) -> dict[str, dict[str, Sample]]:
    return collect(folder, TEXTS)


def test_rows_of_both_graphs_are_collected(folder: Path, samples: dict[str, dict[str, Sample]]) -> None:
    for graph in GRAPHS:
        assert set(samples[graph]) == {product.rows.name for product in find_products(ir.load(folder / graph))}
        for sample in samples[graph].values():
            assert np.isfinite(sample.rows).all()


@pytest.mark.parametrize(("scheme", "most"), [("int8", 0.05), ("w8a8", 0.15)])
def test_both_graphs_stay_close(scheme: str, most: float, folder: Path, samples: dict[str, dict[str, Sample]], tmp_path: Path) -> None:
    quantizer = Quantizer(folder, GRAPHS, Options(scheme, 16), samples)
    quantizer.write(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [GRAPH_FILE, f"{GRAPH_FILE}.data", STREAMS_FILE]
    exact, found = (Graph(place / GRAPH_FILE, 64, place / STREAMS_FILE) for place in (folder, tmp_path))
    call = make_calls(TEXTS[0][0], VOCAB, False)[0]
    logits, drafts = [], []
    for graph in (exact, found):
        outputs = graph.run(call.inputs)
        graph.commit(call.commit)
        logits.append(outputs[contract.LOGITS])
        drafts.append(graph.draft(outputs[contract.ENTRY_STATES][-1:], 4))
    assert 0 < np.abs(logits[1] - logits[0]).max() < most * np.ptp(logits[0])
    # Candidates may change places: the best of each stream is compared.
    best = [draft[contract.STREAM_LOGPROBS][..., 0] for draft in drafts]
    assert np.abs(best[1] - best[0]).max() < 10 * most


def test_int4_with_moments_errs_less_in_both_graphs(folder: Path, tmp_path: Path) -> None:
    """Products of the very inputs that the moments are of, in squares; not all that a network makes of them."""
    moments: dict[str, dict[str, np.ndarray]] = {graph: {} for graph in GRAPHS}
    for graph, name, array in collect_moments(folder, TEXTS, 1 << 30):
        moments[graph][name] = array
    form = BlockFormat(4, 16)
    errors: dict[str, list[float]] = {graph: [] for graph in GRAPHS}
    for number, given in enumerate((None, moments)):
        out = tmp_path / str(number)
        out.mkdir()
        Quantizer(folder, GRAPHS, Options("int4", 16), moments=given).write(out)
        for graph in GRAPHS:
            model = ir.load(folder / graph)
            pack_projections(model)
            made = {node.inputs[1].name: node for node in ir.load(out / graph).graph if node.op_type == "MatMulNBits"}
            total = 0.0
            for product in find_products(model):
                arrays = [value.const_value.numpy() for value in made[f"{product.name}.packed"].inputs[1:4]]
                change = from_blocks(Blocks(*arrays), form) - product.matrix()
                total += float(np.sum(change * (moments[graph][product.rows.name] @ change)))
            errors[graph].append(total)
    assert all(compensated < 0.5 * plain for plain, compensated in errors.values())


def test_what_is_drawn_does_not_depend_on_the_process(folder: Path, tmp_path: Path) -> None:
    """Sets of names have another order in every process."""
    script = """
import json, sys
from pathlib import Path
from specstream.quantize.calibrate import collect, write_samples
write_samples(Path(sys.argv[2]), collect(Path(sys.argv[1]), json.loads(sys.argv[3]), kept=8))
"""
    found = []
    for seed in ("1", "2"):
        file = tmp_path / f"{seed}.npz"
        place = os.environ | {"PYTHONHASHSEED": seed}
        subprocess.run([sys.executable, "-c", script, str(folder), str(file), json.dumps(TEXTS)], check=True, env=place)
        found.append(read_samples(file))
    one, two = found
    for graph in GRAPHS:
        for name, sample in one[graph].items():
            np.testing.assert_array_equal(two[graph][name].rows, sample.rows)


def test_the_head_has_a_fixed_scale_only_if_that_errs_very_little(
    folder: Path, samples: dict[str, dict[str, Sample]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schemes, "ERROR_LIMIT", 0.5)
    quantizer = Quantizer(folder, GRAPHS, Options("w8a8", 16), samples)
    head = next(product.name for product in find_products(ir.load(folder / GRAPH_FILE)) if product.is_head)
    for limit, normalised in ((0.0, True), (0.5, False)):
        monkeypatch.setattr(schemes, "HEAD_ERROR_LIMIT", limit)
        form = quantizer.plans()[GRAPH_FILE][head]
        assert isinstance(form, IntegerFormat)
        assert form.normalised == normalised


def test_rows_are_rounded_once_for_all_products_that_read_them(folder: Path, samples: dict[str, dict[str, Sample]], tmp_path: Path) -> None:
    """Gate and up projections of w8a8 stay apart, for no copy to split them, and have one scale."""
    Quantizer(folder, GRAPHS, Options("w8a8", 16), samples).write(tmp_path)
    for graph in GRAPHS:
        nodes = list(ir.load(tmp_path / graph).graph)
        products = [node for node in nodes if node.op_type == "MatMulIntegerToFloat"]
        names = [node.inputs[1].name or "" for node in products if node.inputs[1] is not None]
        assert any("gate_proj" in name for name in names)
        assert any("qkv_proj" in name for name in names)
        rounded = [node.outputs[0] for node in nodes if node.op_type == "QuantizeLinear"]
        assert len({node.inputs[0] for node in products}) == len(rounded) < len(products)


def test_the_embedding_is_stored_once_for_both(folder: Path, tmp_path: Path) -> None:
    Quantizer(folder, GRAPHS, Options("int8", 16)).write(tmp_path)
    places = set()
    for graph in GRAPHS:
        for value in ir.load(tmp_path / graph).graph.initializers.values():
            tensor = value.const_value
            assert tensor is not None
            assert tensor.dtype != ir.DataType.FLOAT or tuple(tensor.shape) != (VOCAB, HIDDEN)  # no fp32 table is left
            if isinstance(tensor, ir.ExternalTensor) and tensor.nbytes == VOCAB * HIDDEN:
                places.add((tensor.location, tensor.offset))
    assert len(places) == 1
