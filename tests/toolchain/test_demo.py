"""The demo's own code, on a tiny bundle in the place of the exported model."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from specstream.runtimes import GenerationResult, LanguageModel
from specstream.toolchain import demo as module
from specstream.toolchain.cli import run
from specstream.toolchain.demo import QUESTIONS, demo

from ..runtimes.tiny_bundle import write_bundle


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # The tiny model's context is shorter than the questions.
    monkeypatch.setattr(module, "_INSTRUCTION", "")
    monkeypatch.setattr(module, "QUESTIONS", (("the", "cat"), ("on", "mat")))
    monkeypatch.setattr(module, "is_made", lambda out: out.is_dir())
    return write_bundle(tmp_path / "demo", stops=False).folder


def test_answers_are_shown_with_both_speeds(bundle: Path) -> None:
    result = CliRunner().invoke(demo, ["--out", str(bundle)])
    assert result.exit_code == 0, result.output
    assert "cat" in result.output
    for column in ("SQL", "per call", "plain", "speed-up", "all three"):
        assert column in result.output


def test_a_bundle_that_is_there_is_not_made_again(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    monkeypatch.setattr(module, "export", made.append)
    assert run(["--out", str(bundle)], demo) == 0
    assert made == []
    assert run(["--out", str(bundle), "--force"], demo) == 0
    assert made == [bundle]


def test_texts_that_differ_fail_the_demo(bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    generate = LanguageModel.generate

    def odd(self: LanguageModel, prompt: str, *, draft: str) -> GenerationResult:
        return generate(self, prompt, 5 if draft == "none" else 6)

    monkeypatch.setattr(LanguageModel, "generate", odd)
    assert run(["--out", str(bundle)], demo) == 1
    assert "speculation changed the text" in capsys.readouterr().err


def test_there_are_three_questions() -> None:
    assert len(QUESTIONS) == 3
    assert all(schema.startswith("CREATE TABLE ") and question.endswith("?") for schema, question in QUESTIONS)
