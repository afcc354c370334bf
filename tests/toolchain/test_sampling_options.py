"""generate, chat and verify with a temperature: on a tiny bundle whose network is random."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from specstream.runtimes import Bundle, Sampling, load
from specstream.toolchain.cli import run

from ..runtimes.tiny_bundle import write_bundle

PROMPT = "the cat"
SETTINGS = ["--temperature", "0.9", "--top-k", "50", "--top-p", "0.95", "--min-p", "0.001", "--repetition-penalty", "1.1"]
SETTINGS += ["--presence-penalty", "0.2", "--frequency-penalty", "0.1"]
SAMPLING = Sampling(0.9, 50, 0.95, 0.001, 1.1, 0.2, 0.1, seed=7)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("bundles") / "tiny").folder


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "the cat"}\n{"prompt": "on the mat"}\n')
    return file


def report(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_all_options_reach_the_runtime(bundle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    expected = load(bundle).generate(PROMPT, 12, sampling=SAMPLING)
    for draft in ("auto", "streams", "none"):
        arguments = [*SETTINGS, "--seed", "7", "--max-new-tokens", "12", "--draft", draft, "--json", str(file)]
        assert run(["generate", str(bundle), PROMPT, *arguments]) == 0
        out, err = capfd.readouterr()
        assert out == expected.text + "\n"
        assert err.endswith("seed 7\n")
        assert report(file)["token_ids"] == list(expected.token_ids)
        assert Sampling.from_json(report(file)["sampling"]) == SAMPLING


def test_a_seed_is_chosen_and_shown(bundle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file, texts, seeds = tmp_path / "report.json", [], []
    command = ["generate", str(bundle), PROMPT, "--temperature", "1", "--max-new-tokens", "12"]
    for _ in range(3):
        assert run([*command, "--json", str(file)]) == 0
        out, err = capfd.readouterr()
        seeds.append(report(file)["sampling"]["seed"])
        assert err.endswith(f"seed {seeds[-1]}\n")
        texts.append(out)
    assert len(set(seeds)) == 3
    assert len(set(texts)) > 1
    assert run([*command, "--seed", str(seeds[0])]) == 0
    assert capfd.readouterr().out == texts[0]


@pytest.mark.parametrize("arguments", [[], ["--temperature", "0"], ["--temperature", "0", "--repetition-penalty", "1"]])
def test_greedy_decoding_has_no_settings(arguments: list[str], bundle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    assert run(["generate", str(bundle), PROMPT, "--max-new-tokens", "8", "--json", str(file), *arguments]) == 0
    out, err = capfd.readouterr()
    assert out == load(bundle).generate(PROMPT, 8).text + "\n"
    assert "seed" not in err
    assert report(file)["sampling"] is None


def test_penalties_alone_stay_greedy(bundle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    arguments = ["--max-new-tokens", "12", "--json", str(file), "--presence-penalty", "50"]
    assert run(["generate", str(bundle), PROMPT, *arguments]) == 0
    assert "seed" not in capfd.readouterr().err
    found = report(file)
    assert len(set(found["token_ids"])) == found["tokens"] == 12
    assert (found["sampling"]["temperature"], found["sampling"]["presence_penalty"]) == (0, 50)


@pytest.mark.parametrize("command", ["generate", "chat", "verify"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "-1"], "temperature is -1.0, expected 0 for greedy"),
        (["--temperature", "nan"], "temperature is nan"),
        (["--temperature", "hot"], "'hot' is not a valid float"),
        (["--temperature", "1", "--top-k", "-1"], "top_k is -1"),
        (["--temperature", "1", "--top-k", "1.5"], "'1.5' is not a valid integer"),
        (["--temperature", "1", "--top-p", "0"], "top_p is 0.0"),
        (["--temperature", "1", "--top-p", "1.5", "--min-p", "2"], "top_p is 1.5, expected above 0, at most 1; min_p is 2.0"),
        (["--temperature", "1", "--seed", str(2**64)], "seed is"),
        (["--repetition-penalty", "0"], "repetition_penalty is 0.0"),
        (["--top-p", "0.9"], "--top-p: no effect without a --temperature above 0"),
        (["--temperature", "0", "--seed", "3", "--top-k", "5"], "--top-k, --seed: no effect"),
    ],
)
def test_what_is_refused(command: str, arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Before the bundle is opened: there is none."""
    own = {"generate": ["x"], "chat": [], "verify": ["--prompts", "none.jsonl"]}[command]
    assert run([command, "no-such-bundle", *own, *arguments]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def chat(bundle: Path, lines: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> list[str]:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode()), encoding="utf-8"))
    assert run(["chat", str(bundle), "--max-new-tokens", "6", "--stats", *arguments]) == 0
    return re.findall(r"seed (\d+)", capfd.readouterr().err)


def test_answers_of_a_chat_have_seeds_of_their_own(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    seeds = chat(bundle, "the\n/clear\nthe\n/quit\n", ["--temperature", "1"], monkeypatch, capfd)
    assert len(set(seeds)) == 2
    assert chat(bundle, "the\n/clear\nthe\n/quit\n", ["--temperature", "1", "--seed", "4"], monkeypatch, capfd) == ["4", "4"]
    assert chat(bundle, "the\n/quit\n", [], monkeypatch, capfd) == []


def test_chat_samples(bundle: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the\n/clear\nthe\n"), encoding="utf-8"))
    assert run(["chat", str(bundle), "--max-new-tokens", "6", "--temperature", "1.2", "--seed", "5"]) == 0
    answer = load(bundle).generate("the", 6, sampling=Sampling(1.2, seed=5)).text
    assert capfd.readouterr().out == f"{answer}\n{answer}\n"


def test_verify_compares_sampled_texts(tmp_path: Path, prompts: Path, capfd: pytest.CaptureFixture[str]) -> None:
    own = write_bundle(tmp_path / "own").folder
    file = tmp_path / "verify.json"
    arguments = ["--prompts", str(prompts), "--max-new-tokens", "12", *SETTINGS, "--seed", "7", "--json", str(file)]
    assert run(["verify", str(own), *arguments]) == 0
    out, err = capfd.readouterr()
    assert "compared with plain decoding, seed 7" in out
    assert "differences 0" in out
    assert "not compared with transformers: its noise and penalties are others" in err
    assert Sampling.from_json(report(file)["sampling"]) == SAMPLING
    assert report(file)["reference"] == "plain"
    assert Bundle.load(own).manifest.verified is None
    for asked in (["--reference", "transformers"], ["--model", "tiny"]):
        assert run(["verify", str(own), *arguments, *asked]) == 2
        assert "greedy decoding only" in capfd.readouterr().err
