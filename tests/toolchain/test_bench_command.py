"""bench on a tiny bundle: figures that must agree with each other, and what is refused. Times of so small a network mean nothing."""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specstream.models.errors import UserError
from specstream.toolchain import bench_pipeline
from specstream.toolchain.bench_pipeline import read_task, rouge_l
from specstream.toolchain.cli import run
from specstream.toolchain.tune_pipeline import ROWS, STREAM_ROWS

from ..runtimes.tiny_bundle import write_bundle

QUICK = ["--rounds", "1", "--contexts", "4", "--threads", "1", "--max-new-tokens", "8"]
PROMPTS = ("the cat", "on the mat", "sat", "東京")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECSTREAM_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("bundles") / "tiny").folder


@pytest.fixture(scope="module")
def plain_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("bundles") / "plain", streams=False).folder


def task(folder: Path, name: str = "words", completions: bool = True) -> Path:
    file = folder / f"{name}.jsonl"
    rows = [{"prompt": text} | ({"completion": "no such text"} if completions else {}) for text in PROMPTS]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return file


def bench(*arguments: object, report: Path) -> dict[str, Any]:
    assert run(["bench", *map(str, arguments), *QUICK, "--json", str(report)]) == 0
    found: dict[str, Any] = json.loads(report.read_text())
    return found


def test_the_figures_of_a_run_agree_with_each_other(
    bundle: Path, plain_bundle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tasks = ["--task", task(tmp_path), "--task", task(tmp_path, "open", completions=False)]
    report = bench(bundle, plain_bundle, *tasks, "--drafts", "none,lookup,auto", report=tmp_path / "bench.json")
    assert report["kind"] == "bench"
    assert (report["threads"], report["model"], report["scheme"]) == (1, "tiny", "fp32")
    assert report["peak_rss_bytes"] > 0
    assert [facts["bundle"] for facts in report["bundles"]] == ["tiny", "plain"]
    variants = [(name, draft) for name in ("tiny", "plain") for draft in ("none", "lookup", "auto")]
    assert [(r["task"], r["bundle"], r["drafter"]) for r in report["runs"]] == [(t, *v) for t in ("words", "open") for v in variants]
    for found in report["runs"]:
        same_task = [r for r in report["runs"] if r["task"] == found["task"]]
        own = next(r for r in same_task if (r["bundle"], r["drafter"]) == (found["bundle"], "none"))
        fastest = max((r for r in same_task if r["drafter"] == "none"), key=lambda r: r["tokens_per_second"])
        each = found["each_tokens_per_second"]
        assert found["prompts"] == len(each) == len(PROMPTS)
        assert found["tokens_per_second"] == statistics.median(speed for speed in each if speed is not None)
        assert found["speedup_vs_plain"] == found["tokens_per_second"] / own["tokens_per_second"]
        assert found["speedup_vs_fastest_plain"] == found["tokens_per_second"] / fastest["tokens_per_second"]
        ratios = [a / b for a, b in zip(each, own["each_tokens_per_second"], strict=True) if a is not None]
        assert found["speedup_vs_plain_per_prompt"] == statistics.median(ratios)
        assert found["same_as_plain"] == 1.0  # fp32 of one graph: drafts do not change the text
        assert found["tokens"] == own["tokens"]
        assert found["calls"] <= own["calls"]
        assert found["tokens_per_call"] == (found["tokens"] - len(PROMPTS)) / found["calls"]
        assert 0 < found["outside_runtime_share"] < 1
        assert found["first_token_seconds"] > 0
        if found["drafter"] == "none":
            assert found["tokens_per_call"] == 1
            assert found["speedup_vs_plain"] == found["speedup_vs_plain_per_prompt"] == 1
    words = [r["quality"] for r in report["runs"] if r["task"] == "words"]
    assert words == [{"references": len(PROMPTS), "exact_match": 0.0, "rouge_l": words[0]["rouge_l"]}] * len(words)
    assert all(r["quality"] is None for r in report["runs"] if r["task"] == "open")
    kinds = {(c["bundle"], c["rows"], c["stream_rows"], c["context"]) for c in report["call_cost"]}
    assert kinds == {("tiny", r, s, 4) for r, s in [*((n, 0) for n in ROWS), *((8, n) for n in STREAM_ROWS)]} | {
        ("plain", n, 0, 4) for n in ROWS
    }
    assert all(c["ms"] > 0 for c in report["call_cost"])
    out = capfd.readouterr().out
    assert out.count("fastest") == 2
    assert "tiny: tiny, fp32" in out


def test_plain_decoding_is_always_there_and_call_cost_may_be_left_out(bundle: Path, tmp_path: Path) -> None:
    arguments = [bundle, "--task", task(tmp_path), "--drafts", "streams", "--limit", 2]
    assert run(["bench", *map(str, arguments), *QUICK, "--contexts", "none", "--budget", "4", "--json", str(tmp_path / "r.json")]) == 0
    report = json.loads((tmp_path / "r.json").read_text())
    assert [(r["drafter"], r["prompts"]) for r in report["runs"]] == [("none", 2), ("streams", 2)]
    assert report["budget"] == 4
    assert report["call_cost"] == []


def test_a_picture_where_matplotlib_is(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "bench.png"
    arguments = [str(bundle), "--task", str(task(tmp_path)), "--limit", "1", *QUICK, "--plot", str(picture)]
    if importlib.util.find_spec("matplotlib") is not None:
        assert run(["bench", *arguments]) == 0
        assert picture.read_bytes().startswith(b"\x89PNG")
        picture.unlink()
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else find_spec(name, *rest))
    assert run(["bench", *arguments]) == 0
    assert "no plot: matplotlib is not installed" in capfd.readouterr().err
    assert not picture.exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--drafts", "auto,,none"], "names with commas"),
        (["--drafts", "medusa"], "'medusa' is unknown"),
        (["--contexts", "0"], "numbers from 1"),
        (["--contexts", "60"], "the context of"),
        (["--threads", "4096"], "this process may use"),
        (["--plot", "nowhere/bench.png"], "there is no folder"),
        (["--task", "missing.jsonl"], "missing.jsonl: No such file"),
    ],
)
def test_bad_options_are_one_line(
    arguments: list[str], said: str, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["bench", str(bundle), "--task", str(task(tmp_path)), *QUICK, *arguments]) == 2
    error = capfd.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_bundles_that_cannot_be_compared(bundle: Path, plain_bundle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = str(task(tmp_path))
    assert run(["bench", str(bundle), str(bundle), "--task", file]) == 2
    assert "two bundles are named tiny" in capfd.readouterr().err
    other = write_bundle(tmp_path / "other").folder
    manifest = other / "specstream.json"
    manifest.write_text(manifest.read_text().replace("0" * 64, "f" * 64))
    assert run(["bench", str(bundle), str(other), "--task", file]) == 2
    assert "different base weights" in capfd.readouterr().err
    assert run(["bench", str(plain_bundle), "--task", file, *QUICK, "--drafts", "streams"]) == 2
    assert "no streams" in capfd.readouterr().err
    assert run(["bench", str(bundle), "--task", file, "--task", file]) == 2
    assert "same name" in capfd.readouterr().err
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"prompt": "the cat " * 100}))
    assert run(["bench", str(bundle), "--task", str(long), *QUICK]) == 2
    assert "long, prompt 1" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"prompt": "a"}\n{', "line 2: not JSON"),
        ('{"prompt": "  "}', 'line 1: an object with a text "prompt"'),
        ('["a"]', 'line 1: an object with a text "prompt"'),
        ('{"prompt": "a", "completion": 3}', 'line 1: "completion" is 3'),
        ("\n", "no prompts"),
    ],
)
def test_tasks_that_cannot_be_read(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "task.jsonl"
    file.write_text(text)
    with pytest.raises(UserError, match=said.replace("(", r"\(")):
        read_task(file, 10)


def test_rouge_l() -> None:
    assert rouge_l("The cat sat.", "the cat sat") == 1.0
    assert rouge_l("", "") == 1.0
    assert rouge_l("", "cat") == 0.0
    # police killed the gunman / police kill the gunman (Lin 2004, section 3.1): a common subsequence of 3 words out of 4 and 4
    assert rouge_l("police kill the gunman", "police killed the gunman") == 0.75
    assert rouge_l("the gunman kill police", "police killed the gunman") == 0.5
    assert rouge_l("a b c d e", "b d") == pytest.approx(2 * (2 / 5) / (2 / 5 + 1))


def test_only_calls_after_the_first_token_count_as_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill in two chunks, a pass of delayed streams, then two verifying calls with a pass of streams after the first."""
    now = [0.0]
    monkeypatch.setattr(bench_pipeline.time, "perf_counter", lambda: now[0])

    class Graph:
        def __init__(self, seconds: float) -> None:
            self.seconds = seconds

        def run_with_iobinding(self, _binding: object) -> None:
            now[0] += self.seconds

    main, streams = bench_pipeline._Clock(Graph(10.0)), bench_pipeline._Clock(Graph(1.0))

    class Model:
        def generate(self, *_arguments: object, budget: object) -> object:
            for clock in (main, main, streams, main, streams, main):
                clock.run_with_iobinding(None)
                now[0] += 0.5  # our own work between calls
            return SimpleNamespace(calls=2, tokens=5, tokens_per_second=4 / 23.0)

    variant = bench_pipeline._Variant.__new__(bench_pipeline._Variant)
    variant.opened, variant.draft, variant.lm = SimpleNamespace(clocks=[main, streams]), "auto", Model()  # type: ignore[assignment]
    for _ in range(2):  # the clocks start anew with each text
        text = variant.answer([1, 2], bench_pipeline.BenchOptions(("auto",), 1))
        assert (text.runtime_seconds, text.decode_seconds) == (21.0, 23.0)


def test_bench_needs_the_base_install_only() -> None:
    modules = ("bench_pipeline", "bench_command", "export_pipeline")
    code = f"import sys, {', '.join(f'specstream.toolchain.{name}' for name in modules)}\n"
    code += "print([m for m in ('torch', 'transformers', 'onnx', 'matplotlib') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
