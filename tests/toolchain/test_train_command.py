"""train as a user meets it: rows to an adapter to a bundle, a kill in the middle, and bad input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from specstream.runtimes import Bundle, load
from specstream.toolchain.cli import run

from ..models.test_base import model_folder, tiny_config  # noqa: F401 - model_folder is a fixture

SIZES = ["--steps", "6", "--main-steps", "4", "--batch-size", "2", "--num-streams", "2", "--stream-layers", "1", "--stream-rank", "2"]
SIZES += ["--main-rank", "2", "--top-k", "2", "--draft-vocab", "0", "--checkpoint-every", "2", "--max-length", "60", "--precision", "fp32"]
SIZES += ["--entry-rank", "0", "--self-distill", "0"]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"count {i}", "completion": f"{i} {i + 1} {i + 2}"}) + "\n" for i in range(24)))
    return file


def test_train_then_export(model_folder: Path, rows: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    out, report = tmp_path / "adapter", tmp_path / "report.json"
    asked = ["train", str(model_folder), str(rows), str(out), *SIZES]
    assert run([*asked, "--data-license", "CC0", "--json", str(report)]) == 0
    said = capfd.readouterr()
    assert "stream parameters" in said.out
    assert said.err == ""
    # Vectors 2·32, correction map 2·64·32, pair head 3·48·32, LoRA of rank 2 on the seven linear layers of the last layer.
    sizes = [(32, 32), (16, 32), (16, 32), (32, 32), (48, 32), (48, 32), (32, 48)]
    assert json.loads(report.read_text())["stream_parameters"] == 2 * 32 + 2 * 64 * 32 + 3 * 48 * 32 + sum(2 * (a + b) for a, b in sizes)
    expected = {"README.md", "adapter.safetensors", "config.json", "ngrams.npz", "report.json", "train.jsonl", "train.png"}
    assert {path.name for path in out.iterdir()} == expected
    assert "CC0" in (out / "README.md").read_text()
    assert (out / "train.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "adapter.partial").exists()
    log = [json.loads(line) for line in (out / "train.jsonl").read_text().splitlines()]
    assert {line["stage"] for line in log} <= {"main", "streams"}

    bundle = tmp_path / "bundle"
    assert run(["export", str(model_folder), str(bundle), "--adapter", str(out)]) == 0
    streams = Bundle.load(bundle).manifest.streams
    assert streams is not None
    assert (streams.num_streams, streams.mode) == (2, "two-stage")
    capfd.readouterr()

    assert run(asked) == 2
    assert "--force" in capfd.readouterr().err
    # The fine-tune of one adapter under the streams of another.
    second = tmp_path / "second"
    assert run(["train", str(model_folder), str(rows), str(second), *SIZES, "--mode", "lossless", "--main", str(out)]) == 0
    first_main = {n: t for n, t in load_file(out / "adapter.safetensors").items() if n.startswith("main.")}
    second_main = {n: t for n, t in load_file(second / "adapter.safetensors").items() if n.startswith("main.")}
    assert first_main.keys() == second_main.keys()
    assert all(torch.equal(tensor, second_main[name]) for name, tensor in first_main.items())


def test_prompts_alone_are_enough_to_self_distill(model_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    """The model answers them itself; without that, rows need completions."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "adapter"
    prompts.write_text("".join(json.dumps({"prompt": f"count {i}"}) + "\n" for i in range(24)))
    asked = ["train", str(model_folder), str(prompts), str(out), *SIZES, "--mode", "lossless"]
    assert run(asked) == 2
    assert "'completion' must be a non-empty string" in capfd.readouterr().err
    assert run([*asked, "--self-distill", "5"]) == 0
    assert "the model's own answers of up to 5 tokens" in (out / "README.md").read_text()
    assert not list(out.glob("distilled*"))


def test_tokens_per_call_on_held_out_rows_are_those_of_the_runtime(model_folder: Path, rows: Path, tmp_path: Path) -> None:  # noqa: F811
    """Worked out without a graph, measured with one: the same calls, since the texts are the model's own."""
    valid = tmp_path / "valid.jsonl"
    valid.write_text("".join(json.dumps({"prompt": f"count {i}", "completion": "x"}) + "\n" for i in range(100, 112)))
    out, report = tmp_path / "adapter", tmp_path / "report.json"
    sizes = ["--self-distill", "9", "--valid", str(valid), "--steps", "40", "--lr", "0.02", "--json", str(report)]
    assert run(["train", str(model_folder), str(rows), str(out), *SIZES, *sizes]) == 0
    expected = json.loads(report.read_text())["held_out_tokens_per_call"]
    assert 1.0 < expected["8"] <= expected["12"] <= expected["16"] <= 3.0
    assert run(["export", str(model_folder), str(tmp_path / "bundle"), "--adapter", str(out)]) == 0
    lm = load(tmp_path / "bundle")
    for budget in (8, 12, 16):
        found = [lm.generate(f"count {i}", 9, "streams", budget=budget) for i in range(100, 112)]
        got = sum(one.tokens - 1 for one in found) / sum(one.calls for one in found)
        assert got == pytest.approx(expected[str(budget)], abs=1e-3)


def test_a_fine_tune_goes_on(model_folder: Path, rows: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    first, second = tmp_path / "first", tmp_path / "second"
    command = ["train", str(model_folder), str(rows)]
    assert run([*command, str(first), *SIZES, "--main-steps", "12"]) == 0
    assert run([*command, str(second), *SIZES, "--main-steps", "4", "--main-from", str(first), "--main-lr", "1e-5"]) == 0
    # At this rate nothing is learned: the second run ends where the first one did.
    begun = load_file(first / "adapter.safetensors")
    for name, tensor in load_file(second / "adapter.safetensors").items():
        if name.startswith("main."):
            torch.testing.assert_close(tensor, begun[name], atol=1e-3, rtol=1e-2)
    assert "began with that of first" in (second / "README.md").read_text()
    capfd.readouterr()

    third = str(tmp_path / "third")
    assert run([*command, third, *SIZES, "--main-from", str(first), "--main-rank", "3"]) == 2
    assert "its fine-tune has rank 2, not 3; give --main-rank 2" in capfd.readouterr().err
    assert run([*command, third, *SIZES, "--mode", "lossless", "--main-from", str(first)]) == 2
    assert "use --mode two-stage" in capfd.readouterr().err
    lossless = tmp_path / "lossless"
    assert run([*command, str(lossless), *SIZES, "--mode", "lossless"]) == 0
    assert run([*command, third, *SIZES, "--main-from", str(lossless)]) == 2
    assert "has no fine-tune (main.*)" in capfd.readouterr().err
    assert not Path(third).exists()


def test_streams_of_other_sizes_are_no_beginning(
    model_folder: Path,  # noqa: F811
    rows: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    asked = ["train", str(model_folder), str(rows)]
    assert run([*asked, str(tmp_path / "first"), *SIZES, "--mode", "lossless"]) == 0
    again = [*asked, str(tmp_path / "second"), "--streams-from", str(tmp_path / "first"), *SIZES, "--mode", "lossless"]
    capfd.readouterr()
    assert run([*again, "--stream-rank", "4", "--num-streams", "3"]) == 2
    said = capfd.readouterr().err
    assert "stream_rank 2, not 4" in said
    assert "2 streams, 3 wanted" in said
    assert run(again) == 0
    first, second = (
        [json.loads(line) for line in (tmp_path / name / "train.jsonl").read_text().splitlines()] for name in ("first", "second")
    )
    assert second[0]["stream_loss"] != first[0]["stream_loss"]
    assert "with those of first" in (tmp_path / "second" / "README.md").read_text()


def test_an_adapter_of_another_base_is_refused(
    model_folder: Path,  # noqa: F811
    rows: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "adapter"
    assert run(["train", str(model_folder), str(rows), str(out), *SIZES, "--mode", "lossless"]) == 0
    other = tmp_path / "other"
    torch.manual_seed(5)
    LlamaForCausalLM(tiny_config()).save_pretrained(other)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (other / name).write_bytes((model_folder / name).read_bytes())
    capfd.readouterr()
    bundle = tmp_path / "bundle"
    assert run(["export", str(other), str(bundle), "--adapter", str(out)]) == 2
    said = capfd.readouterr()
    assert "trained on another base" in said.err
    assert said.err.count("\n") == 1
    assert not bundle.exists()
    assert not list(tmp_path.glob(".bundle*"))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_run_goes_on(how: signal.Signals, model_folder: Path, rows: Path, tmp_path: Path) -> None:  # noqa: F811
    """Killed or interrupted in the middle: no OUT, a message for Ctrl-C, and the same command ends with the same adapter."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert run(["train", str(model_folder), str(rows), str(whole), *SIZES, "--steps", "60"]) == 0
    command = [sys.executable, "-m", "specstream.toolchain", "train", str(model_folder), str(rows), str(cut), *SIZES, "--steps", "60"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    checkpoint = tmp_path / "cut.partial" / "checkpoint-streams.pt"
    while not checkpoint.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(how)
    _, error = process.communicate(timeout=60)
    assert not cut.exists()
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert "the same command goes on" in error
        assert "Traceback" not in error
    assert run(["train", str(model_folder), str(rows), str(cut), *SIZES, "--steps", "60"]) == 0
    one, two = load_file(whole / "adapter.safetensors"), load_file(cut / "adapter.safetensors")
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, atol=2e-3, rtol=1e-2)


@pytest.mark.parametrize(
    ("arguments", "content", "message"),
    [
        ([], '{"prompt": "a", "completion": "b"}\nnot json\n', "rows.jsonl:2: not JSON"),
        ([], "", "no rows"),
        (["--steps", "0"], None, "steps must be at least 1"),
        (["--num-streams", "99"], None, "num_streams 99 (1 to 32)"),
        (["--stream-layers", "3"], None, "stream_layers 3 (1 to 2, the model's layers)"),
        (["--max-length", "4"], None, "longer than 4 tokens"),
        (["--main", "no-such-adapter"], None, "no adapter 'no-such-adapter'"),
        (["--mode", "shared", "--main", "EMPTY"], None, "not shared"),
        (["--valid", "nowhere.jsonl"], None, "nowhere.jsonl: no such file"),
        (["--threads", "0"], None, "--threads must be at least 1"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    arguments: list[str],
    content: str | None,
    message: str,
    model_folder: Path,  # noqa: F811
    rows: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if content is not None:
        rows.write_text(content)
    (tmp_path / "EMPTY").mkdir()
    given = [str(tmp_path / "EMPTY") if word == "EMPTY" else word for word in arguments]
    assert run(["train", str(model_folder), str(rows), str(tmp_path / "out"), *SIZES, *given]) == 2
    said = capfd.readouterr()
    assert message in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""
    assert {path.name for path in tmp_path.iterdir()} == {"rows.jsonl", "EMPTY"}


def test_a_model_that_is_not_supported_is_refused_before_the_rows_are_encoded(
    rows: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "gpt2"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}')
    assert run(["train", str(folder), str(rows), str(tmp_path / "out"), *SIZES]) == 2
    assert "GPT2LMHeadModel is not supported" in capfd.readouterr().err


@pytest.mark.slow
def test_the_real_model_trains(smollm2_path: Path, data_folder: Path, tmp_path: Path) -> None:
    """SmolLM2: a few steps lower the losses of streams, and its main stream starts where it should."""
    out = tmp_path / "adapter"
    asked = ["train", str(smollm2_path), str(data_folder / "sql.jsonl"), str(out), "--steps", "12", "--main-steps", "2"]
    asked += ["--batch-size", "2", "--draft-vocab", "2048", "--stream-layers", "4", "--max-length", "256", "--checkpoint-every", "100"]
    assert run([*asked, "--num-streams", "3", "--lr", "0.003", "--precision", "fp32", "--self-distill", "0"]) == 0
    log = [json.loads(line) for line in (out / "train.jsonl").read_text().splitlines()]
    main = [line["main_loss"] for line in log if line["stage"] == "main"]
    streams = [line["stream_loss"][0] for line in log if line["stage"] == "streams"]
    assert 0.2 < main[0] < 3.0
    assert streams[-1] < 0.9 * streams[0]
