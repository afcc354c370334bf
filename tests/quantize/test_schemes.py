"""Quantized graphs of a tiny bundle: operators, attributes, shared tables, independence of rows, exactness of what must be exact."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from specstream.export.passes.pack_projections import pack_projections
from specstream.models.errors import UserError
from specstream.quantize.calibrate import (
    KEPT_ROWS,
    Sample,
    collect,
    collect_moments,
    main,
    read_moments,
    read_samples,
    write_moments,
    write_samples,
)
from specstream.quantize.fit import apply_factors
from specstream.quantize.formats import BlockFormat, IntegerFormat
from specstream.quantize.graph_file import WeightFile
from specstream.quantize.products import find_lookups, find_products
from specstream.quantize.rewrite import rewrite
from specstream.quantize.schemes import Options, Quantizer, usual_block_size
from specstream.quantize.smooth import find_groups

from ..runtimes.tiny_bundle import HIDDEN, LAYERS, write_bundle

TEXTS = [([5, 9, 100, 7, 31, 8], [12, 13, 14, 90, 3]), ([40, 41, 42], [1, 2])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("fp32") / "bundle").folder


@pytest.fixture(scope="module")
def samples(folder: Path) -> dict[str, dict[str, Sample]]:
    return collect(folder, TEXTS)


def small_graph(path: Path, norm: bool = True) -> dict[str, np.ndarray]:
    """A tied network without attention: embedding, norm, gate/up/down, norm, head; returns its weights."""
    rng = np.random.default_rng(3)
    size, wide, vocab = 32, 64, 50
    weights = {
        "embed_tokens.weight": rng.standard_normal((vocab, size)),
        "norm0": rng.uniform(0.5, 2, size) * np.where(np.arange(size) == 3, 20, 1),  # a channel of outliers
        "mlp.gate_proj.weight": rng.standard_normal((size, wide)) / 6,
        "mlp.up_proj.weight": rng.standard_normal((size, wide)) / 6,
        "mlp.down_proj.weight": rng.standard_normal((wide, size)) / 8,
        "norm1": rng.uniform(0.5, 2, size),
    }
    weights = {name: array.astype(np.float32) for name, array in weights.items()}
    node = helper.make_node
    nodes = [
        node("Gather", ["embed_tokens.weight", "ids"], ["x"], axis=0),
        node("RMSNormalization", ["x", "norm0"], ["h"], axis=-1, epsilon=1e-6),
        node("MatMul", ["h", "mlp.gate_proj.weight"], ["gate"]),
        node("Sigmoid", ["gate"], ["s"]),
        node("Mul", ["gate", "s"], ["silu"]),
        node("MatMul", ["h", "mlp.up_proj.weight"], ["up"]),
        node("Mul", ["silu", "up"], ["inner"]),
        node("MatMul", ["inner", "mlp.down_proj.weight"], ["down"]),
        node("Add", ["x", "down"], ["y"]),
        node("RMSNormalization", ["y", "norm1"], ["n"], axis=-1, epsilon=1e-6),
        node("Gemm", ["n", "embed_tokens.weight"], ["logits"], transB=1),
    ]
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["T"])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["T", vocab])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10), path)
    return weights


def run(path: Path, ids: list[int]) -> np.ndarray:
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(None, {"ids": np.array(ids)})[0]  # type: ignore[no-any-return]


def saved(model: ir.Model, folder: Path, name: str) -> Path:
    with WeightFile(folder / f"{name}.data") as weights:
        weights.save(model, folder / f"{name}.onnx")
    return folder / f"{name}.onnx"


# Structure


def test_gate_and_up_stay_apart(tmp_path: Path) -> None:
    small_graph(tmp_path / "a.onnx")
    model = ir.load(tmp_path / "a.onnx")
    assert pack_projections(model) == 0
    assert "mlp.gate_proj.weight" in model.graph.initializers


def test_packing_takes_biases_along_and_leaves_updates_alone(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    shapes = {"q_proj": (32, 32), "k_proj": (32, 16), "v_proj": (32, 16)}
    initializers, nodes = [], []
    for name, shape in shapes.items():
        for part, size in (("weight", shape), ("bias", shape[1:])):
            initializers.append(numpy_helper.from_array(rng.standard_normal(size).astype(np.float32), f"attn.{name}.{part}"))
        nodes.append(helper.make_node("MatMul", ["x", f"attn.{name}.weight"], [f"{name}.product"]))
        nodes.append(helper.make_node("Add", [f"{name}.product", f"attn.{name}.bias"], [f"{name}.sum"]))
    initializers.append(numpy_helper.from_array(rng.standard_normal((32, 4)).astype(np.float32), "attn.q_proj.lora_A"))
    nodes.append(helper.make_node("MatMul", ["x", "attn.q_proj.lora_A"], ["low"]))
    ends = [*(f"{name}.sum" for name in shapes), "low"]
    nodes += [helper.make_node("Identity", [end], [f"{end}.out"]) for end in ends]
    graph = helper.make_graph(
        nodes,
        "biased",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["T", 32])],
        [helper.make_tensor_value_info(f"{end}.out", TensorProto.FLOAT, None) for end in ends],
        initializers,
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10), tmp_path / "a.onnx")
    model = ir.load(tmp_path / "a.onnx")
    assert pack_projections(model) == 2
    kinds = [node.op_type for node in model.graph]
    assert (kinds.count("MatMul"), kinds.count("Add"), kinds.count("Split")) == (2, 1, 1)
    x = {"x": rng.standard_normal((3, 32)).astype(np.float32)}
    before = ort.InferenceSession(tmp_path / "a.onnx").run(None, x)
    for left, right in zip(before, ort.InferenceSession(saved(model, tmp_path, "b")).run(None, x), strict=True):
        np.testing.assert_allclose(right, left, atol=1e-5)


def test_products_of_a_bundle(folder: Path) -> None:
    model = ir.load(folder / "model.onnx")
    assert pack_projections(model) == 2 * LAYERS
    assert len(find_products(model)) == 2 * LAYERS + 2  # packed q/k/v and o of each layer; the head, of rows and of streams
    assert {lookup.table.name for lookup in find_lookups(model)} == {"embed", "place"}


def test_smoothing_changes_no_result(tmp_path: Path) -> None:
    small_graph(tmp_path / "a.onnx")
    model = ir.load(tmp_path / "a.onnx")
    pack_projections(model)
    groups = find_groups(model)
    assert [group.rows.name for group in groups] == ["h", "inner"]  # not the tied head's input: its table is the embedding too
    rng = np.random.default_rng(1)
    factors = {name: rng.uniform(0.2, 5, size).astype(np.float32) for name, size in (("h", 32), ("inner", 64))}
    assert apply_factors(model, factors) == 2
    np.testing.assert_allclose(run(saved(model, tmp_path, "b"), [4, 9]), run(tmp_path / "a.onnx", [4, 9]), atol=1e-4)


# Formats in graphs


@pytest.mark.parametrize(
    ("form", "most"),
    [
        (BlockFormat(4, 16, 0), 0.4),
        (BlockFormat(8, 16, 4, symmetric=True), 0.05),
        (IntegerFormat(0.12), 0.1),
        (IntegerFormat(1 / 127, normalised=True), 0.05),
    ],
)
def test_a_tied_table_is_stored_once(form: BlockFormat | IntegerFormat, most: float, tmp_path: Path) -> None:
    weights = small_graph(tmp_path / "a.onnx")
    model = ir.load(tmp_path / "a.onnx")
    counts = rewrite(model, {"embed_tokens.weight": form})
    path = saved(model, tmp_path, "b")
    lookup = "GatherBlockQuantized" if isinstance(form, BlockFormat) else "Gather"
    assert counts == {"MatMulNBits" if isinstance(form, BlockFormat) else "MatMulIntegerToFloat": 1, lookup: 1}
    table = weights["embed_tokens.weight"].size * (form.bits if isinstance(form, BlockFormat) else 8) // 8
    others = sum(array.nbytes for name, array in weights.items() if "embed" not in name)
    assert (tmp_path / "b.data").stat().st_size + path.stat().st_size < table + others + 5000
    expected = run(tmp_path / "a.onnx", [1, 2, 49])
    assert 0 < np.abs(run(path, [1, 2, 49]) - expected).max() / np.abs(expected).max() < most


def test_the_file_holds_equal_bytes_once(tmp_path: Path) -> None:
    small_graph(tmp_path / "a.onnx")
    with WeightFile(tmp_path / "both.data") as weights:
        weights.save(ir.load(tmp_path / "a.onnx"), tmp_path / "one.onnx")
        size = weights.nbytes
        weights.save(ir.load(tmp_path / "a.onnx"), tmp_path / "two.onnx")
        assert weights.nbytes == size
    np.testing.assert_array_equal(run(tmp_path / "two.onnx", [3]), run(tmp_path / "a.onnx", [3]))


def test_attributes_are_in_the_graph(folder: Path, tmp_path: Path) -> None:
    written = Quantizer(folder, ["model.onnx"], Options("int4", 16, 0)).write(tmp_path)
    assert written.products == {"MatMulNBits": 2 * LAYERS + 2, "GatherBlockQuantized": 2}
    nodes = [node for node in ir.load(tmp_path / "model.onnx").graph if node.op_type == "MatMulNBits"]
    for node in nodes:
        asked = {"bits": 4, "block_size": 16, "accuracy_level": 0, "K": HIDDEN}
        assert {name: node.attributes.get_int(name) for name in asked} == asked


# Rows


def mixing(folder: Path, out: Path) -> None:
    """Make one product scale its rows by the largest of all of them: what no scheme here may do."""
    model = onnx.load(folder / "model.onnx")
    node = next(node for node in model.graph.node if node.op_type == "MatMul" and node.input[1] == "o0")
    weight = next(tensor for tensor in model.graph.initializer if tensor.name == "o0")
    array = numpy_helper.to_array(weight)
    scale = np.float32(np.abs(array).max() / 127)
    rounded = np.rint(array / scale).astype(np.int8)
    model.graph.initializer.extend([numpy_helper.from_array(rounded, "o0.int8"), numpy_helper.from_array(np.array(scale), "o0.scale")])
    made = helper.make_node(
        "DynamicQuantizeMatMul", [node.input[0], "o0.int8", "o0.scale"], [node.output[0]], domain="com.microsoft", name="mixing"
    )
    place = list(model.graph.node).index(node)
    model.graph.node.remove(node)
    model.graph.node.insert(place, made)
    onnx.save(model, out / "model.onnx", save_as_external_data=True, location="model.onnx.data", size_threshold=256)


@pytest.mark.parametrize("scheme", ["int4", "int8", "w8a8", "mixing"])
def test_rows_are_independent(scheme: str, folder: Path, samples: dict[str, dict[str, Sample]], tmp_path: Path) -> None:
    """What verify's row check finds, and what a change of the siblings' tokens alone does, agree with what the schemes state."""
    from specstream.runtimes.bundle import Bundle
    from specstream.runtimes.ort_session import OrtSession
    from specstream.runtimes.session import NEAR_TIE
    from specstream.runtimes.verify import compare_rows as compare_with_decoys
    from specstream.toolchain.quantize_quality import compare_rows

    if scheme == "mixing":
        mixing(folder, tmp_path)
    else:
        Quantizer(folder, ["model.onnx"], Options(scheme, 16), samples).write(tmp_path)
    manifest = Bundle.load(folder).manifest
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    session = OrtSession(Bundle(tmp_path, manifest), threads=1)
    found = compare_rows(session, TEXTS)
    # On several texts, as verify does: a decoy is seen only where it has the largest entry of all rows.
    rng = np.random.default_rng(0)
    difference = max(compare_with_decoys(session, TEXTS[0][0], rng.integers(0, 200, 6).tolist())[0] for _ in range(8))
    assert found["rows_independent"] == (scheme != "mixing")
    assert (difference < NEAR_TIE) == (scheme != "mixing")


# Samples, options, search


def test_samples_round_trip(samples: dict[str, dict[str, Sample]], tmp_path: Path) -> None:
    write_samples(tmp_path / "rows.npz", samples)
    read = read_samples(tmp_path / "rows.npz")
    assert read.keys() == samples.keys() == {"model.onnx"}
    inputs = {product.rows.name for product in find_products(_packed(tmp_path, samples))}
    assert inputs == set(samples["model.onnx"])
    for name, sample in samples["model.onnx"].items():
        np.testing.assert_array_equal(read["model.onnx"][name].rows, sample.rows)
        assert read["model.onnx"][name].seen == sample.seen
        assert (np.abs(sample.rows).max(axis=0) <= sample.largest).all()


@pytest.mark.parametrize("most_bytes", [1, 20_000, 1 << 30])
def test_moments_are_those_of_all_rows(most_bytes: int, folder: Path, samples: dict[str, dict[str, Sample]], tmp_path: Path) -> None:
    write_moments(tmp_path / "moments", collect_moments(folder, TEXTS, most_bytes))
    read = read_moments(tmp_path / "moments")
    assert read.keys() == samples.keys()
    assert set(read["model.onnx"]) == set(samples["model.onnx"])
    for name, sample in samples["model.onnx"].items():
        assert sample.seen < KEPT_ROWS * 3 // 4  # so it has all rows, before those with the largest entries once more
        rows = sample.rows[: sample.seen]
        np.testing.assert_allclose(read["model.onnx"][name], rows.T @ rows / sample.seen, rtol=1e-4, atol=1e-5)


def test_moments_from_a_process_of_its_own(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.json").write_text(json.dumps([{"prompt": prompt, "continuation": after} for prompt, after in TEXTS]))
    assert main([str(folder), str(tmp_path / "texts.json"), str(tmp_path / "out"), "--moments", "100000"]) == 0
    assert all(moments.shape[0] == moments.shape[1] for moments in read_moments(tmp_path / "out")["model.onnx"].values())


@pytest.mark.parametrize(("sizes", "expected"), [((576, 1536), 64), ((96, 160), 32), ((48,), 16), ((40, 64), 16)])
def test_usual_block_sizes_divide_where_one_does(sizes: tuple[int, ...], expected: int, tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", [f"x{size}", f"w{size}"], [f"y{size}"]) for size in sizes]
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "products",
        [info(f"x{size}", TensorProto.FLOAT, [1, size]) for size in sizes],
        [info(f"y{size}", TensorProto.FLOAT, [1, 32]) for size in sizes],
        [numpy_helper.from_array(np.ones((size, 32), dtype=np.float32), f"w{size}") for size in sizes],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10), tmp_path / "m.onnx")
    assert usual_block_size(tmp_path, ["m.onnx"]) == expected


def _packed(tmp_path: Path, samples: dict[str, dict[str, Sample]]) -> ir.Model:
    bundle = write_bundle(tmp_path / "again")
    model = ir.load(bundle.folder / "model.onnx")
    pack_projections(model)
    return model


@pytest.mark.parametrize(
    ("scheme", "block_size", "level", "message"),
    [("int5", 32, 4, "scheme 'int5' is unknown"), ("int4", 31, 4, "block size 31"), ("int4", 32, 2, "accuracy level 2")],
)
def test_bad_options(scheme: str, block_size: int, level: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Options(scheme, block_size, level)


def test_a_block_size_that_does_not_divide(folder: Path) -> None:
    with pytest.raises(UserError, match="block size 64 does not divide the 32 inputs of"):
        Quantizer(folder, ["model.onnx"], Options("int4", 64))


def test_a_graph_without_fp32_products_is_refused(folder: Path, tmp_path: Path) -> None:
    Quantizer(folder, ["model.onnx"], Options("int8", 16)).write(tmp_path)
    with pytest.raises(UserError, match="is it quantized already"):
        Quantizer(tmp_path, ["model.onnx"], Options("int8", 16))


def test_mixed_raises_as_few_products_as_the_limit_needs(folder: Path, samples: dict[str, dict[str, Sample]]) -> None:
    quantizer = Quantizer(folder, ["model.onnx"], Options("mixed", 16), samples)
    count = len(quantizer.ladder()) // 2
    assert count == 2 * LAYERS + 1  # the head's weight serves main rows and streams

    def fine(plans: dict[str, dict[str, object]]) -> float:  # a measure that wants three products raised
        return sum(isinstance(form, IntegerFormat) for name, form in plans["model.onnx"].items() if name not in ("embed", "place"))

    start = fine(quantizer.plans(0))  # type: ignore[arg-type]
    plans = quantizer.search(fine, max(start - 3, 0))  # type: ignore[arg-type]
    assert plans is not None
    assert fine(plans) == max(start - 3, 0)  # type: ignore[arg-type]
    assert quantizer.search(lambda plans: 1.0, 0.5) is None
    assert set(quantizer.plans(2 * count)["model.onnx"]) == {"embed", "place"}  # all products fp32 at the ladder's end
