"""export as a user meets it: a tiny folder to a bundle that `verify` finds exact, the same through optimum-cli, and bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path

import pytest

from specstream.runtimes import Bundle
from specstream.toolchain.cli import run
from specstream.toolchain.optimum_plugin import SpecstreamExportCommand, command_line

from ..models.test_base import model_folder  # noqa: F401 - a fixture

OPTIMUM = [sys.executable, "-m", "optimum.commands.optimum_cli"]


def test_export_then_verify_against_transformers(model_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    out, report = tmp_path / "bundle", tmp_path / "report.json"
    assert run(["export", str(model_folder), str(out), "--json", str(report)]) == 0
    said = capfd.readouterr()
    assert "parity with PyTorch: top-1 agreement 100.00%" in said.out
    assert said.err == ""
    data = json.loads(report.read_text())
    assert {"seconds", "peak_rss_bytes", "weight_bytes", "bundle_bytes", "parity", "schema", "versions"} <= set(data)
    assert Bundle.load(out).manifest.streams is None

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "hello"}\n{"prompt": "h\\u00e9 12"}\n')
    asked = ["--prompts", str(prompts), "--max-new-tokens", "16", "--reference", "transformers", "--model", str(model_folder)]
    assert run(["verify", str(out), *asked]) == 0
    said = capfd.readouterr()
    assert "compared with plain decoding and transformers" in said.out
    assert "differences 0" in said.out
    assert said.err == ""

    # Once more to the same place: refused, then allowed.
    assert run(["export", str(model_folder), str(out)]) == 2
    assert "--force" in capfd.readouterr().err
    assert run(["export", str(model_folder), str(out), "--force", "--profile", "portable"]) == 0
    assert Bundle.load(out).manifest.contract.profile == "portable"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-model", "out"], "no model 'no-such-model'"),
        (["FOLDER", "out"], "architecture GPT2LMHeadModel is not supported; supported are: Llama (LlamaForCausalLM), "),
        (["smollm2-135m", "out", "--adapter", "no-such-adapter"], "no adapter 'no-such-adapter'"),
        (["smollm2-135m", "out", "--profile", "other"], "'other' is not one of 'ort', 'portable'"),
    ],
)
def test_what_export_refuses_leaves_nothing_behind(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "gpt2"  # a configuration and no weights: refused before they would be looked for
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}')
    monkeypatch.chdir(tmp_path)
    assert run(["export", *(str(folder) if a == "FOLDER" else a for a in arguments)]) == 2
    err = capfd.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["gpt2"]


# optimum-cli


def test_optimum_cli_has_the_command(tmp_path: Path) -> None:
    done = subprocess.run([*OPTIMUM, "export", "specstream", "--help"], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "MODEL OUT" in done.stdout
    assert "--adapter" in done.stdout


def test_optimum_cli_gives_the_same_errors(tmp_path: Path) -> None:
    done = subprocess.run([*OPTIMUM, "export", "specstream", "nowhere", "out"], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2
    assert "error: no model 'nowhere'" in done.stderr
    assert not list(tmp_path.iterdir())


def test_what_argparse_reads_is_what_click_gets() -> None:
    parser = ArgumentParser()
    SpecstreamExportCommand.parse_args(parser)
    given = ["model", "out", "--force", "--profile", "portable", "--json", "r.json", "--adapter", "a"]
    expected = ["--adapter", "a", "--profile", "portable", "--force", "--json", "r.json", "--", "model", "out"]
    assert command_line(parser.parse_args(given)) == expected
    assert command_line(parser.parse_args(["model", "out"])) == ["--", "model", "out"]
