"""The main job on the real model: the zoo's adapter exported, run, rounded and run again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from specstream.quantize.coreml_schemes import CoreMLOptions
from specstream.runtimes import GenerationResult, Sampling, load
from specstream.runtimes.bundle import Bundle
from specstream.runtimes.language_model import LanguageModel
from specstream.runtimes.session import prefill
from specstream.toolchain.coreml_quantize import quantize_package_bundle
from specstream.toolchain.export_pipeline import export_bundle
from specstream.toolchain.package_pipeline import package_bundle
from specstream.toolchain.quantize_pipeline import quantize_bundle
from specstream.toolchain.quantize_quality import forced_logprobs
from specstream.toolchain.zoo import resolve_adapter

pytestmark = pytest.mark.slow

SQL = Path(__file__).parent / "data" / "sql.jsonl"
PROMPTS = [json.loads(line)["prompt"] for line in SQL.read_text(encoding="utf-8").splitlines()]
MANY = 16


@pytest.fixture(scope="module")
def exported(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Exported by a process of its own: the memory that it took is its own, too."""
    folder = tmp_path_factory.mktemp("end-to-end")
    out, report = folder / "bundle", folder / "report.json"
    asked = ["export", str(smollm2_path), str(out), "--adapter", "smollm2-135m-sql", "--json", str(report)]
    subprocess.run([sys.executable, "-m", "specstream.toolchain", *asked], check=True)
    return out, json.loads(report.read_text(encoding="utf-8"))


def tokens_per_call(lm: LanguageModel, draft: str) -> float:
    return per_call([lm.generate(prompt, 96, draft, budget=MANY) for prompt in PROMPTS])


def per_call(results: list[GenerationResult]) -> float:
    return sum(result.tokens - 1 for result in results) / sum(result.calls for result in results)


@pytest.fixture(scope="module")
def generated(exported: tuple[Path, dict[str, Any]]) -> dict[str, list[GenerationResult]]:
    """Each prompt without drafts, and with those of each source at a fixed number of rows."""
    lm = load(exported[0], profile=False)
    return {draft: [lm.generate(prompt, 96, draft, budget=MANY) for prompt in PROMPTS] for draft in ("none", "streams", "joined")}


def test_export_of_the_real_model(exported: tuple[Path, dict[str, Any]]) -> None:
    """Parity with PyTorch, peak memory, every weight once, and the operators that the graphs should have."""
    _, report = exported
    weights = 4 * 134_515_008
    assert report["parity"]["top1_agreement"] == 1.0
    assert report["parity"]["max_abs_diff"] <= 1e-3
    assert report["peak_rss_bytes"] < 2 * weights + 800e6
    copies = 4 * 10 * 3_539_520 + 4 * 8192 * 576  # the top ten layers with the streams' LoRA merged in, the head of their vocabulary
    assert weights + copies <= report["weight_bytes"] < weights + copies + 10e6
    operators = report["operators"]
    assert operators["com.microsoft::GroupQueryAttention"] == 30
    assert operators["RMSNormalization"] + operators["com.microsoft::SkipSimplifiedLayerNormalization"] == 30 * 2 + 1


def test_drafts_save_calls_and_change_nothing(exported: tuple[Path, dict[str, Any]], generated: dict[str, list[GenerationResult]]) -> None:
    lm = load(exported[0], profile=False)
    plain = [result.token_ids for result in generated["none"]]
    for draft in ("streams", "joined"):
        assert [result.token_ids for result in generated[draft]] == plain
        assert [lm.generate(prompt, 96, draft).token_ids for prompt in PROMPTS] == plain  # the adaptive budget
    assert per_call(generated["streams"]) > 2.8
    assert per_call(generated["joined"]) > per_call(generated["streams"])


def test_drafts_do_not_change_sampled_text(exported: tuple[Path, dict[str, Any]]) -> None:
    lm = load(exported[0], profile=False)
    texts = set()
    accepted = 0
    for prompt in PROMPTS[:5]:
        for seed in (1, 2):
            sampling = Sampling(0.8, top_p=0.95, repetition_penalty=1.05, seed=seed)
            plain = lm.generate(prompt, 40, "none", sampling=sampling)
            result = lm.generate(prompt, 40, budget=MANY, sampling=sampling)
            assert result.token_ids == plain.token_ids
            texts.add(result.token_ids)
            accepted += result.accepted
    assert accepted > 50
    assert len(texts) > 5


CACHES = {"w8a8": "int8", "int4": "float32"}


@pytest.fixture(scope="module")
def rounded(exported: tuple[Path, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """A bundle of each scheme and what `quantize` says of it."""
    folder = tmp_path_factory.mktemp("rounded")
    return {
        scheme: (folder / scheme, quantize_bundle(exported[0], folder / scheme, scheme, cache=cache, calibration=SQL, limit=6))
        for scheme, cache in CACHES.items()
    }


@pytest.mark.parametrize("scheme", CACHES)
def test_a_rounded_bundle_still_drafts_well(
    scheme: str, rounded: dict[str, tuple[Path, dict[str, Any]]], generated: dict[str, list[GenerationResult]]
) -> None:
    bundle, report = rounded[scheme]
    manifest = Bundle.load(bundle).manifest
    assert (manifest.quantization.scheme, manifest.contract.cache_dtype) == (scheme, CACHES[scheme])
    assert report["quality"]["kl"] < 0.1
    assert report["bundle_share"] < {"w8a8": 0.32, "int4": 0.18}[scheme]
    # Rounding changes the text itself, and with it what can be guessed: on these few prompts that says little.
    assert tokens_per_call(load(bundle, profile=False), "streams") > 0.75 * per_call(generated["streams"])


@pytest.fixture(scope="module")
def coreml(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("coreml") / "bundle"
    adapter = resolve_adapter("smollm2-135m-sql")
    return out, export_bundle(str(smollm2_path), out, adapter, format="coreml", capacity=320, functions=("tree_16",))


def test_core_ml_says_what_onnx_says(exported: tuple[Path, dict[str, Any]], coreml: tuple[Path, dict[str, Any]]) -> None:
    """The package in 16 bits, computed from the saved file; where a text differs, 16 bits cannot tell the two tokens apart."""
    out, report = coreml
    parity = report["parity"]
    rows = sum(case["rows"] for case in parity["cases"].values())
    assert parity["near_ties"] <= 1  # whose order depends on how the processor rounds
    assert round(parity["top1_agreement"] * rows) == rows - parity["near_ties"]
    assert report["weight_bytes"] < 2.2 * 134_515_008  # every weight once, and the streams' own
    assert report["operators"]["tree_16"]["scaled_dot_product_attention"] == 30
    assert report["operators"]["draft"]["scaled_dot_product_attention"] == 10
    lm, reference = load(out), load(exported[0], profile=False)
    for prompt in PROMPTS[:2]:
        expected = reference.generate(prompt, 48, "none").token_ids
        for draft in ("streams", "joined"):
            result = lm.generate(prompt, 48, draft, budget=MANY)
            assert result.accepted > result.calls  # the streams are worth something here, too
            if result.token_ids != expected:
                assert_near_tie(lm, prompt, list(result.token_ids), list(expected))


def test_a_core_ml_package_of_four_bits(coreml: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """Small enough, and near the one of 16 bits on the tokens that the latter writes."""
    report = quantize_package_bundle(coreml[0], tmp_path / "int4", CoreMLOptions("int4"))
    assert report["package_share"] < 0.3
    assert report["products"]["int4"] >= 30 * 7 + 1
    whole, small = load(coreml[0]), load(tmp_path / "int4")
    prompt = whole.prompt_ids(PROMPTS[0])
    text = whole.generate(prompt, 24, "none").token_ids
    scores = [forced_logprobs(lm.session, prompt, text) for lm in (whole, small)]
    assert (np.exp(scores[0]) * (scores[0] - scores[1])).sum(axis=1).mean() < 0.3
    assert (scores[0].argmax(axis=1) == scores[1].argmax(axis=1)).mean() > 0.85


def assert_near_tie(lm: LanguageModel, prompt: str, one: list[int], other: list[int]) -> None:
    place = next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    lm.session.rewind(0)
    logits = prefill(lm.session, [*lm.prompt_ids(prompt), *one[:place]], logits=True).logits
    assert logits is not None
    assert abs(float(logits[0, one[place]] - logits[0, other[place]])) < lm.session.near_tie


def test_an_android_package_replays_with_onnxruntime_alone(rounded: dict[str, tuple[Path, dict[str, Any]]], tmp_path: Path) -> None:
    package = tmp_path / "android"
    report = package_bundle(rounded["int4"][0], package, "android", prompts=PROMPTS[:1], capacity=512)
    assert report["archive_bytes"] > report["package_bytes"] > 0.9 * report["memory"]["weights"]
    assert (package / "ADAPTER.md").is_file()
    greedy = [trace for trace in report["traces"] if "greedy" in trace["name"]]
    assert len({trace["tokens"] for trace in greedy}) == 1
    calls = {trace["name"].rpartition(", ")[2]: trace["calls"] for trace in greedy}
    assert calls["joined"] < calls["streams"] < 0.6 * calls["none"]
    # A path with ONNX Runtime and NumPy and nothing else.
    site = tmp_path / "site"
    site.mkdir()
    for module in (onnxruntime, np):
        home = Path(module.__file__).parent
        for folder in (home, home.with_name(f"{home.name}.libs")):
            if folder.is_dir():
                (site / folder.name).symlink_to(folder)
    command = [sys.executable, "-S", "-s", "-P", str(package / "replay.py"), "--json"]
    environment = {"PYTHONPATH": str(site), "PATH": os.environ["PATH"]}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert all(trace["difference"] == "" for trace in json.loads(done.stdout)["traces"])
