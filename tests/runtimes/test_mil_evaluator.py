"""Saved packages: what the evaluator makes of the file on disk, beside PyTorch and coremltools; and what it says of broken ones."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specstream.export.weight_blob import BITS, NUMBERS, NUMPY, WeightBlob, WeightBlobWriter, unpack
from specstream.models.errors import UserError
from specstream.runtimes import coreml_import, mil_evaluator
from specstream.runtimes.mil_evaluator import MilModel, MilState
from specstream.runtimes.mil_operators import slice_update_in_place
from specstream.runtimes.mil_program import open_package

from . import tiny_mil
from .tiny_mil import ct, decoder_inputs, join_functions, mb, quiet, save_decoder, save_program

WEIGHTS = Path("Data/com.apple.CoreML/weights/weight.bin")
SPEC = Path("Data/com.apple.CoreML/model.mlmodel")


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package whose functions process 4 rows and 1 row, with one cache."""
    folder = tmp_path_factory.mktemp("decoders")
    parts = {f"rows_{rows}": save_decoder(folder / f"{rows}.mlpackage", rows) for rows in (4, 1)}
    return join_functions(folder / "both.mlpackage", parts)


@pytest.fixture
def copied(decoders: Path, tmp_path: Path) -> Path:
    """A copy to be broken."""
    return Path(shutil.copytree(decoders, tmp_path / "copied.mlpackage"))


def test_a_package_shows_its_functions_and_types(decoders: Path) -> None:
    assert MilModel.functions(decoders) == ["rows_4", "rows_1"]
    model = MilModel(decoders)
    assert model.function == "rows_4"
    assert {name: str(kind) for name, kind in model.inputs.items()} == {
        "ids": "int32 [1, 4]",
        "mask": "fp16 [1, 1, 4, 24]",
        "start": "int32 [1]",
    }
    assert {name: str(kind) for name, kind in model.outputs.items()} == {
        "logits": "fp16 [1, 4, 64]",
        "next_ids": "int32 [1, 4]",
        "best_ids": "int32 [1, 4, 3]",
    }
    assert list(model.states) == ["keyCache", "valueCache"]
    assert MilModel(decoders, "rows_1").inputs["ids"].shape == (1, 1)


def test_calls_of_two_functions_with_one_state_agree_with_pytorch(decoders: Path) -> None:
    models = {rows: MilModel(decoders, f"rows_{rows}") for rows in (4, 1)}
    state = models[4].make_state()
    reference = tiny_mil.TinyDecoder(4).eval()
    start = 0
    for ids in ([1, 2, 3, 60], [7], [8], [9, 10, 11, 12]):
        reference.rows = len(ids)
        logits, next_ids, best_ids = reference.step(ids, start)
        found = models[len(ids)].predict(decoder_inputs(ids, start), state)
        assert np.abs(found["logits"] - logits).max() < 0.02  # of logits up to 20
        assert np.array_equal(found["next_ids"], next_ids)
        assert np.array_equal(found["best_ids"][..., 0], best_ids[..., 0])
        start += len(ids)
    assert np.abs(state.arrays["keyCache"][:, :, :start] - reference.keyCache.numpy()[:, :, :start]).max() < 0.01
    assert not state.arrays["keyCache"][:, :, start:].any()


def test_single_precision_agrees_with_pytorch(tmp_path: Path) -> None:
    """Only the cache is float16 here, and the first call has nothing in it but what is the same in both."""
    model = MilModel(save_decoder(tmp_path / "single.mlpackage", half=False))
    logits, next_ids, best_ids = tiny_mil.TinyDecoder(4).eval().step([5, 6, 7, 8], 0)
    found = model.predict(decoder_inputs([5, 6, 7, 8], 0, np.float32), model.make_state())
    assert np.abs(found["logits"] - logits).max() < 2e-3
    assert np.array_equal(found["next_ids"], next_ids)
    assert np.array_equal(found["best_ids"], best_ids)


def test_functions_share_weights(decoders: Path) -> None:
    models = [MilModel(decoders, f"rows_{rows}") for rows in (4, 1)]
    weights = [[step.fixed["weight"] for step in model._steps if "weight" in step.fixed] for model in models]
    assert len(weights[0]) == 2 * tiny_mil.LAYERS + 1
    assert all(one is other for one, other in zip(*weights, strict=True))
    assert {weight.dtype for weight in weights[0]} == {np.dtype(np.float32)}
    assert not any(weight.flags.writeable for weight in weights[0])


def test_values_are_freed_after_their_last_use(decoders: Path) -> None:
    model = MilModel(decoders)
    freed = [name for step in model._steps for name in step.frees]
    outputs = [output.name for step in model._steps for output in step.operation.outputs]
    assert len(freed) == len(set(freed))
    assert set(freed) == set(outputs) - set(model.outputs)


def test_a_state_that_was_read_stays_as_it_was(decoders: Path) -> None:
    model = MilModel(decoders, "rows_1")
    state = model.make_state()
    before = state.arrays["keyCache"]
    model.predict(decoder_inputs([1], 0), state)
    assert not before.any()
    assert state.arrays["keyCache"].any()


def test_what_is_wrong_in_the_weights_or_the_call_is_seen(decoders: Path, copied: Path) -> None:
    """A check that cannot fail is none: one weight, the mask, a step left out."""
    inputs = decoder_inputs([1, 2, 3, 4], 0)

    def run(path: Path, **changed: np.ndarray) -> np.ndarray:
        model = MilModel(path)
        state = model.make_state()
        first = model.predict(inputs | changed, state)["logits"]
        return np.concatenate([first, model.predict(decoder_inputs([5, 6, 7, 8], 4), state)["logits"]], axis=1)

    right = run(decoders)
    assert np.array_equal(run(copied), right)
    body = bytearray((copied / WEIGHTS).read_bytes())
    place = body.index(tiny_mil.TinyDecoder(4).layers[0].weight.detach().numpy().astype(np.float16).tobytes())
    body[place + 1] ^= 0x40  # the highest bit of the exponent of the first weight
    (copied / WEIGHTS).write_bytes(body)
    assert np.abs(run(copied) - right).max() > 0.1
    mask = inputs["mask"].copy()
    mask[0, 0, 2, 0] = -1e4
    changed = run(decoders, mask=mask)
    assert np.array_equal(changed[:, :2], right[:, :2])
    assert np.abs(changed[:, 2] - right[:, 2]).max() > 0.02
    assert np.abs(run(decoders, start=np.array([1], dtype=np.int32)) - right).max() > 0.02


def test_results_of_half_precision_are_rounded_after_each_operation(tmp_path: Path) -> None:
    def body(x: Any) -> Any:
        square = mb.mul(x=x, y=x, name="square")
        return mb.mul(x=square, y=np.float16(1e-3), name="scaled"), mb.add(x=x, y=np.float16(2048), name="sum")

    model = MilModel(save_program(tmp_path / "program.mlpackage", body, ((3,), np.float16)))
    found = model.predict({"x": np.array([1, 200, 300], dtype=np.float16)})
    assert found["scaled"].dtype == np.float16
    assert np.isinf(found["scaled"][2])  # 300 · 300 is above 65,504
    assert found["scaled"][1] == np.float16(40000 * float(np.float16(1e-3)))
    assert found["sum"][0] == 2048  # 2,049 is no float16: rounded to even


def test_an_output_may_be_a_constant_or_an_input(tmp_path: Path) -> None:
    def body(x: Any) -> Any:
        return mb.const(val=np.arange(12, dtype=np.float32), name="twelve"), mb.identity(x=x, name="same")

    x = np.ones(2, dtype=np.float32)
    found = MilModel(save_program(tmp_path / "program.mlpackage", body, ((2,), np.float32))).predict({"x": x})
    assert np.array_equal(found["twelve"], np.arange(12))
    assert np.array_equal(found["same"], x)
    found["same"][0] = 5  # results are the caller's
    assert x[0] == 1


def save_with_state(path: Path, body: Callable[..., Any], size: int = 4) -> Path:
    """A package of a program that takes x [size] and a state ``kept`` [size], float16."""
    half = ct.converters.mil.mil.types.fp16
    specs = [mb.TensorSpec((size,), dtype=half), mb.StateTensorSpec((size,), half)]
    with quiet():
        program = mb.program(input_specs=specs, opset_version=ct.target.iOS18)(body)
        options = {"minimum_deployment_target": ct.target.iOS18, "pass_pipeline": ct.PassPipeline.EMPTY, "skip_model_load": True}
        ct.convert(program, convert_to="mlprogram", **options).save(str(path))
    return path


def test_a_written_input_is_copied_into_the_state(tmp_path: Path) -> None:
    def body(x: Any, kept: Any) -> Any:
        old = mb.read_state(input=kept)
        mb.coreml_update_state(state=kept, value=x)
        return mb.identity(x=old, name="result")

    model = MilModel(save_with_state(tmp_path / "p.mlpackage", body))
    state = model.make_state()
    x = np.array([1, 2, 3, 4], dtype=np.float16)
    assert not model.predict({"x": x}, state)["result"].any()
    x[:] = 9
    assert model.predict({"x": x}, state)["result"].tolist() == [1, 2, 3, 4]


def in_place(model: MilModel) -> int:
    return sum(step.function is slice_update_in_place for step in model._steps)


def put(x: Any, update: Any, at: int) -> Any:
    return mb.slice_update(x=x, update=update, begin=[at], end=[at + 1])


def test_updates_after_the_first_write_in_place(decoders: Path) -> None:
    """Of each state the first layer's update copies what the caller has; those of later layers need not."""
    assert in_place(MilModel(decoders)) == 2 * (tiny_mil.LAYERS - 1)


@pytest.mark.parametrize("needed", ["nothing", "the value before", "a view of it", "the state before", "the update"])
def test_an_update_in_place_is_never_seen(needed: str, tmp_path: Path) -> None:
    """A second update of one state: what it would overwrite may still be wanted."""

    def body(x: Any, kept: Any) -> Any:
        one = mb.slice_by_size(x=x, begin=[1], size=[1])
        first = put(mb.read_state(input=kept), one, 0)
        mb.coreml_update_state(state=kept, value=first)
        value = mb.read_state(input=kept)
        view = mb.slice_by_size(x=value, begin=[0], size=[2])
        update = mb.slice_by_size(x=value, begin=[0], size=[1]) if needed == "the update" else mb.slice_by_size(x=x, begin=[2], size=[1])
        second = put(value, update, 1)
        if needed != "the state before":
            mb.coreml_update_state(state=kept, value=second)
        wanted = {"the value before": value, "a view of it": view}.get(needed, x)
        return mb.mul(x=second, y=np.float16(1), name="result"), mb.mul(x=wanted, y=np.float16(1), name="wanted")

    model = MilModel(save_with_state(tmp_path / "p.mlpackage", body))
    assert in_place(model) == (needed == "nothing")
    state = model.make_state()
    state.arrays["kept"][:] = [5, 6, 7, 8]
    before = state.arrays["kept"]
    x = np.array([1, 2, 3, 4], dtype=np.float16)
    found = model.predict({"x": x}, state)
    second = [2, 2 if needed == "the update" else 3, 7, 8]
    assert found["result"].tolist() == second
    assert state.arrays["kept"].tolist() == ([2, 6, 7, 8] if needed == "the state before" else second)
    assert found["wanted"].tolist() == {"the value before": [2, 6, 7, 8], "a view of it": [2, 6]}.get(needed, x.tolist())
    assert before.tolist() == [5, 6, 7, 8]


# --- reading -----------------------------------------------------------------------------------------------------------------------------


def test_the_reader_sees_what_coremltools_reads(decoders: Path) -> None:
    """Operations, their inputs and their types, against the generated classes of the protocol."""
    spec = ct.utils.load_spec(str(decoders))
    package = open_package(decoders)
    assert package.metadata == dict(spec.description.metadata.userDefined)
    for name, function in spec.mlProgram.functions.items():
        read = package.function(name)
        block = function.block_specializations[function.opset]
        assert list(read.outputs) == list(block.outputs)
        operations = [operation for operation in block.operations if operation.type != "const"]
        assert len(operations) == len(read.operations)
        for have, want in zip(read.operations, operations, strict=True):
            assert have.type == want.type
            assert have.inputs == {key: tuple(binding.name for binding in argument.arguments) for key, argument in want.inputs.items()}
            for output, expected in zip(have.outputs, want.outputs, strict=True):
                assert output.name == expected.name
                assert output.type.shape == tuple(dimension.constant.size for dimension in expected.type.tensorType.dimensions)
        constants = {operation.outputs[0].name: operation for operation in block.operations if operation.type == "const"}
        assert set(constants) == set(read.constants)


def test_constants_of_all_types(tmp_path: Path) -> None:
    """In the program and in the weight file (from ten elements on); negative ones, flags, text."""
    values = [
        np.array(-3, dtype=np.int32),
        np.array([1, -2, 2**31 - 1], dtype=np.int32),
        np.array([True, False, True]),
        np.array([1.5, -2], dtype=np.float16),
        np.array([1.5, -2], dtype=np.float32),
        np.array([-7, 3], dtype=np.int8),
        np.array([200, 3], dtype=np.uint8),
        np.array([-7, 3], dtype=np.int16),
        np.array([60000, 3], dtype=np.uint16),
        *(np.arange(24).reshape(2, 3, 4).astype(kind) - 5 for kind in (np.float16, np.float32, np.int8, np.int16, np.int32)),
        np.arange(24, dtype=np.uint16).reshape(4, 6),
    ]

    def body(x: Any) -> Any:
        return tuple(mb.const(val=value, name=f"c{number}") for number, value in enumerate(values))

    path = save_program(tmp_path / "program.mlpackage", lambda x: (*body(x), mb.identity(x=x, name="same")), ((2,), np.float32))
    package = open_package(path)
    # An output of a type that a model cannot return is cast, and its constant renamed.
    constants = {name.partition("__")[0]: constant for name, constant in package.function("main").constants.items()}
    assert {type(constant.data) for constant in constants.values()} == {bytes, tuple}
    for number, value in enumerate(values):
        found = package.constant(constants[f"c{number}"])
        assert found.dtype == value.dtype
        assert np.array_equal(found, value)


@pytest.mark.parametrize("dtype", sorted(BITS))
def test_elements_of_less_than_a_byte(dtype: str, tmp_path: Path) -> None:
    """Written by coremltools' own storage library."""
    from coremltools.libmilstoragepython import _BlobStorageWriter
    from coremltools.optimize import _utils

    bits = BITS[dtype]
    low, high = (-(1 << (bits - 1)), 1 << (bits - 1)) if dtype == "int4" else (0, 1 << bits)
    values = np.random.default_rng(1).integers(low, high, 37).astype(NUMPY[dtype])
    packed = _utils.pack_elements_into_bits(values, bits)
    assert np.array_equal(unpack(packed, dtype, len(values)), values)
    writer = _BlobStorageWriter(str(tmp_path / "weight.bin"))
    types = ct.converters.mil.mil.types
    data = values.astype(types.nptype_from_builtin(getattr(types, dtype)))
    offset = getattr(writer, f"write_{dtype}_data")(data)
    del writer
    read = WeightBlob(tmp_path / "weight.bin").read(offset, dtype, (37,))
    assert read.dtype == NUMPY[dtype]
    assert np.array_equal(read, values)
    with WeightBlobWriter(tmp_path / "ours.bin") as ours:
        assert ours.write(values, dtype) == offset
    assert (tmp_path / "ours.bin").read_bytes().rstrip(b"\0") == (tmp_path / "weight.bin").read_bytes().rstrip(b"\0")


def test_our_weight_files_are_those_of_coremltools(tmp_path: Path) -> None:
    """Byte for byte, of several arrays."""
    from coremltools.libmilstoragepython import _BlobStorageReader, _BlobStorageWriter

    arrays = {"fp32": np.arange(5, dtype=np.float32), "int8": np.arange(-3, 40, dtype=np.int8), "int32": np.arange(7, dtype=np.int32)}
    writers = {"fp32": "write_float_data", "int8": "write_int8_data", "int32": "write_int32_data"}
    theirs = _BlobStorageWriter(str(tmp_path / "theirs.bin"))
    expected = [getattr(theirs, writers[dtype])(array) for dtype, array in arrays.items()]
    del theirs
    with WeightBlobWriter(tmp_path / "ours.bin") as ours:
        offsets = [ours.write(array, dtype) for dtype, array in arrays.items()]
    assert offsets == expected
    assert (tmp_path / "ours.bin").read_bytes().rstrip(b"\0") == (tmp_path / "theirs.bin").read_bytes().rstrip(b"\0")
    assert np.array_equal(_BlobStorageReader(str(tmp_path / "ours.bin")).read_int8_data(offsets[1]), arrays["int8"])
    with pytest.raises(ValueError, match="float64 given for fp32"), WeightBlobWriter(tmp_path / "wrong.bin") as wrong:
        wrong.write(np.zeros(3), "fp32")


# --- compressed weights ----------------------------------------------------------------------------------------------------------------


def compressed(model: Any, how: str) -> Any:
    """A model whose weights of 2,048 elements or more are compressed by coremltools."""
    cto = ct.optimize.coreml
    linear, palette = cto.OpLinearQuantizerConfig, cto.OpPalettizerConfig
    configs = {
        "int8": linear(mode="linear_symmetric", dtype="int8"),
        "uint8": linear(mode="linear", dtype="uint8"),
        "int4": linear(mode="linear_symmetric", dtype="int4", granularity="per_block", block_size=8),
        "uint4": linear(mode="linear", dtype="uint4", granularity="per_block", block_size=16),
        "palette4": palette(mode="uniform", nbits=4, granularity="per_grouped_channel", group_size=8),
        "palette6": palette(mode="uniform", nbits=6, granularity="per_grouped_channel", group_size=16),
        "palette1": palette(mode="uniform", nbits=1),
        "palette8": palette(mode="uniform", nbits=8),
    }
    config = cto.OptimizationConfig(global_config=configs[how])
    with quiet():
        return (cto.linear_quantize_weights if "int" in how else cto.palettize_weights)(model, config)


MATRIX = np.random.default_rng(2).normal(0, 1, (48, 64)).astype(np.float32)


def save_product(path: Path, target: Any) -> Path:
    def body(x: Any) -> Any:
        return mb.linear(x=x, weight=MATRIX, name="product")

    return save_program(path, body, ((3, 64), np.float32), target=target)


OF_IOS16 = ("int8", "uint8", "palette1", "palette8")  # blocks and grouped channels came with iOS 18
OF_IOS18 = ("int8", "uint8", "int4", "uint4", "palette1", "palette4", "palette6", "palette8")


@pytest.mark.parametrize(("target", "how"), [("iOS16", how) for how in OF_IOS16] + [("iOS18", how) for how in OF_IOS18])
def test_compressed_weights(target: str, how: str, tmp_path: Path) -> None:
    path = save_product(tmp_path / "dense.mlpackage", ct.target[target])
    model = compressed(ct.models.MLModel(str(path), skip_model_load=True), how)
    model.save(str(tmp_path / "small.mlpackage"))
    (operation,) = [op for op in model._mil_program.functions["main"].operations if op.op_type.startswith("constexpr_")]
    expected = operation.materialized_val_inference()
    evaluator = MilModel(tmp_path / "small.mlpackage")
    (weight,) = [step.fixed["weight"] for step in evaluator._steps if "weight" in step.fixed]
    assert np.array_equal(weight, expected)
    assert not np.array_equal(weight, MATRIX)
    assert np.abs(weight - MATRIX).max() < (4 if how == "palette1" else 0.6)
    x = np.random.default_rng(4).normal(0, 1, (3, 64)).astype(np.float32)
    assert np.allclose(evaluator.predict({"x": x})["product"], x @ expected.T, atol=1e-4)


def test_tables_of_vectors_and_joint_compressions(tmp_path: Path) -> None:
    """A palette of pairs; a palette whose entries are integers with scales of their own."""
    random = np.random.default_rng(6)
    types = ct.converters.mil.mil.types
    indices = random.integers(0, 4, (8, 6)).astype(types.np_uint2_dtype)
    pairs = random.normal(0, 1, (2, 1, 4, 2)).astype(np.float16)
    table = random.integers(-100, 100, (2, 1, 4, 1)).astype(np.int8)
    scale = random.normal(0, 1, (2, 1, 1, 1)).astype(np.float16)

    def body(x: Any) -> Any:
        vectors = mb.constexpr_lut_to_dense(indices=indices, lut=pairs, vector_axis=np.int32(0), name="vectors")
        entries = mb.constexpr_blockwise_shift_scale(data=table, scale=scale, name="entries")
        joint = mb.constexpr_lut_to_dense(indices=indices, lut=entries, name="joint")
        return mb.matmul(x=x, y=vectors, transpose_y=True, name="one"), mb.matmul(x=x, y=joint, transpose_y=True, name="other")

    evaluator = MilModel(save_program(tmp_path / "p.mlpackage", body, ((3, 6), np.float16)))
    weights = [step.fixed["y"] for step in evaluator._steps if "y" in step.fixed]
    whole = np.array([[pairs[row // 4, 0, int(i), part] for i in indices[row]] for row in range(8) for part in range(2)])
    entries = table * scale
    single = np.array([[entries[row // 4, 0, int(i), 0] for i in indices[row]] for row in range(8)])
    assert np.array_equal(weights[0], whole)
    assert np.array_equal(weights[1], single)


def test_an_unknown_compression_is_named(tmp_path: Path) -> None:
    def body(x: Any) -> Any:
        mask = np.array([1, 0, 1, 1], dtype=ct.converters.mil.mil.types.np_uint1_dtype)
        weight = mb.constexpr_sparse_to_dense(nonzero_data=np.array([1, 2, 3], dtype=np.float16), mask=mask, name="sparse")
        return mb.mul(x=x, y=weight, name="product")

    path = save_program(tmp_path / "p.mlpackage", body, ((4,), np.float16))
    with pytest.raises(UserError, match="compressed by constexpr_sparse_to_dense, which is unknown"):
        MilModel(path)


# --- what is wrong ---------------------------------------------------------------------------------------------------------------------


def test_an_unknown_operator_is_named(tmp_path: Path) -> None:
    path = save_program(tmp_path / "p.mlpackage", lambda x: mb.tan(x=mb.sinh(x=x, name="first"), name="second"), ((2,), np.float32))
    with pytest.raises(UserError, match=r"function main: operator sinh \(output first\) is unknown here, and 1 more"):
        MilModel(path)


def test_a_loop_is_named(tmp_path: Path) -> None:
    def body(x: Any) -> Any:
        return mb.while_loop(
            _cond=lambda i: mb.less(x=mb.reduce_sum(x=i), y=np.float32(9)), _body=lambda i: mb.add(x=i, y=i), loop_vars=(x,)
        )

    path = save_program(tmp_path / "p.mlpackage", body, ((2,), np.float32))
    with pytest.raises(UserError, match="operator while_loop"):
        MilModel(path)


def test_an_operator_with_values_it_cannot_take(tmp_path: Path) -> None:
    def body(x: Any, at: Any) -> Any:
        return mb.gather(x=x, indices=at, axis=0, name="row")

    path = save_program(tmp_path / "p.mlpackage", body, ((2, 3), np.float32), ((1,), np.int32))
    model = MilModel(path)
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert model.predict({"x": x, "at": np.array([1], dtype=np.int32)})["row"].tolist() == [[3, 4, 5]]
    with pytest.raises(UserError, match=r"p.mlpackage: function main: operator gather \(output row\): index 2 is outside 0..1"):
        model.predict({"x": x, "at": np.array([2], dtype=np.int32)})


def test_a_failed_call_leaves_the_state(decoders: Path) -> None:
    model = MilModel(decoders)
    state = model.make_state()
    kept = dict(state.arrays)
    with pytest.raises(UserError, match="slice_update"):
        model.predict(decoder_inputs([1, 2, 3, 4], 22), state)  # the cache has 24 rows
    assert all(state.arrays[name] is array for name, array in kept.items())


def test_wrong_inputs_are_all_named_at_once(decoders: Path) -> None:
    model = MilModel(decoders)
    inputs: dict[str, np.ndarray] = decoder_inputs([1, 2, 3, 4], 0)
    state = MilState({"keyCache": np.zeros((1, 2), dtype=np.float16)})
    with pytest.raises(UserError) as caught:
        model.predict({"ids": inputs["ids"].astype(np.int64), "start": inputs["start"][0], "more": inputs["mask"]}, state)
    message = str(caught.value)
    for part in (
        "function rows_4",
        "input 'mask' is missing (fp16 [1, 1, 4, 24] expected)",
        "input 'more' is unknown (the function takes ids, mask, start)",
        "input 'ids' is int64 [1, 4], int32 [1, 4] expected",
        "input 'start' is int32 [], int32 [1] expected",
        "state 'keyCache' is float16 [1, 2], fp16 [2, 2, 24, 8] expected",
        "state 'valueCache' is missing",
    ):
        assert part in message
    with pytest.raises(UserError, match=r"no state given \(make_state\(\) makes keyCache, valueCache\)"):
        model.predict(inputs)


def test_an_unknown_function_is_named(decoders: Path) -> None:
    with pytest.raises(UserError, match="has no function 'rows_2'; it has rows_4, rows_1"):
        MilModel(decoders, "rows_2")


def broken(name: str, package: Path) -> Path:
    """A package with one thing wrong."""
    weights, spec, manifest = package / WEIGHTS, package / SPEC, package / "Manifest.json"
    content = json.loads(manifest.read_text())
    root = content["itemInfoEntries"][content["rootModelIdentifier"]]
    match name:
        case "no such package":
            return package / "missing"
        case "a file":
            return spec
        case "no manifest":
            manifest.unlink()
        case "manifest of something else":
            manifest.write_text("[]")
        case "manifest leaves the package":
            root["path"] = "../../secret"
            manifest.write_text(json.dumps(content))
        case "no model file":
            spec.unlink()
        case "model cut short":
            spec.write_bytes(spec.read_bytes()[:2000])
        case "model is text":
            spec.write_text("hello")
        case "model is empty":
            spec.write_bytes(b"")
        case "no weights":
            weights.unlink()
        case "weights cut short":
            weights.write_bytes(weights.read_bytes()[:-64])
        case "weights cut at a record":
            weights.write_bytes(weights.read_bytes()[:100])
        case "weights are empty":
            weights.write_bytes(b"")
        case "weights are text":
            weights.write_bytes(b"x" * 8000)
        case "weights of another model":
            weights.write_bytes(weights.read_bytes()[:64] + bytes(64) + weights.read_bytes()[64:-64])
        case "weights of another type":
            body = bytearray(weights.read_bytes())
            body[68] = 2
            weights.write_bytes(body)
    return package


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no such package", "no such Core ML package"),
        ("a file", "is not a Core ML package: it has no Manifest.json"),
        ("no manifest", "is not a Core ML package: it has no Manifest.json"),
        ("manifest of something else", "is not the manifest of a Core ML package"),
        ("manifest leaves the package", "'../../secret', which is not inside the package"),
        ("no model file", "its model file Data/com.apple.CoreML/model.mlmodel is missing"),
        ("model cut short", "is not a Core ML model, or is damaged"),
        ("model is text", "is not a Core ML model, or is damaged"),
        ("model is empty", "is not a Core ML model, or is damaged"),
        ("no weights", "the package's weights are missing"),
        ("weights cut short", "cut short"),
        ("weights cut at a record", "lies behind the end of the file"),
        ("weights are empty", "not a Core ML weight file of version 2, or is cut short"),
        ("weights are text", "not a Core ML weight file of version 2"),
        ("weights of another model", "is damaged: no record is there"),
        ("weights of another type", "holds fp32 where the program expects fp16"),
    ],
)
def test_broken_packages_are_one_clear_line(name: str, message: str, copied: Path) -> None:
    with pytest.raises(UserError) as caught:
        MilModel(broken(name, copied))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_another_kind_of_model(tmp_path: Path, copied: Path) -> None:
    spec = ct.proto.Model_pb2.Model()
    spec.specificationVersion = 4
    spec.neuralNetwork.SetInParent()
    (copied / SPEC).write_bytes(spec.SerializeToString())
    with pytest.raises(UserError, match="is not an ML Program"):
        MilModel(copied)


@pytest.mark.parametrize("seed", range(12))
def test_damaged_bytes_never_show_a_traceback(seed: int, copied: Path) -> None:
    """Either the damage does not matter, or it is one clear error."""
    random = np.random.default_rng(seed)
    for file in (copied / SPEC, copied / WEIGHTS):
        body = bytearray(file.read_bytes())
        for place in random.integers(0, len(body), 20):
            body[place] = random.integers(0, 256)
        file.write_bytes(body)
    message = ""
    try:
        model = MilModel(copied)
        model.predict(decoder_inputs([1, 2, 3, 4], 0), model.make_state())
    except UserError as error:
        message = str(error)
    assert not message or str(copied) in message


def test_a_changed_file_is_read_again(copied: Path) -> None:
    model = MilModel(copied)
    assert open_package(copied) is model._package
    manifest = copied / "Manifest.json"
    shutil.copy(manifest, manifest.with_suffix(".bak"))
    assert open_package(copied) is model._package
    (copied / SPEC).touch()
    assert open_package(copied) is not model._package


# --- coremltools -------------------------------------------------------------------------------------------------------------------------


def test_missing_coremltools_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'specstream-toolchain\[coreml\]'"):
        coreml_import.import_coremltools()


def test_the_evaluator_does_not_need_coremltools() -> None:
    import subprocess
    import sys

    program = f"import sys, {mil_evaluator.__name__}; print(sorted({{'coremltools', 'torch', 'google.protobuf'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_types_in_weight_files_have_numbers_and_arrays() -> None:
    assert set(NUMBERS) <= set(NUMPY)
    assert set(BITS) <= set(NUMBERS)
