"""Compressed packages: the evaluator's own reading of the file beside the arrays that were meant, and beside what coremltools makes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specstream.export.coreml_package import MODEL, WEIGHTS
from specstream.models.errors import UserError
from specstream.quantize import coreml_schemes
from specstream.quantize.coreml_formats import Integers, Palette, from_integers, from_palette, to_integers, to_palette
from specstream.quantize.coreml_schemes import COREML_SCHEMES, QUANTIZATION_KEY, CoreMLOptions, check_package, compress_package
from specstream.runtimes.mil_evaluator import MilModel

from ..runtimes import tiny_mil
from ..runtimes.tiny_mil import VOCAB, ct, decoder_inputs, join_functions, mb, quiet, save_decoder, save_program

SIZES: dict[str, Any] = {"block_size": 8, "group_size": 8}


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("decoders")
    parts = {f"rows_{rows}": save_decoder(folder / f"{rows}.mlpackage", rows) for rows in (4, 1)}
    return join_functions(folder / "both.mlpackage", parts)


@pytest.fixture(autouse=True)
def tiny_weights_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coreml_schemes, "LEAST_ELEMENTS", 16 * 16)


def rounded(matrix: np.ndarray, scheme: str) -> np.ndarray:
    """What is left of a matrix."""
    matrix = matrix.astype(np.float16).astype(np.float32)
    match scheme:
        case "fp16":
            return matrix
        case "int8":
            return from_integers(*to_integers(matrix, Integers(8)))
        case "int4":
            return from_integers(*to_integers(matrix, Integers(4, 8)))
    return from_palette(*to_palette(matrix, Palette(int(scheme[-1]), 8)))


def rounded_decoder(options: CoreMLOptions) -> tiny_mil.TinyDecoder:
    model = tiny_mil.TinyDecoder(4).eval()
    with torch.no_grad():
        for layer in (*model.layers, *model.outs, model.embed):
            scheme = options.head if layer is model.embed else options.scheme
            layer.weight.copy_(torch.tensor(rounded(layer.weight.numpy(), scheme).astype(np.float32)))
    return model


@pytest.mark.parametrize(
    ("scheme", "head"), [("int8", ""), ("int4", ""), ("int4", "fp16"), ("palette4", ""), ("palette4", "palette4"), ("palette6", "")]
)
def test_both_functions_compute_with_the_rounded_weights(scheme: str, head: str, decoders: Path, tmp_path: Path) -> None:
    options = CoreMLOptions(scheme, head, **SIZES)
    written = compress_package(decoders, tmp_path / "small.mlpackage", options, VOCAB)
    dense = MilModel(decoders)
    models = {rows: MilModel(tmp_path / "small.mlpackage", f"rows_{rows}") for rows in (4, 1)}
    state, dense_state = models[4].make_state(), dense.make_state()
    reference, start = rounded_decoder(options), 0
    for ids in ([1, 2, 3, 60], [7], [9, 10, 11, 12]):
        reference.rows = len(ids)
        logits, _, _ = reference.step(ids, start)
        found = models[len(ids)].predict(decoder_inputs(ids, start), state)
        assert np.abs(found["logits"] - logits).max() < 0.02
        start += len(ids)
    first = dense.predict(decoder_inputs([1, 2, 3, 60], 0), dense_state)["logits"]
    assert np.abs(first - models[4].predict(decoder_inputs([1, 2, 3, 60], 0), models[4].make_state())["logits"]).max() > 0.002
    expected = {"int8": 0, "int4": 0, "palette4": 0, "palette6": 0, "fp16": 0}
    expected[options.scheme] += 2 * tiny_mil.LAYERS
    expected[options.head] += 1
    assert written.matrices == {form: count for form, count in expected.items() if count}
    assert written.weight_bytes == (tmp_path / "small.mlpackage" / WEIGHTS).stat().st_size
    assert written.weight_bytes < written.source_bytes


def test_all_but_the_weights_stays(decoders: Path, tmp_path: Path) -> None:
    """Operations, names, types and small constants; metadata, and one key more."""
    out = tmp_path / "small.mlpackage"
    compress_package(decoders, out, CoreMLOptions("palette4", **SIZES), VOCAB)
    before, after = MilModel(decoders)._package, MilModel(out)._package
    assert after.functions == before.functions
    assert json.loads(after.metadata[QUANTIZATION_KEY]) == {"scheme": "palette4", "head": "palette6", "block_size": 8, "group_size": 8}
    assert {key: value for key, value in before.metadata.items() if "date" not in key}.items() <= after.metadata.items()
    for name in before.functions:
        old, new = before.function(name), after.function(name)
        assert new.operations == old.operations
        assert new.inputs == old.inputs
        assert new.outputs == old.outputs
        assert new.constants.keys() == old.constants.keys()
        for key, constant in old.constants.items():
            assert new.constants[key].type == constant.type
            if "weight" not in key:
                assert np.array_equal(after.constant(new.constants[key]), before.constant(constant))


def test_the_same_package_gives_the_same_bytes(decoders: Path, tmp_path: Path) -> None:
    files = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        out = tmp_path / name / "small.mlpackage"
        compress_package(decoders, out, CoreMLOptions("int4", "palette6", **SIZES), VOCAB)
        files.append({path.relative_to(out): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()})
    assert files[0] == files[1]
    assert len(files[0]) == 3


@pytest.mark.parametrize("scheme", COREML_SCHEMES)
def test_coremltools_reads_the_package(scheme: str, decoders: Path, tmp_path: Path) -> None:
    """Its loader checks types and shapes of every operation, and expands the weights as ours does."""
    from coremltools.converters.mil.frontend.milproto.load import load

    out = tmp_path / "small.mlpackage"
    compress_package(decoders, out, CoreMLOptions(scheme, scheme, **SIZES), VOCAB)
    with quiet():
        spec = ct.utils.load_spec(str(out))
        program = load(spec, spec.specificationVersion, str(out / WEIGHTS.removesuffix("/weight.bin")))
    package = MilModel(out)._package
    for name in package.functions:
        found = [operation for operation in program.functions[name].operations if operation.op_type.startswith("constexpr_")]
        assert len(found) == 2 * tiny_mil.LAYERS + 1
        for operation in found:
            ours = package.constant(package.function(name).constants[operation.outputs[0].name])
            assert np.array_equal(operation.materialized_val_inference(), ours)


def made_by_coremltools(scheme: str, path: Path) -> Any:
    """The constants' operation that coremltools makes of the one weight of a package."""
    cto = ct.optimize.coreml
    config = {
        "int8": cto.OpLinearQuantizerConfig(mode="linear_symmetric", dtype="int8"),
        "int4": cto.OpLinearQuantizerConfig(mode="linear_symmetric", dtype="int4", granularity="per_block", block_size=8),
        "palette4": cto.OpPalettizerConfig(mode="uniform", nbits=4, granularity="per_grouped_channel", group_size=8),
        "palette6": cto.OpPalettizerConfig(mode="uniform", nbits=6, granularity="per_grouped_channel", group_size=8),
    }[scheme]
    compress = cto.linear_quantize_weights if scheme.startswith("int") else cto.palettize_weights
    with quiet():
        model = compress(ct.models.MLModel(str(path), skip_model_load=True), cto.OptimizationConfig(global_config=config))
    return constexpr_of(model.get_spec())


def constexpr_of(spec: Any) -> Any:
    function = spec.mlProgram.functions["main"]
    block = function.block_specializations[function.opset]
    (operation,) = [operation for operation in block.operations if operation.type.startswith("constexpr_")]
    return operation


@pytest.mark.parametrize("scheme", COREML_SCHEMES)
def test_a_weight_has_the_form_that_coremltools_gives_it(scheme: str, tmp_path: Path) -> None:
    matrix = np.random.default_rng(1).normal(0, 1, (48, 64)).astype(np.float16)
    path = save_program(tmp_path / "dense.mlpackage", lambda x: mb.linear(x=x, weight=matrix, name="product"), ((3, 64), np.float16))
    compress_package(path, tmp_path / "small.mlpackage", CoreMLOptions(scheme, **SIZES), VOCAB)
    ours, theirs = constexpr_of(ct.utils.load_spec(str(tmp_path / "small.mlpackage"))), made_by_coremltools(scheme, path)
    assert ours.type == theirs.type
    assert set(ours.attributes) == set(theirs.attributes) == {"name"}
    assert ours.outputs[0].type == theirs.outputs[0].type
    assert set(ours.inputs) == set(theirs.inputs)
    for parameter, argument in theirs.inputs.items():
        (mine,), (other,) = ours.inputs[parameter].arguments, argument.arguments
        assert mine.value.type == other.value.type
        assert mine.value.blobFileValue.fileName == other.value.blobFileValue.fileName


def test_tables_that_are_only_looked_up_and_small_weights_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Angles of rotary positions are no embedding; adapters of low rank are few."""
    random = np.random.default_rng(1)
    angles, embedding, low, big = (random.normal(0, 1, shape).astype(np.float16) for shape in ((96, 64), (128, 64), (8, 64), (64, 64)))

    def body(ids: Any) -> Any:
        x = mb.add(x=mb.gather(x=embedding, indices=ids, axis=0), y=mb.gather(x=angles, indices=ids, axis=0))
        return mb.linear(x=x, weight=low, name="low"), mb.linear(x=x, weight=big, name="big")

    path = save_program(tmp_path / "dense.mlpackage", body, ((3,), np.int32))
    monkeypatch.setattr(coreml_schemes, "LEAST_ELEMENTS", 1024)
    written = compress_package(path, tmp_path / "small.mlpackage", CoreMLOptions("int4", "int8", **SIZES), vocab_size=128)
    assert written.matrices == {"int4": 1, "int8": 1, "fp16": 2}
    package = MilModel(tmp_path / "small.mlpackage")._package
    kinds = {constant.type.shape: type(constant).__name__ for constant in package.function("main").constants.values()}
    assert {shape: kinds[shape] for shape in ((96, 64), (128, 64), (8, 64), (64, 64))} == {
        (96, 64): "Constant",
        (128, 64): "Expanded",
        (8, 64): "Constant",
        (64, 64): "Expanded",
    }


def test_single_precision_stays_the_type(tmp_path: Path) -> None:
    matrix = np.random.default_rng(1).normal(0, 1, (48, 64)).astype(np.float32)
    path = save_program(tmp_path / "dense.mlpackage", lambda x: mb.linear(x=x, weight=matrix, name="product"), ((3, 64), np.float32))
    x = np.random.default_rng(2).normal(0, 1, (3, 64)).astype(np.float32)
    for scheme in ("int8", "palette6"):
        compress_package(path, tmp_path / f"{scheme}.mlpackage", CoreMLOptions(scheme, **SIZES), VOCAB)
        found = MilModel(tmp_path / f"{scheme}.mlpackage").predict({"x": x})["product"]
        assert found.dtype == np.float32
        assert np.abs(found - x @ matrix.T).max() < 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scheme": "w8a8"}, "scheme 'w8a8' is unknown for Core ML; one of int8, int4, palette4, palette6 expected"),
        ({"scheme": "int8", "head": "int5"}, "head scheme 'int5' is unknown"),
        ({"scheme": "int4", "block_size": 0}, "block size 0 given"),
        ({"scheme": "palette4", "group_size": -1}, "group size -1 given"),
    ],
)
def test_options_that_make_no_sense(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        CoreMLOptions(**settings)


def test_what_cannot_be_compressed_is_refused_before_weights_are_read(decoders: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(decoders, tmp_path / "copied.mlpackage"))
    (copied / WEIGHTS).unlink()
    check_package(copied, CoreMLOptions("int4", **SIZES), VOCAB)
    with pytest.raises(UserError, match="block size 32 does not divide the 16 inputs of"):
        check_package(copied, CoreMLOptions("int4"), VOCAB)
    with pytest.raises(UserError, match=r"group size 5 does not divide the \d+ outputs of"):
        check_package(copied, CoreMLOptions("palette4", group_size=5), VOCAB)
    with pytest.raises(UserError, match="weights are missing"):
        compress_package(copied, tmp_path / "small.mlpackage", CoreMLOptions("int4", **SIZES), VOCAB)
    (copied / MODEL).write_text("hello")
    with pytest.raises(UserError, match="damaged"):
        check_package(copied, CoreMLOptions("int8"), VOCAB)
    with pytest.raises(UserError, match="is not a Core ML package"):
        check_package(tmp_path, CoreMLOptions("int8"), VOCAB)


def test_a_compressed_package_is_refused(decoders: Path, tmp_path: Path) -> None:
    compress_package(decoders, tmp_path / "small.mlpackage", CoreMLOptions("int8"), VOCAB)
    with pytest.raises(UserError, match="compressed already"):
        check_package(tmp_path / "small.mlpackage", CoreMLOptions("int8"), VOCAB)


def test_a_package_without_products_or_of_an_older_system_is_refused(tmp_path: Path) -> None:
    path = save_program(tmp_path / "p.mlpackage", lambda x: mb.mul(x=x, y=np.float32(2), name="y"), ((3,), np.float32))
    with pytest.raises(UserError, match="has no products with fp16 weights"):
        check_package(path, CoreMLOptions("int8"), VOCAB)
    old = save_program(tmp_path / "old.mlpackage", lambda x: mb.relu(x=x, name="y"), ((3,), np.float32), target=ct.target.iOS17)
    with pytest.raises(UserError, match="is not an ML Program for iOS 18"):
        check_package(old, CoreMLOptions("int8"), VOCAB)


def test_an_interrupted_run_leaves_nothing(decoders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(coreml_schemes, "to_palette", interrupt)
    with pytest.raises(KeyboardInterrupt):
        compress_package(decoders, tmp_path / "small.mlpackage", CoreMLOptions("palette4", **SIZES), VOCAB)
    assert not list(tmp_path.iterdir())
