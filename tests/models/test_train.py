"""Training runs on a tiny model: each mode learns, a seed repeats, a killed run resumes exactly, two processes equal one."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from specstream.models.adapter import Adapter, build_stream_model, load_adapter, merge_main, save_adapter
from specstream.models.base import identity
from specstream.models.calibrate import fit_temperatures, held_out_drafts
from specstream.models.data import TokenRow
from specstream.models.errors import UserError
from specstream.models.train import Trained, TrainOptions, train

from ..export.tiny import tiny_base

OPTIONS = TrainOptions(
    mode="two-stage", steps=30, main_steps=20, batch_size=4, learning_rate=1e-2, main_learning_rate=1e-2, num_streams=2, stream_layers=1,
    stream_rank=4, main_rank=4, top_k=3, draft_vocab_size=0, segment=4, precision="fp32", checkpoint_every=7, log_every=1,
)  # fmt: skip


def counting_rows(count: int = 64) -> list[TokenRow]:
    """A task that streams can learn: after the prompt's number come the next ones."""
    order = random.Random(0)
    rows = []
    for _ in range(count):
        start, length = order.randrange(5, 60), order.randrange(4, 12)
        rows.append(TokenRow((3, start, 4, *range(start + 1, start + 1 + length), 2), 3))
    return rows


def run(work: Path, options: TrainOptions = OPTIONS, **more: Any) -> Trained:
    base = tiny_base("Llama")
    return train(base, identity(base, "LlamaForCausalLM"), counting_rows(), work, options, **more)


def lines(work: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (work / "train.jsonl").read_text().splitlines()]


def without_time(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k != "seconds"} for line in log]


@pytest.mark.parametrize("mode", ["lossless", "two-stage", "shared"])
def test_every_mode_learns_and_ships(mode: str, tmp_path: Path) -> None:
    options = dataclasses.replace(OPTIONS, mode=mode, steps=60, main_steps=60)
    if mode == "shared":  # a moving target and a tenth of the weight show little in 60 steps
        options = dataclasses.replace(options, targets="reference", stream_weight=1.0)
    trained = run(tmp_path / "work", options)
    log = lines(tmp_path / "work")
    streams = [line for line in log if "stream_loss" in line]
    # A random base, or one after few steps, says little that a stream could know before.
    assert streams[-1]["stream_loss"][0] < 0.9 * streams[0]["stream_loss"][0]
    if mode != "lossless":
        main = [line["main_loss"] for line in log if "main_loss" in line]
        assert main[-1] < 0.7 * main[0]
    assert trained.config.main_rank == (0 if mode == "lossless" else 4)
    assert trained.config.stream_rank == (0 if mode == "shared" else 4)
    # What ships does what was trained.
    (tmp_path / "adapter").mkdir()
    save_adapter(tmp_path / "adapter", trained.config, trained.tensors)
    shipped = build_stream_model(tiny_base("Llama"), load_adapter(tmp_path / "adapter"))
    rows = counting_rows(16)
    before, after = (fit_temperatures(held_out_drafts(model, rows)) for model in (trained.model, shipped))
    assert after.loss == pytest.approx(before.loss, rel=0.02)


def test_lossless_leaves_the_base_alone(tmp_path: Path) -> None:
    trained = run(tmp_path / "work", dataclasses.replace(OPTIONS, mode="lossless", steps=5))
    ids = torch.tensor([[3, 9, 4, 10, 11]])
    with torch.no_grad():
        expected = tiny_base("Llama")(ids).logits
        got = trained.model.head(trained.model.main_pass(ids).final)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_segments_do_not_change_the_run(tmp_path: Path) -> None:
    for mode in ("lossless", "shared"):
        options = dataclasses.replace(OPTIONS, mode=mode, steps=6)
        one = run(tmp_path / f"{mode}-1", options)
        two = run(tmp_path / f"{mode}-2", dataclasses.replace(options, segment=64))
        for name, tensor in one.tensors.items():
            torch.testing.assert_close(two.tensors[name], tensor, atol=2e-4, rtol=2e-3)


def test_a_seed_repeats_and_another_does_not(tmp_path: Path) -> None:
    options = dataclasses.replace(OPTIONS, steps=5, main_steps=5)
    one, two = run(tmp_path / "1", options), run(tmp_path / "2", options)
    assert without_time(lines(tmp_path / "1")) == without_time(lines(tmp_path / "2"))
    assert all(torch.equal(one.tensors[name], two.tensors[name]) for name in one.tensors)
    run(tmp_path / "3", dataclasses.replace(options, seed=1))
    assert without_time(lines(tmp_path / "1")) != without_time(lines(tmp_path / "3"))


@pytest.mark.parametrize("kill_after", [3, 11, 23, 44])
def test_a_killed_run_resumes_exactly(kill_after: int, tmp_path: Path) -> None:
    """Stopped inside the fine-tune or the streams, before or after a checkpoint: the same log, the same bits."""
    whole = run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", stop_after=kill_after)
    resumed = run(tmp_path / "cut")
    assert without_time(lines(tmp_path / "cut")) == without_time(lines(tmp_path / "whole"))
    assert all(torch.equal(resumed.tensors[name], whole.tensors[name]) for name in whole.tensors)


def test_a_run_of_other_options_is_not_continued(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "work", stop_after=8)
    with pytest.raises(UserError, match="holds a run with other options"):
        run(tmp_path / "work", dataclasses.replace(OPTIONS, learning_rate=1e-3))


def test_streams_on_a_finished_fine_tune(tmp_path: Path) -> None:
    """``start_from`` gives the second stage of the two-stage run."""
    whole = run(tmp_path / "whole")
    rest = run(tmp_path / "rest", start_from=Adapter(whole.config, whole.tensors))
    assert all(torch.equal(rest.tensors[name], whole.tensors[name]) for name in whole.tensors)


def test_a_fine_tune_goes_on_from_another(tmp_path: Path) -> None:
    """Its first step already knows what the other learned; both belong to the run's identity."""
    first = run(tmp_path / "first", dataclasses.replace(OPTIONS, main_steps=60))
    options = dataclasses.replace(OPTIONS, seed=1)
    run(tmp_path / "second", options, start_main=Adapter(first.config, first.tensors))
    begun, fresh = ([x["main_loss"] for x in lines(tmp_path / name) if x["stage"] == "main"] for name in ("second", "first"))
    assert begun[0] < 0.8 * fresh[0]
    with pytest.raises(UserError, match="holds a run with other options"):
        run(tmp_path / "second", options)


def test_main_and_stream_gradients_are_clipped_apart(tmp_path: Path) -> None:
    """However large the streams' losses, the fine-tune of shared mode takes its own steps."""
    options = dataclasses.replace(OPTIONS, mode="shared", steps=40, learning_rate=1e-9, targets="reference")
    for weight in (1e-3, 1e6):
        run(tmp_path / f"{weight}", dataclasses.replace(options, stream_weight=weight))
    small, large = ([x["main_loss"] for x in lines(tmp_path / name)] for name in ("0.001", "1000000.0"))
    assert small[-1] < 0.7 * small[0]
    assert large[-1] < 0.85 * large[0]


def plainly_continued(base: Any, prompt: list[int], count: int) -> list[int]:
    """Greedy, one token after the other, without a cache or padding."""
    ids = list(prompt)
    with torch.inference_mode():
        while len(ids) < len(prompt) + count and ids[-1] != 2:
            ids.append(int(base(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids


@pytest.mark.parametrize("mode", ["lossless", "two-stage"])
def test_self_distilled_rows_are_what_the_frozen_model_says(mode: str, tmp_path: Path) -> None:
    """Whatever the rows answer; after the fine-tune in two-stage mode; the same after a kill while they were made."""
    options = dataclasses.replace(OPTIONS, mode=mode, self_distill=6, kept_rows=40, steps=4)
    held_out = counting_rows(70)[-6:]
    whole = run(tmp_path / "whole", options, held_out=held_out)
    base = tiny_base("Llama")
    if mode == "two-stage":
        merge_main(base, Adapter(whole.config, whole.tensors))
    assert (len(whole.rows), len(whole.held_out)) == (40, 6)
    for row in (*whole.rows, *whole.held_out):
        assert list(row.ids) == plainly_continued(base, list(row.ids[: row.start]), 6)
    assert {row.ids[: row.start] for row in whole.rows} <= {row.ids[: row.start] for row in counting_rows()}

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", options, held_out=held_out, stop_after=1 + options.main_steps * (mode == "two-stage"))
    made = tmp_path / "cut" / "distilled.jsonl"
    batches = made.read_text().splitlines(keepends=True)
    assert len(batches) == 2
    made.write_text(batches[0] + batches[1][:20])  # as a kill within a line leaves it
    resumed = run(tmp_path / "cut", options, held_out=held_out)
    assert (resumed.rows, resumed.held_out) == (whole.rows, whole.held_out)
    assert all(torch.equal(resumed.tensors[name], whole.tensors[name]) for name in whole.tensors)


def test_streams_begin_with_those_of_another_run(tmp_path: Path) -> None:
    """The first step already knows what they knew, and the run does not go on as one from the start."""
    options = dataclasses.replace(OPTIONS, mode="lossless", steps=60)
    first = run(tmp_path / "first", options)
    given = Adapter(first.config, first.tensors)
    fewer = dataclasses.replace(options, num_streams=1, seed=1)
    second = run(tmp_path / "second", fewer, start_streams=given, stop_after=None)
    assert second.tensors["streams.stream_vectors"].shape[0] == 1
    from_start, begun = lines(tmp_path / "first"), lines(tmp_path / "second")
    assert begun[0]["stream_loss"][0] < (from_start[0]["stream_loss"][0] + from_start[-1]["stream_loss"][0]) / 2
    with pytest.raises(UserError, match="holds a run with other options"):
        run(tmp_path / "second", fewer)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mode": "shared", "self_distill": 8}, "self_distill needs a frozen base"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"main_rank": 0}, "two-stage needs"),
        ({"mode": "shared", "main_rank": 0}, "shared needs a main_rank"),
        ({"stream_rank": 0}, "stream_rank"),
        ({"learning_rate": 0.0}, "learning_rate must be above 0"),
    ],
)
def test_options_are_checked(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        dataclasses.replace(OPTIONS, **change)


def test_vectors_start_at_the_size_of_the_states(tmp_path: Path) -> None:
    trained = run(tmp_path / "work", dataclasses.replace(OPTIONS, mode="lossless", steps=1, learning_rate=1e-9))
    rows = counting_rows(8)
    with torch.no_grad():
        entry = trained.model.main_pass(torch.tensor([rows[0].ids])).entry
    ratio = float(trained.tensors["streams.stream_vectors"].std() / entry.pow(2).mean().sqrt())
    assert 0.1 < ratio < 0.9


def test_two_processes_give_the_loss_of_one(tmp_path: Path) -> None:
    """Gloo, two processes on CPU: each step's summed losses and the trained values equal those of one process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for mode in ("two-stage", "shared"):
        options = dataclasses.replace(OPTIONS, mode=mode, steps=6, main_steps=6, batch_size=5)
        one = run(tmp_path / f"one-{mode}", options)
        script = tmp_path / f"{mode}.py"
        script.write_text(
            textwrap.dedent(f"""
            import sys, torch
            from pathlib import Path
            sys.path.insert(0, {str(Path(__file__).parents[2])!r})
            torch.set_num_threads(1)
            from tests.models.test_train import OPTIONS, run
            import dataclasses
            options = dataclasses.replace(OPTIONS, mode={mode!r}, steps=6, main_steps=6, batch_size=5)
            trained = run(Path({str(tmp_path)!r}) / "two-{mode}", options)
            if trained.primary:
                torch.save(trained.tensors, Path({str(tmp_path)!r}) / "{mode}.pt")
            torch.distributed.destroy_process_group()
            """)
        )
        shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
        places = [os.environ | shared | {"RANK": str(i), "LOCAL_RANK": str(i)} for i in range(2)]
        processes = [subprocess.Popen([sys.executable, str(script)], env=env, stderr=subprocess.PIPE, text=True) for env in places]
        errors = [process.communicate(timeout=240)[1] for process in processes]
        assert [process.returncode for process in processes] == [0, 0], errors
        for mine, theirs in zip(lines(tmp_path / f"one-{mode}"), lines(tmp_path / f"two-{mode}"), strict=True):
            for key in ("main_loss", "stream_loss", "stream_accuracy", "prune_loss"):
                if key in mine:
                    assert theirs[key] == pytest.approx(mine[key], abs=2e-4), (mode, key)
        two = torch.load(tmp_path / f"{mode}.pt", weights_only=True)
        # Adam makes a whole step of a gradient that is nearly nothing, whichever way it rounds: one value in a thousand may differ.
        off = [~torch.isclose(two[name], tensor, atol=3e-3, rtol=3e-2) for name, tensor in one.tensors.items()]
        assert float(torch.cat([values.flatten() for values in off]).float().mean()) < 1e-3
        for name, tensor in one.tensors.items():
            torch.testing.assert_close(two[name], tensor, atol=3e-2, rtol=3e-2)
