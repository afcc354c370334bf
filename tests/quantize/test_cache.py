"""An 8-bit cache: its scales, what the operator writes with them, rows that stay independent, sessions and bundles that hold one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from specstream.export import contract
from specstream.export.trace import GRAPH_FILE, STREAMS_FILE
from specstream.models.errors import UserError
from specstream.quantize.cache import LARGEST, round_cache
from specstream.quantize.calibrate import collect_cache, main
from specstream.runtimes import Bundle, load
from specstream.runtimes.bundle import BundleWriter
from specstream.runtimes.ort_session import OrtSession
from specstream.runtimes.session import NEAR_TIE, prefill, tree_rows
from specstream.runtimes.tree import TokenTree, chain
from specstream.runtimes.verify import compare_rows as compare_with_decoys
from specstream.toolchain.cli import run
from specstream.toolchain.quantize_quality import compare_rows

from ..tiny_packages import write_onnx_bundle

PROMPT = [5, 9, 11, 3, 60, 7, 8, 30]
TEXTS = [(PROMPT, [2, 44, 19, 6, 71, 12]), ([1, 80, 33], [4, 5, 90, 17, 21])]


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """fp32, with delayed streams."""
    folder = tmp_path_factory.mktemp("exact") / "bundle"
    write_onnx_bundle(folder)
    return Bundle.load(folder)


@pytest.fixture(scope="module")
def largest(exact: Bundle) -> np.ndarray:
    return collect_cache(exact.folder, TEXTS)


def rounded(exact: Bundle, largest: np.ndarray, out: Path) -> Bundle:
    """The same weights, fp32, with an 8-bit cache: nothing else is rounded."""
    with BundleWriter(out) as writer:
        for entry in exact.manifest.files:
            writer.path(entry.path).write_bytes(exact.path(entry.path).read_bytes())
        for name in (GRAPH_FILE, STREAMS_FILE):
            model = ir.load(writer.path(name))
            assert round_cache(model, largest) > 0
            ir.save(model, writer.path(name))
        held = dataclasses.replace(exact.manifest.contract, cache_dtype="int8")
        return writer.finish(dataclasses.replace(exact.manifest, contract=held))


@pytest.fixture(scope="module")
def small(exact: Bundle, largest: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return rounded(exact, largest, tmp_path_factory.mktemp("small") / "bundle")


def test_scales_come_from_all_rows_and_their_streams(exact: Bundle, largest: np.ndarray, tmp_path: Path) -> None:
    model = exact.manifest.model
    assert largest.shape == (model.num_layers, 2, model.num_kv_heads, model.head_dim)
    assert (largest > 0).all()
    session = OrtSession(exact, threads=1, capacity=64)
    seen = np.zeros_like(largest)
    for prompt, continuation in TEXTS:
        session.rewind(0)
        prefill(session, [*prompt, *continuation])
        seen = np.maximum(seen, np.abs(session.cache[:, :, 0, :, : session.length]).max(axis=3))
    assert streams_alone_raise_the_top_layers(largest, seen, exact)
    (tmp_path / "texts.json").write_text(json.dumps([{"prompt": p, "continuation": c} for p, c in TEXTS]))
    assert main([str(exact.folder), str(tmp_path / "texts.json"), str(tmp_path / "cache.npy"), "--cache"]) == 0
    np.testing.assert_array_equal(np.load(tmp_path / "cache.npy"), largest)


def streams_alone_raise_the_top_layers(largest: np.ndarray, seen: np.ndarray, bundle: Bundle) -> bool:
    """Layers below the streams have main rows only; above, streams' rows may be larger, and somewhere are."""
    assert bundle.manifest.streams is not None
    below = bundle.manifest.model.num_layers - bundle.manifest.streams.stream_layers
    np.testing.assert_allclose(largest[:below], seen[:below], rtol=1e-5)
    assert (largest >= seen * (1 - 1e-5)).all()
    return bool((largest[below:] > seen[below:] * 1.001).any())


def test_what_is_written_is_rounded_by_channel(exact: Bundle, small: Bundle, largest: np.ndarray) -> None:
    sessions = [OrtSession(bundle, threads=1, capacity=64) for bundle in (exact, small)]
    logits = [prefill(session, PROMPT, logits=True).logits for session in sessions]
    assert logits[0] is not None
    assert logits[1] is not None
    assert sessions[1].cache.dtype == np.int8
    assert sessions[1].cache.nbytes * 4 == sessions[0].cache.nbytes
    # Of the first layer: later ones have rounded layers below them.
    scales = largest[0][:, None, :, None] / LARGEST
    expected = np.clip(np.rint(sessions[0].cache[0, ..., : len(PROMPT), :] / scales), -128, 127)
    found = sessions[1].cache[0, ..., : len(PROMPT), :].astype(np.float32)
    assert np.abs(found - expected).max() <= 1  # halves may go either way
    assert (found == expected).mean() > 0.99
    assert 0 < np.abs(logits[1] - logits[0]).max() < 0.05 * np.ptp(logits[0])


def test_what_is_too_large_is_cut_off(exact: Bundle, largest: np.ndarray, tmp_path: Path) -> None:
    session = OrtSession(rounded(exact, largest / 4, tmp_path / "narrow"), threads=1, capacity=64)
    prefill(session, PROMPT)
    whole = OrtSession(exact, threads=1, capacity=64)
    prefill(whole, PROMPT)
    found, values = (s.cache[0, ..., : len(PROMPT), :] for s in (session, whole))
    beyond = np.abs(values) > (largest[0] / 4)[:, None, :, None] * 1.02
    assert beyond.any()
    assert set(np.unique(found[beyond])) <= {-128, -127, 127}
    assert (np.sign(found[beyond]) == np.sign(values[beyond])).all()


def test_rows_are_independent_and_a_tree_is_its_chain(small: Bundle) -> None:
    session = OrtSession(small, threads=1)
    found = compare_rows(session, TEXTS)
    assert found["rows_independent"]
    assert compare_with_decoys(session, PROMPT, [2, 44, 19])[0] < NEAR_TIE
    # Rows that are not beside each other are committed: the cache is then that of the chain.
    tree = TokenTree(np.array([2, 40, 44, 41, 19]), np.array([-1, 0, 0, 2, 2], dtype=np.int32), np.zeros(5, dtype=np.float32))
    session.rewind(0)
    prefill(session, PROMPT)
    session.run(tree_rows(tree, session.length))
    session.commit([0, 2, 4])
    of_tree = session.cache[..., : session.length, :].copy()
    session.rewind(len(PROMPT))
    session.run(tree_rows(chain(2, [44, 19]), session.length))
    session.commit([0, 1, 2])
    assert np.abs(session.cache[..., : session.length, :].astype(int) - of_tree).max() <= 1


def test_speculation_is_plain_decoding(small: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and activations are fp32 here; the cache grows meanwhile."""
    monkeypatch.setattr("specstream.runtimes.ort_session.FIRST_ALLOCATION", 16)
    lm = load(small.folder, threads=1)
    for prompt in ([5, 9, 11], PROMPT, [80, 33, 1, 1, 2]):
        plain = lm.generate(prompt, 24, "none")
        assert lm.generate(prompt, 24, "streams", budget=8).token_ids == plain.token_ids


def test_a_manifest_and_graphs_that_do_not_agree(exact: Bundle, small: Bundle) -> None:
    other = dataclasses.replace(small.manifest, contract=exact.manifest.contract)
    with pytest.raises(UserError, match=r"input past_key_values.0.key is tensor\(int8\) \(tensor\(float\) expected\)"):
        OrtSession(Bundle(small.folder, other))
    other = dataclasses.replace(exact.manifest, contract=dataclasses.replace(exact.manifest.contract, cache_dtype="int4"))
    with pytest.raises(UserError, match="a int4 cache; this specstream runs float32 and int8"):
        OrtSession(Bundle(exact.folder, other))


@pytest.mark.parametrize("scheme", ["int4", "w8a8"])
def test_quantize_makes_bundles_with_one(
    scheme: str, exact: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("specstream.toolchain.quantize_pipeline.MAX_NEW_TOKENS", 8)
    Path("prompts.jsonl").write_text('{"prompt": "the cat"}\n{"prompt": "on the mat"}\n')
    asked = ["quantize", str(exact.folder), "out", "--scheme", scheme, "--block-size", "16", "--cache", "int8", "--threads", "1"]
    assert run(asked) == 2
    assert "needs --calibration FILE" in capfd.readouterr().err
    assert run([*asked, "--calibration", "prompts.jsonl", "--json", "r.json"]) == 0
    assert json.loads(Path("r.json").read_text())["cache_dtype"] == "int8"
    made = Bundle.load("out")
    assert made.manifest.contract.cache_dtype == "int8"
    quality = made.manifest.quantization.quality
    assert quality is not None
    assert quality["rows_independent"]
    for name in (GRAPH_FILE, STREAMS_FILE):
        types = {v.type.tensor_type.elem_type for v in onnx.load(made.path(name)).graph.input if v.name.startswith("past_key_values.")}
        assert types == {onnx.TensorProto.INT8}
    capfd.readouterr()
    assert run(["info", "out"]) == 0
    assert "int8 cache" in capfd.readouterr().out


def test_layers_are_found_by_their_cache(exact: Bundle, largest: np.ndarray) -> None:
    """The streams' graph starts in the middle of the network and takes the scales of those layers."""
    model = ir.load(exact.folder / STREAMS_FILE)
    round_cache(model, largest)
    first = largest.shape[0] - attention_nodes(model)
    assert first > 0
    scale = model.graph.initializers[f"cache.{first}.key.scale"].const_value
    assert scale is not None
    np.testing.assert_allclose(scale.numpy()[0, :, 0] * LARGEST, largest[first, 0], rtol=1e-6)
    assert contract.past_key(first) in {value.name for value in model.graph.inputs}


def attention_nodes(model: ir.Model) -> int:
    return sum(node.op_type == "GroupQueryAttention" for node in model.graph)
