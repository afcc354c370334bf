"""From a folder of weights to a Core ML bundle that speaks: contents, commands, refusals that leave nothing."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specstream.export import coreml_module
from specstream.export.coreml_package import CONTRACT_KEY, TOKENIZER_KEY
from specstream.models.adapter import save_adapter, stream_tensors
from specstream.models.base import identity
from specstream.models.config import StreamConfig
from specstream.models.errors import CheckFailed, UserError
from specstream.models.stream_model import StreamModel
from specstream.runtimes.bundle import Bundle
from specstream.runtimes.coreml_session import CoreMLSession
from specstream.runtimes.language_model import load
from specstream.runtimes.manifest import Manifest
from specstream.runtimes.mil_evaluator import MilModel
from specstream.runtimes.ngrams import NGRAM_FILE, build_ngrams
from specstream.toolchain.cli import run
from specstream.toolchain.export_pipeline import PACKAGE, export_bundle

from ..coreml_tiny import SMALL
from .test_export_pipeline import base_folder  # noqa: F401 - a fixture
from .tiny import VOCAB, tiny_base


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random delayed streams and n-grams for that base."""
    base = tiny_base("Llama")
    config = StreamConfig(
        identity(base, "LlamaForCausalLM"), "lossless", num_streams=3, stream_layers=1, top_k=4, stream_rank=2, draft_vocab_size=40,
        placement="delayed", correction_rank=3, pair_rank=2, prune_rank=0,
    )  # fmt: skip
    torch.manual_seed(2)
    model = StreamModel(base, config)
    for parameter in model.stream_parameters().values():
        torch.nn.init.normal_(parameter, std=0.3)
    model.draft_vocab.copy_(torch.arange(0, 80, 2))
    folder = tmp_path_factory.mktemp("adapter")
    save_adapter(folder, config, stream_tensors(model))
    rng = np.random.default_rng(0)
    build_ngrams(rng.integers(0, VOCAB, (20, 12)), VOCAB, min_count=1).save(folder / NGRAM_FILE)
    return folder


@pytest.fixture(scope="module")
def made(base_folder: Path, adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], list[str]]:  # noqa: F811
    steps: list[str] = []
    out = tmp_path_factory.mktemp("out") / "bundle"
    report = export_bundle(str(base_folder), out, adapter, progress=steps.append, format="coreml", capacity=120, functions=SMALL)
    return out, report, steps


@pytest.fixture(scope="module")
def bundle(made: tuple[Path, dict[str, Any], list[str]]) -> Path:
    return made[0]


def test_bundle_and_report(made: tuple[Path, dict[str, Any], list[str]]) -> None:
    out, report, steps = made
    names = ["LICENSE", "chat_template.jinja", PACKAGE, NGRAM_FILE, "specstream.json", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(path.name for path in out.iterdir()) == sorted(names)
    assert [path.name for path in out.parent.iterdir()] == ["bundle"]
    manifest = Bundle.load(out).manifest
    assert (manifest.graph, manifest.quantization.scheme) == (PACKAGE, "fp16")
    assert (manifest.contract.profile, manifest.contract.cache_dtype) == ("coreml", "float16")
    assert manifest.contract.coreml is not None
    assert (manifest.contract.coreml.capacity, manifest.contract.coreml.slots) == (120, 192)
    assert manifest.streams is not None
    assert manifest.streams.graph is None
    assert manifest.parity is not None
    assert manifest.parity.near_tie is not None
    assert 0 < manifest.parity.max_abs_diff <= manifest.parity.near_tie / 2
    assert "coremltools" in manifest.tools
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert (report["format"], report["functions"]) == ("coreml", ["decode_1", "tree_8", "prefill_64", "draft"])
    assert report["weight_bytes"] < report["bundle_bytes"]
    assert steps[-3:] == ["converting draft", "comparing the package with PyTorch", "writing the bundle"]


def test_the_package_describes_itself(bundle: Path) -> None:
    metadata = MilModel(bundle / PACKAGE).metadata
    assert json.loads(metadata[CONTRACT_KEY])["capacity"] == 120
    assert json.loads(metadata["specstream.model"])["license"] == "apache-2.0"
    assert json.loads(metadata["specstream.streams"])["num_streams"] == 3
    assert json.loads(metadata["specstream.tokenizer"])["stop_ids"] == [2]
    assert TOKENIZER_KEY not in metadata  # a folder has no name on the hub


def test_drafts_leave_the_text_as_it_is(bundle: Path) -> None:
    """Rounding to 16 bits may decide between near-ties; with these weights and prompts there are none."""
    lm = load(bundle)
    assert isinstance(lm.session, CoreMLSession)
    assert lm.threads is None
    assert lm.ngrams is not None
    for prompt in ("hello", "a b a b a b"):
        plain = lm.generate(prompt, 24, "none")
        for draft in ("streams", "joined"):
            result = lm.generate(prompt, 24, draft, budget=16)
            assert result.token_ids == plain.token_ids
            assert result.drafted > 0
    with pytest.raises(UserError, match="the prompt has 121 tokens, the context holds 120"):
        lm.generate([5] * 121)


def test_it_says_what_the_onnx_bundle_says(bundle: Path, base_folder: Path, adapter: Path, tmp_path: Path) -> None:  # noqa: F811
    export_bundle(str(base_folder), tmp_path / "onnx", adapter)
    one, other = load(bundle), load(tmp_path / "onnx", profile=False)
    for prompt in ("hello", "?", "which of them"):
        assert one.generate(prompt, 16).token_ids == other.generate(prompt, 16).token_ids


def test_commands(bundle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "hello"}\n')
    assert run(["verify", str(bundle), "--prompts", str(prompts), "--max-new-tokens", "8", "--reference", "plain", "--no-record"]) == 0
    assert "differences 0" in capfd.readouterr().out
    assert run(["info", str(bundle)]) == 0
    assert "profile coreml" in capfd.readouterr().out
    assert run(["generate", str(bundle), "hello", "--max-new-tokens", "4", "--compute-units", "cpu-gpu"]) == 0
    capfd.readouterr()
    for command, message in (
        (["generate", str(bundle), "hello", "--threads", "2"], "a Core ML bundle, whose threads are the system's"),
        (["tune", str(bundle), "--prompts", str(prompts)], "a Core ML bundle; tune measures ONNX Runtime"),
    ):
        assert run(command) == 2
        err = capfd.readouterr().err
        assert message in err
        assert err.count("\n") == 1


def test_a_tampered_package_is_refused(bundle: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(bundle, copy)
    weights = copy / PACKAGE / "Data/com.apple.CoreML/weights/weight.bin"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(UserError, match=r"weight\.bin is not the file that was written"):
        load(copy)


def test_a_package_that_computes_something_else_is_not_written(
    base_folder: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(coreml_module.StateCache, "commit", lambda self, start, rows, width: None)  # the converted package moves nothing
    with pytest.raises(CheckFailed, match=r"does not compute what PyTorch computes \(cases: .*tree_all_streams"):
        export_bundle(str(base_folder), tmp_path / "bundle", format="coreml", capacity=96, functions=("tree_8",))
    assert not list(tmp_path.iterdir())


# Refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": 63}, r"capacity: 63 given, 64 \(rows of the largest function\) to 512"),
        ({"capacity": 513}, r"capacity: 513 given, .* to 512 \(the model's context\)"),
        ({"functions": ("tree_1",)}, "functions: 'tree_1' given"),
    ],
)
def test_sizes_that_make_no_sense(
    options: dict[str, Any],
    message: str,
    base_folder: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("specstream.models.base.load_base", None)  # refused before weights load
    with pytest.raises(UserError, match=message):
        export_bundle(str(base_folder), tmp_path / "bundle", format="coreml", **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--format", "coreml", "--profile", "ort"], "--profile means nothing with --format coreml"),
        (["--capacity", "96"], "--capacity means nothing with --format onnx"),
        (["--functions", "tree_8"], "--functions means nothing with --format onnx"),
    ],
)
def test_options_of_the_other_format(options: list[str], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["export", "no-such-model", str(tmp_path / "out"), *options]) == 2
    assert message in capfd.readouterr().err


@pytest.mark.parametrize("missing", ["coremltools", "sklearn"])
def test_a_missing_library_names_its_extra(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == missing else find(name, *rest))
    assert run(["export", "smollm2-135m", str(tmp_path / "out"), "--format", "coreml"]) == 2
    assert f"this needs the coreml extra ({missing} is missing): pip install 'specstream-toolchain[coreml]'" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())
