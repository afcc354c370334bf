"""quantize on Core ML bundles as a user meets it: one that loads and says what was lost, limits that fail, and bad input."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from specstream.quantize import coreml_schemes
from specstream.quantize.coreml_moments import read_moments
from specstream.runtimes import Bundle, load
from specstream.runtimes.mil_evaluator import MilModel
from specstream.runtimes.mil_program import Constant, open_package
from specstream.toolchain import quantize_pipeline
from specstream.toolchain.cli import run
from specstream.toolchain.coreml_calibrate import collect_moments
from specstream.toolchain.export_pipeline import PACKAGE, export_bundle

from ..export.test_export_pipeline import base_folder  # noqa: F401 - a fixture
from ..export.tiny import tiny_base
from ..runtimes.tiny_bundle import write_bundle

PROMPTS = '{"prompt": "hello", "completion": "there"}\n\n{"prompt": "which of them"}\n'
SIZES = ("--block-size", "16", "--group-size", "16", "--head", "int8")  # a vocabulary of 97 has no groups


@pytest.fixture(scope="module")
def exported(base_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    out = tmp_path_factory.mktemp("out") / "fp16"
    export_bundle(str(base_folder), out, format="coreml", capacity=120, functions=("decode_1", "tree_8"))
    return out


@pytest.fixture
def bundle(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(exported, tmp_path / "fp16")
    (tmp_path / "prompts.jsonl").write_text(PROMPTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(quantize_pipeline, "MAX_NEW_TOKENS", 12)  # more than the rows of a tree
    monkeypatch.setattr(coreml_schemes, "LEAST_ELEMENTS", 256)
    return tmp_path / "fp16"


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_bundle_is_compared_and_recorded(bundle: Path, capfd: pytest.CaptureFixture[str]) -> None:
    asked = ["--scheme", "palette4", *SIZES, "--calibration", "prompts.jsonl", "--json", "r.json"]
    assert run(["quantize", "fp16", "out", *asked]) == 0
    said = capfd.readouterr()
    assert "palette4 beside fp16" in said.out
    assert "KL from fp16" in said.out
    assert said.err == ""
    data = json.loads(Path("r.json").read_text())
    assert {"seconds", "peak_rss_bytes", "weight_bytes", "bundle_bytes", "bundle_share", "package_share", "products", "schema"} <= set(data)
    assert data["products"] == {"palette4": 14, "int8": 1, "fp16": 2}
    assert 0.2 < data["package_share"] < 1
    assert data["compensated"] is True
    made = Bundle.load("out").manifest
    info = made.quantization
    assert (info.scheme, info.head, info.block_size, info.group_size) == ("palette4", "int8", None, 16)
    assert (info.rows_independent, info.products, info.requires) == (True, data["products"], None)
    assert info.quality is not None
    figures = ("kl", "top1_agreement", "perplexity", "flip_rate", "flip_rate_plain", "tokens_per_call", "exact_match", "reference")
    assert set(figures) <= set(info.quality)
    assert 0 < info.quality["kl"] < 1
    assert info.quality["tokens"] == data["reference"]["tokens"]
    assert made.verified is None
    assert "coremltools" in made.tools
    assert listing(bundle.parent) == ["fp16", "out", "prompts.jsonl", "r.json"]
    assert listing(Path("out")) == listing(bundle)
    assert len(load("out").generate("hello", 4).token_ids) == 4


def test_moments_are_those_of_the_network(bundle: Path) -> None:
    """Of the first projection's and the head's inputs, against PyTorch; nothing of padding, which fills no whole call."""
    text = list(range(3, 3 + 8 * 4 + 5))
    moments = collect_moments(Bundle.load(bundle), [(text[:20], text[20:])])
    moments.save(Path("moments.npz"))
    read = read_moments(Path("moments.npz"))
    model = tiny_base("Llama").eval()
    seen: dict[str, np.ndarray] = {}
    products = {"query": model.model.layers[0].self_attn.q_proj, "down": model.model.layers[1].mlp.down_proj, "head": model.lm_head}
    for name, module in products.items():
        module.register_forward_hook(lambda _, given, __, name=name: seen.__setitem__(name, given[0][0].detach().numpy()))
    with torch.no_grad():
        model(torch.tensor([text[:32]]))
    package = open_package(bundle / PACKAGE)
    constants = [c for c in package.function("tree_8").constants.values() if isinstance(c, Constant) and not isinstance(c.data, bytes)]
    for name, module in products.items():
        weight = module.weight.detach().numpy().astype(np.float16)
        (offset,) = {c.data[1] for c in constants if c.type.shape == weight.shape and np.array_equal(package.constant(c), weight)}
        expected = seen[name].T @ seen[name] / 32
        assert np.abs(read[offset] - expected).max() < 0.02 * np.abs(expected).max()


def test_the_same_command_gives_the_same_package(bundle: Path) -> None:
    for name in ("one", "other"):
        assert run(["quantize", "fp16", name, "--scheme", "int4", *SIZES[:2]]) == 0
    files = [path.relative_to("one") for path in sorted(Path("one", PACKAGE).rglob("*")) if path.is_file()]
    assert len(files) == 3
    assert all(Path("one", file).read_bytes() == Path("other", file).read_bytes() for file in files)
    info = Bundle.load("one").manifest.quantization
    assert info.requires is not None
    assert "Neural Engine" in info.requires
    assert (info.head, info.block_size, info.group_size, info.quality) == ("int4", 16, None, None)
    assert "specstream.quantization" in MilModel(Path("one", PACKAGE)).metadata


def test_a_missed_limit_fails_and_writes_nothing(bundle: Path, capfd: pytest.CaptureFixture[str]) -> None:
    asked = ["--scheme", "int4", *SIZES[:2], "--calibration", "prompts.jsonl", "--max-kl", "1e-9"]
    assert run(["quantize", "fp16", "out", *asked]) == 1
    err = capfd.readouterr().err
    assert "int4: KL from fp16 is" in err
    assert "(at most 1e-09 allowed); nothing was written" in err
    assert listing(bundle.parent) == ["fp16", "prompts.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scheme", "w8a8"], "scheme 'w8a8' is unknown for Core ML"),
        (["--scheme", "int8", "--threads", "1"], "--threads: fp16 is a Core ML bundle; this is for ONNX only"),
        (["--scheme", "int4", "--accuracy-level", "4"], "--accuracy-level: fp16 is a Core ML bundle"),
        (["--scheme", "int4", "--cache", "int8"], "--cache: fp16 is a Core ML bundle; this is for ONNX only"),
        (["--scheme", "int4"], "block size 32 does not divide the 48 inputs"),
        (["--scheme", "palette4"], "group size 16 does not divide the 97 outputs"),
        (["--scheme", "int8", "--max-kl", "1"], "a limit needs --held-out or --calibration FILE"),
        (["--scheme", "int8", "--calibration", "missing.jsonl"], "missing.jsonl"),
        (["--scheme", "int8", "--held-out", "missing.jsonl"], "--held-out missing.jsonl"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    arguments: list[str], message: str, bundle: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["quantize", "fp16", "out", *arguments]) == 2
    err = capfd.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert listing(bundle.parent) == ["fp16", "prompts.jsonl"]


def test_a_package_of_single_rows(base_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """No trees: texts are run token by token, and no rows can be compared."""
    (tmp_path / "prompts.jsonl").write_text(PROMPTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(quantize_pipeline, "MAX_NEW_TOKENS", 4)
    export_bundle(str(base_folder), tmp_path / "fp16", format="coreml", capacity=64, functions=("decode_1",))
    assert run(["quantize", "fp16", "out", "--scheme", "int8", "--calibration", "prompts.jsonl"]) == 0
    quality = Bundle.load("out").manifest.quantization.quality
    assert quality is not None
    assert (quality["flip_rate"], quality["rows_compared"]) == (None, 0)
    assert quality["tokens_per_call"] == 1


def test_what_is_quantized_is_not_quantized_again(bundle: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["quantize", "fp16", "out", "--scheme", "int8"]) == 0
    assert run(["quantize", "out", "twice", "--scheme", "int4"]) == 2
    assert "out: is quantized already (int8); quantize the fp16 bundle it was made of" in capfd.readouterr().err


def test_a_tampered_weight_file_is_refused(bundle: Path, capfd: pytest.CaptureFixture[str]) -> None:
    weights = next((bundle / PACKAGE).rglob("weight.bin"))
    body = bytearray(weights.read_bytes())
    body[-1] ^= 1
    weights.write_bytes(body)
    assert run(["quantize", "fp16", "out", "--scheme", "int8"]) == 2
    assert "weight.bin" in capfd.readouterr().err
    assert listing(bundle.parent) == ["fp16", "prompts.jsonl"]


def test_options_of_core_ml_are_refused_for_onnx(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write_bundle(tmp_path / "fp32")
    monkeypatch.chdir(tmp_path)
    assert run(["quantize", "fp32", "out", "--scheme", "int8", "--head", "int4", "--group-size", "8"]) == 2
    assert "--head, --group-size: fp32 is an ONNX bundle; this is for Core ML only" in capfd.readouterr().err
