"""generate, chat, info and verify on a tiny bundle whose network is random: what goes where, and what is refused."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest

from specstream.models.errors import UserError
from specstream.runtimes import Bundle, load
from specstream.runtimes.coreml_session import ComputeUnits
from specstream.runtimes.manifest import MANIFEST_NAME
from specstream.toolchain import verify_command
from specstream.toolchain.cli import run
from specstream.toolchain.prompt_rows import read_prompt_rows
from specstream.toolchain.session_options import COMPUTE_UNITS

from ..runtimes.tiny_bundle import STREAMS, write_bundle

PROMPT = "the cat"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("bundles") / "tiny").folder


@pytest.fixture
def own_bundle(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "own").folder


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "the cat"}\n\n{"prompt": "on the mat", "completion": "x"}\n')
    return file


def stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


# generate


def test_text_on_standard_output_statistics_on_standard_error(bundle: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", str(bundle), PROMPT, "--max-new-tokens", "8"]) == 0
    out, err = capfd.readouterr()
    assert out == load(bundle).generate(PROMPT, 8).text + "\n"
    assert err.count("\n") == 1
    for words in ("tokens per call", "tokens/s", "first token after"):
        assert words in err


def test_no_stats_says_nothing_else(bundle: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", str(bundle), PROMPT, "--max-new-tokens", "4", "--no-stats"]) == 0
    assert capfd.readouterr().err == ""


def test_the_text_is_the_same_without_drafts(bundle: Path, capfd: pytest.CaptureFixture[str]) -> None:
    texts = []
    for draft in ("auto", "streams", "none"):
        assert run(["generate", str(bundle), PROMPT, "--max-new-tokens", "12", "--draft", draft]) == 0
        texts.append(capfd.readouterr().out)
    assert texts[0] == texts[1] == texts[2]


def test_a_prompt_from_a_file_or_from_standard_input(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompt.txt").write_bytes("jaźń\r\n".encode())
    expected = load(bundle).generate("jaźń", 6).text + "\n"
    limit = ["--max-new-tokens", "6"]
    assert run(["generate", str(bundle), "--prompt-file", str(tmp_path / "prompt.txt"), *limit]) == 0
    assert capfd.readouterr().out == expected
    for way in (["-"], ["--prompt-file", "-"]):
        stdin(monkeypatch, "jaźń\n".encode())
        assert run(["generate", str(bundle), *way, *limit]) == 0
        assert capfd.readouterr().out == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["BUNDLE", ""], "the prompt is empty"),
        (["BUNDLE", "  \n"], "the prompt is empty"),
        (["BUNDLE"], "give the prompt either"),
        (["BUNDLE", "x", "--prompt-file", "f"], "give the prompt either"),
        (["BUNDLE", "--prompt-file", "no-such-file"], "no-such-file: No such file"),
        (["BUNDLE", "the cat " * 40], "the context holds"),
        (["BUNDLE", "x", "--draft", "magic"], "'magic'"),
        (["no-such-bundle", "x"], "no such bundle"),
        (["BUNDLE", "x", "--max-new-tokens", "0"], "--max-new-tokens"),
        (["BUNDLE", "x", "--json", "no-such-folder/report.json"], "there is no folder"),
        (["BUNDLE", "x", "--compute-units", "cpu"], "an ONNX bundle, which runs on the CPU"),
    ],
)
def test_what_generate_refuses(bundle: Path, arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", *(str(bundle) if a == "BUNDLE" else a for a in arguments)]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_standard_input_that_is_no_text(bundle: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    stdin(monkeypatch, b"a\xff")
    assert run(["generate", str(bundle), "-"]) == 2
    assert "standard input: not UTF-8 text" in capfd.readouterr().err


def test_report_of_generate(bundle: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    assert run(["generate", str(bundle), PROMPT, "--max-new-tokens", "8", "--json", str(file), "--threads", "1"]) == 0
    report = json.loads(file.read_text())
    assert report["schema"] == 1
    assert report["kind"] == "generate"
    assert report["threads"] == 1
    assert report["versions"]["onnxruntime"]
    assert report["tokens"] == len(report["token_ids"])
    design = "text token_ids finish_reason tokens calls tokens_per_call tokens_per_second first_token_seconds drafted accepted model scheme"
    assert set(design.split()) <= set(report)
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


# chat


def test_chat_sees_the_whole_conversation(bundle: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    stdin(monkeypatch, b"the\n\ncat\n/clear\nthe\n/quit\nnever\n")
    assert run(["chat", str(bundle), "--max-new-tokens", "3"]) == 0
    lm = load(bundle)
    turns: list[dict[str, str]] = [{"role": "user", "content": "the"}]
    first = lm.generate(turns, 3).text
    turns += [{"role": "assistant", "content": first}, {"role": "user", "content": "cat"}]
    second = lm.generate(turns, 3).text
    assert capfd.readouterr().out == f"{first}\n{second}\n{first}\n"


def test_chat_goes_on_when_a_conversation_is_too_long(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stdin(monkeypatch, b"the cat sat on the mat " * 20 + b"\nthe\n")
    assert run(["chat", str(bundle), "--max-new-tokens", "2", "--stats"]) == 0
    out, err = capfd.readouterr()
    assert "context holds" in err
    assert "/clear" in err
    assert "first token after" in err
    assert out.strip("\n") == load(bundle).generate("the", 2).text.strip("\n")


# info


def test_info_counts_stream_parameters(bundle: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["info", str(bundle)]) == 0
    out = capfd.readouterr().out
    assert f"{STREAMS * 32:,} beyond the fine-tune" in out
    for words in ("12,345 parameters", "not stated by the weights", "version 1, profile ort", "fp32", "model.onnx.data", "not yet"):
        assert words in out


def test_info_of_a_bundle_without_streams(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = write_bundle(tmp_path / "plain", streams=False).folder
    assert run(["info", str(folder), "--json", str(tmp_path / "info.json")]) == 0
    assert "none: plain decoding only" in capfd.readouterr().out
    report = json.loads((tmp_path / "info.json").read_text())
    assert report["stream_parameters"] == 0
    assert {"model", "parameters", "scheme", "files", "contract", "parity", "verified"} <= set(report)


def test_a_changed_byte_is_found(own_bundle: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = own_bundle / "model.onnx.data"
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    for command in (["info", str(own_bundle)], ["generate", str(own_bundle), "x"]):
        assert run(command) == 2
        assert "model.onnx.data" in capfd.readouterr().err


# verify


def test_verify_against_plain_decoding(own_bundle: Path, prompts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "verify.json"
    arguments = ["--prompts", str(prompts), "--reference", "plain", "--max-new-tokens", "12", "--json", str(report)]
    assert run(["verify", str(own_bundle), *arguments]) == 0
    out, err = capfd.readouterr()
    assert "2 prompts" in out
    assert "differences 0" in out
    assert "not compared with transformers: --reference plain" in err
    data = json.loads(report.read_text())
    keys = "prompts tokens differences near_ties flip_rate tokens_per_call rows_independent reference"
    assert set(keys.split()) <= set(data)
    assert data["reference"] == "plain"
    recorded = Bundle.load(own_bundle).manifest.verified
    assert recorded is not None
    assert recorded["differences"] == 0
    assert recorded["prompts_file"] == "prompts.jsonl"
    assert run(["info", str(own_bundle)]) == 0
    assert "0 differences and 0 near-ties" in " ".join(capfd.readouterr().out.split())


def test_verify_leaves_the_bundle_alone_when_asked_to(own_bundle: Path, prompts: Path) -> None:
    before = (own_bundle / MANIFEST_NAME).read_bytes()
    assert run(["verify", str(own_bundle), "--prompts", str(prompts), "--reference", "plain", "--no-record", "--limit", "1"]) == 0
    assert (own_bundle / MANIFEST_NAME).read_bytes() == before


def test_a_reference_that_says_otherwise_fails_the_check(
    own_bundle: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    plain = load(own_bundle)

    def lying(ids: Sequence[int], limit: int) -> list[int]:
        told = list(plain.generate(ids, limit, "none").token_ids)
        return [*told[:2], told[2] ^ 1, *told[3:]]

    monkeypatch.setattr(verify_command, "_transformers", lambda *_: (lying, ""))
    assert run(["verify", str(own_bundle), "--prompts", str(prompts), "--max-new-tokens", "6"]) == 1
    out, err = capfd.readouterr()
    assert "compared with plain decoding and transformers" in out
    assert "differences 2" in out
    assert out.count("DIFFERENT: prompt") == 2
    assert err.startswith("failed: ")
    assert "2 differences; the first: prompt 0, token 2, against reference" in err


def test_transformers_that_cannot_be_had_is_said_or_refused(own_bundle: Path, prompts: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["verify", str(own_bundle), "--prompts", str(prompts), "--limit", "1", "--max-new-tokens", "4"]
    assert run(arguments) == 0
    assert "not compared with transformers: no model 'tiny'" in capfd.readouterr().err
    assert run([*arguments, "--reference", "transformers"]) == 2
    assert "no model 'tiny'" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "a"}\n{"prompt": \n', "line 2: not JSON"),
        (b'\n\n{"completion": "a"}\n', 'line 3: an object with a text "prompt"'),
        (b'{"prompt": " "}\n', 'line 1: an object with a text "prompt"'),
        (b"[1]\n", 'line 1: an object with a text "prompt"'),
        (b"\n", "no prompts"),
        (b"\xff\n", "not UTF-8 text"),
    ],
)
def test_malformed_prompts(content: bytes, message: str, bundle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(content)
    assert run(["verify", str(bundle), "--prompts", str(file)]) == 2
    err = capfd.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_prompts_after_the_limit_are_not_looked_at(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a\\u2028b"}\n{"prompt": "c"}\nbroken\n')
    assert read_prompt_rows(file, 2).prompts == ("a\u2028b", "c")
    with pytest.raises(UserError, match="line 3"):
        read_prompt_rows(file, 3)


def test_the_projects_own_prompts_are_read(data_folder: Path) -> None:
    assert len(read_prompt_rows(data_folder / "sql.jsonl", 200).prompts) == 12
    assert len(read_prompt_rows(data_folder / "e2e.jsonl", 200).prompts) == 6


def test_a_bundle_that_cannot_be_written_to(
    own_bundle: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> int:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "write_text", refuse)
    assert run(["verify", str(own_bundle), "--prompts", str(prompts), "--reference", "plain", "--limit", "1"]) == 0
    assert "not recorded" in capfd.readouterr().err


def test_compute_units_are_those_of_the_session() -> None:
    """The command line lists them itself, so that --help does not load the runtime."""
    assert get_args(ComputeUnits) == COMPUTE_UNITS
