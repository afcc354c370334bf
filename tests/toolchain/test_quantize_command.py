"""quantize as a user meets it: a tiny bundle to one that loads and says what was lost, limits that fail, and bad input."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from specstream.models.errors import CheckFailed
from specstream.runtimes import Bundle, load
from specstream.runtimes.bundle import BundleWriter
from specstream.toolchain import quantize_pipeline
from specstream.toolchain.cli import run
from specstream.toolchain.prompt_rows import read_prompt_rows
from specstream.toolchain.quantize_pipeline import Limits

from ..runtimes.tiny_bundle import write_bundle

PROMPTS = '{"prompt": "the cat", "completion": "sat"}\n\n{"prompt": "on the mat"}\n'


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_bundle(tmp_path / "fp32")
    (tmp_path / "prompts.jsonl").write_text(PROMPTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(quantize_pipeline, "MAX_NEW_TOKENS", 8)
    return tmp_path / "fp32"


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_w8a8_is_compared_and_recorded(bundle: Path, capfd: pytest.CaptureFixture[str]) -> None:
    asked = ["--scheme", "w8a8", "--block-size", "16", "--calibration", "prompts.jsonl", "--threads", "1", "--json", "r.json"]
    assert run(["quantize", "fp32", "out", *asked]) == 0
    said = capfd.readouterr()
    assert "w8a8 beside fp32" in said.out
    assert "rows independent" in said.out
    assert said.err == ""
    data = json.loads(Path("r.json").read_text())
    assert {"seconds", "peak_rss_bytes", "weight_bytes", "bundle_bytes", "bundle_share", "products", "quality", "schema"} <= set(data)
    made = Bundle.load("out").manifest
    info = made.quantization
    assert (info.scheme, info.block_size, info.rows_independent) == ("w8a8", 16, True)
    assert info.products == data["products"]
    assert info.products is not None
    assert info.products["MatMulIntegerToFloat"] > 0
    assert info.requires is not None
    assert info.quality is not None
    assert info.quality["rows_independent"] is True
    figures = ("kl", "top1_agreement", "perplexity", "flip_rate", "flip_rate_plain", "tokens_per_call", "exact_match", "reference")
    assert set(figures) <= set(info.quality)
    assert 0 <= info.quality["kl"] < 0.1
    assert made.verified is None
    assert listing(bundle.parent) == ["fp32", "out", "prompts.jsonl", "r.json"]
    assert len(load("out", threads=1).generate("the", 4).token_ids) == 4


def test_int4_needs_no_prompts(bundle: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["quantize", "fp32", "out", "--scheme", "int4", "--block-size", "16", "--accuracy-level", "0"]) == 0
    assert "MatMulNBits" in capfd.readouterr().out
    info = Bundle.load("out").manifest.quantization
    assert (info.scheme, info.accuracy_level, info.quality, info.requires) == ("int4", 0, None, None)
    # Once more: OUT exists; and what is quantized is not quantized again.
    assert run(["quantize", "fp32", "out", "--scheme", "int4"]) == 2
    assert "--force" in capfd.readouterr().err
    assert run(["quantize", "out", "twice", "--scheme", "int8"]) == 2
    assert "out: is quantized already (int4)" in capfd.readouterr().err
    assert run(["quantize", "fp32", "out", "--scheme", "int8", "--block-size", "16", "--force"]) == 0
    assert Bundle.load("out").manifest.quantization.scheme == "int8"


def test_int4_makes_up_for_errors_with_prompts(bundle: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The default block size is one that divides; the prompts show in the weights and leave nothing else behind."""
    assert run(["quantize", "fp32", "plain", "--scheme", "int4"]) == 0
    Path("others.jsonl").write_text('{"prompt": "a cat on a mat", "completion": "sat"}')
    asked = ["--scheme", "int4", "--calibration", "prompts.jsonl", "--threads", "1", "--json", "r.json"]
    assert run(["quantize", "fp32", "out", *asked]) == 0
    assert "16 tokens of calibration's prompts" in capfd.readouterr().out
    assert run(["quantize", "fp32", "other", *asked, "--held-out", "others.jsonl"]) == 0
    assert "8 tokens of held-out prompts" in capfd.readouterr().out
    infos = [Bundle.load(name).manifest.quantization for name in ("out", "other")]
    assert [info.block_size for info in infos] == [32, 32]
    assert [info.quality and (info.quality["held_out"], info.quality["tokens"]) for info in infos] == [(False, 16), (True, 8)]
    assert json.loads(Path("r.json").read_text())["held_out"] == "others.jsonl"
    assert Path("out/model.onnx.data").read_bytes() == Path("other/model.onnx.data").read_bytes()
    assert listing(bundle.parent / "out") == listing(bundle.parent / "plain")
    weights = [Path(folder, "model.onnx.data").read_bytes() for folder in ("plain", "out")]
    assert len(weights[0]) == len(weights[1])
    assert weights[0] != weights[1]


def test_a_missed_limit_fails_and_writes_nothing(bundle: Path, capfd: pytest.CaptureFixture[str]) -> None:
    asked = ["--scheme", "int4", "--block-size", "16", "--calibration", "prompts.jsonl", "--max-kl", "1e-9", "--threads", "1"]
    assert run(["quantize", "fp32", "out", *asked]) == 1
    err = capfd.readouterr().err
    assert "failed: int4: KL from fp32 is" in err
    assert err.count("\n") == 1
    assert listing(bundle.parent) == ["fp32", "prompts.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scheme", "int5"], "scheme 'int5' is unknown; one of int4, int8, w8a8, mixed expected"),
        (["--scheme", "int4", "--block-size", "24"], "block size 24 is not one of"),
        (["--scheme", "int4", "--block-size", "64"], "block size 64 does not divide the 32 inputs of"),
        (["--scheme", "int4", "--accuracy-level", "3"], "accuracy level 3 is not one of"),
        (["--scheme", "w8a8"], "scheme w8a8 needs --calibration FILE"),
        (["--scheme", "int4", "--cache", "int8"], "--cache int8 needs --calibration FILE"),
        (["--scheme", "int4", "--max-kl", "0.1"], "a limit needs --held-out or --calibration FILE"),
        (["--scheme", "int4", "--held-out", "nowhere.jsonl"], "--held-out nowhere.jsonl: No such file"),
        (["--scheme", "w8a8", "--calibration", "prompts.jsonl", "--held-out", "prompts.jsonl"], "the file of --calibration; give other"),
        (["--scheme", "w8a8", "--calibration", "nowhere.jsonl"], "--calibration nowhere.jsonl: No such file"),
        (["--scheme", "w8a8", "--calibration", "empty.jsonl"], "empty.jsonl: no prompts"),
        (["--scheme", "w8a8", "--calibration", "other.jsonl"], 'other.jsonl, line 2: an object with a text "prompt" was expected'),
        (["--scheme", "w8a8", "--calibration", "table.csv"], "table.csv, line 1: not JSON"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str, bundle: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Path("empty.jsonl").write_text("\n")
    Path("other.jsonl").write_text('{"prompt": "x"}\n{"text": "y"}\n')
    Path("table.csv").write_text("prompt,completion\n")
    before = listing(bundle.parent)
    assert run(["quantize", "fp32", "out", *arguments]) == 2
    err = capfd.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert listing(bundle.parent) == before


def test_a_portable_bundle_is_refused(bundle: Path, capfd: pytest.CaptureFixture[str]) -> None:
    old = Bundle.load(bundle)
    with BundleWriter("portable") as writer:
        for entry in old.manifest.files:
            writer.path(entry.path).write_bytes(old.path(entry.path).read_bytes())
        writer.finish(dataclasses.replace(old.manifest, contract=dataclasses.replace(old.manifest.contract, profile="portable")))
    assert run(["quantize", "portable", "out", "--scheme", "int4"]) == 2
    assert "export the model with --profile ort" in capfd.readouterr().err


def test_a_child_that_dies_is_a_failed_check(bundle: Path) -> None:
    with pytest.raises(CheckFailed, match="quantize_quality ended with code 1"):
        quantize_pipeline.run_module("specstream.toolchain.quantize_quality", "reference", "fp32", "nowhere")


def test_limits() -> None:
    quality = {"kl": 0.02, "flip_rate": 0.01}
    assert Limits().missed(quality) == Limits(0.02, 0.01).missed(quality) == []
    assert len(Limits(0.01, 0.001).missed(quality)) == 2
    assert Limits(0.01).missed({"kl": float("nan"), "flip_rate": 0.0})  # no number is not a good number
    assert "unknown" in Limits(max_flips=0.1).missed({"kl": 0.0, "flip_rate": None})[0]


def test_calibration_takes_the_first_rows(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(PROMPTS)
    assert read_prompt_rows(file, 9).completions == ("sat", None)
    assert read_prompt_rows(file, 1).prompts == ("the cat",)
    file.write_text('{"prompt": "a", "completion": ""}\n{"prompt": "b", "completion": " "}\n')
    assert read_prompt_rows(file, 9).completions == (None, None)
