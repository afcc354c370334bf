"""tune on a tiny bundle: what it measures, chooses, keeps and refuses. Times of so small a network mean nothing; only their keys count."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from specstream.models.errors import UserError
from specstream.runtimes import Bundle
from specstream.runtimes.drafters import Streams
from specstream.runtimes.ort_session import usable_cores
from specstream.runtimes.profile import MeasuredCall, load_profile
from specstream.runtimes.replay import Recording
from specstream.toolchain.cli import run
from specstream.toolchain.tune_pipeline import ROWS, STREAM_ROWS, Sources, TuneOptions, call_costs, choose, default_threads

from ..runtimes.tiny_bundle import manifest, write_bundle

QUICK = ["--rounds", "1", "--contexts", "4,12", "--threads", "1", "--max-new-tokens", "8"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECSTREAM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("bundles") / "tiny").folder


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": text}) for text in ("the cat", "on the mat", "sat", "cat", "the", "mat", "on", "a")))
    return file


def test_a_profile_is_measured_kept_and_shown(bundle: Path, prompts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in bundle.iterdir()}
    report_file = tmp_path / "report.json"
    assert run(["tune", str(bundle), "--prompts", str(prompts), *QUICK, "--json", str(report_file)]) == 0
    out, err = capfd.readouterr()
    assert "chosen: 1 threads" in out
    assert "kept in" in err
    assert before == {path.name: path.stat().st_mtime_ns for path in bundle.iterdir()}
    loaded = Bundle.load(bundle)
    profile = load_profile(loaded.manifest, usable_cores())
    assert profile is not None
    assert profile.prompts == 8
    assert profile.weights is not None
    kinds = {(call.threads, call.context, call.rows, call.stream_rows) for call in profile.call_cost}
    assert kinds == {(1, c, r, s) for c in (4, 12) for r, s in [*((n, 0) for n in ROWS), *((8, n) for n in STREAM_ROWS)]}
    assert {(s.draft, s.stream_rows) for s in profile.speeds} == {
        ("none", 0),
        ("lookup", 0),
        *((draft, n) for draft in ("streams", "joined") for n in STREAM_ROWS),
    }
    assert profile.tokens_per_second >= profile.plain_tokens_per_second * 0.999
    report = json.loads(report_file.read_text())
    assert report["kind"] == "tune"
    assert report["profile"] == json.loads(profile.to_json())


def test_without_streams_and_with_few_prompts(tmp_path: Path, prompts: Path) -> None:
    plain = write_bundle(tmp_path / "plain", streams=False).folder
    assert run(["tune", str(plain), "--prompts", str(prompts), "--limit", "2", *QUICK]) == 0
    profile = load_profile(Bundle.load(plain).manifest, usable_cores())
    assert profile is not None
    assert (profile.prompts, profile.weights, profile.placement) == (2, None, None)
    assert {s.draft for s in profile.speeds} == {"none", "lookup"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--threads", "two"], "--threads two: numbers from 1"),
        (["--threads", "0"], "--threads 0"),
        (["--threads", "4096"], "may use"),
        (["--contexts", "1,,2"], "--contexts 1,,2"),
        (["--contexts", "60"], "the model's context is 64"),
        (["--prompts", "no-such-file"], "no-such-file"),
        (["--plot", "no-such-folder/plot.png"], "there is no folder"),
        (["--rounds", "0"], "--rounds"),
    ],
)
def test_what_tune_refuses(bundle: Path, arguments: list[str], message: str, cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["tune", str(bundle), *arguments]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1
    assert not cache.exists()


def test_no_plot_without_matplotlib(
    bundle: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "plot.png"
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else find(name, *rest))
    assert run(["tune", str(bundle), "--prompts", str(prompts), "--limit", "1", *QUICK, "--plot", str(plot)]) == 0
    assert "no plot: matplotlib is not installed" in capfd.readouterr().err
    assert not plot.exists()


def test_a_plot(bundle: Path, prompts: Path, tmp_path: Path) -> None:
    plot = tmp_path / "plot.png"
    assert run(["tune", str(bundle), "--prompts", str(prompts), "--limit", "1", *QUICK, "--plot", str(plot)]) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")


# The choice, from made-up measurements


def measured(per_row: float, streams: float) -> list[MeasuredCall]:
    """10 ms a call, ``per_row`` and ``streams`` ms more; two threads halve all."""
    calls = []
    for threads in (1, 2):
        calls += [MeasuredCall(threads, 128, rows, 0, (10 + per_row * (rows - 1)) / threads) for rows in ROWS]
        calls += [MeasuredCall(threads, 128, 8, n, (10 + per_row * 7 + streams * n) / threads) for n in STREAM_ROWS]
    return calls


def recordings() -> list[Recording]:
    """Text without repetition, streams that know the next four tokens."""
    tokens = tuple(range(100, 160))
    logprobs = np.log(np.full((4, 2), [0.8, 0.1])).astype(np.float32)
    streams = []
    for i in range(len(tokens) - 1):
        right = [tokens[min(i + j, len(tokens) - 1)] for j in range(1, 5)]
        streams.append(Streams(np.array([[token, token + 100] for token in right]), logprobs, 2 + i))
    return [Recording((1, 2, 3), tokens, tuple(streams), 60, 300)] * 2


SOURCES = Sources(fold=range(300), ngrams=None, temperatures=(1.0,) * 4, has_streams=True, delayed=False)


def test_the_fastest_is_chosen() -> None:
    options = TuneOptions(threads=(1, 2))
    cheap = choose(manifest(300), measured(0.1, 0.2), recordings(), SOURCES, options)
    assert (cheap.threads, cheap.budget, cheap.stream_rows) == (2, 6, 1)
    assert cheap.draft in ("streams", "joined")
    assert cheap.tokens_per_second == pytest.approx(5 / (10.7e-3 / 2), rel=0.05)
    assert cheap.plain_tokens_per_second == pytest.approx(200)
    dear = choose(manifest(300), measured(30, 50), recordings(), SOURCES, options)
    assert (dear.draft, dear.budget, dear.stream_rows, dear.costs.streams) == ("none", 1, 0, 0)


def test_costs_are_relative_to_a_plain_call() -> None:
    costs, ms = call_costs(measured(1, 3), 2, 2)
    assert ms == pytest.approx(5)
    assert costs.costs == pytest.approx([1 + (rows - 1) / 10 for rows in ROWS])
    assert costs.streams == pytest.approx(0.6)
    delayed = [MeasuredCall(1, 128, 1, 0, 10.0), MeasuredCall(1, 128, 0, 1, 4.0)]
    assert call_costs(delayed, 1, 1)[0].streams == pytest.approx(0.4)


def test_texts_of_one_token_say_nothing() -> None:
    short = [dataclasses.replace(recordings()[0], tokens=(100,), streams=())]
    with pytest.raises(UserError, match="end after one token"):
        choose(manifest(300), measured(1, 1), short, SOURCES, TuneOptions(threads=(1,)))


def test_threads_to_try() -> None:
    assert [default_threads(n) for n in (1, 2, 3, 8)] == [(1,), (1, 2), (1, 2, 3), (1, 2, 4, 8)]
