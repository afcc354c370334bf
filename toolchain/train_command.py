"""``specstream train``."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import click

from specstream.models.config import Mode, Placement
from specstream.toolchain.report import json_option, write_report


@click.command()
@click.argument("model")
@click.argument("data", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--mode", type=click.Choice(get_args(Mode)), default="two-stage", show_default=True, help="What is trained; see above.")
@click.option("--steps", type=int, default=1500, show_default=True, help="Optimizer steps of the streams.")
@click.option("--main-steps", type=int, default=800, show_default=True, help="Optimizer steps of the fine-tune (two-stage).")
@click.option(
    "--main", "start_from", metavar="ADAPTER", help="A finished fine-tune to train streams on: an adapter of ours or of PEFT (LoRA)."
)
@click.option("--main-from", metavar="ADAPTER", help="Go on with the fine-tune of this adapter for --main-steps more (two-stage).")
@click.option("--streams-from", metavar="ADAPTER", help="Begin with the streams of this adapter, made for another task.")
@click.option("--valid", type=click.Path(path_type=Path), help="Held-out rows to calibrate streams on; every 50th row of DATA without it.")
@click.option("--batch-size", type=int, default=8, show_default=True, help="Rows a step, over all processes.")
@click.option("--lr", "learning_rate", type=float, default=2e-3, show_default=True, help="Peak learning rate of the streams.")
@click.option("--main-lr", "main_learning_rate", type=float, default=1e-3, show_default=True, help="Peak learning rate of the fine-tune.")
@click.option("--num-streams", type=int, default=8, show_default=True, help="Streams beside a row (γ).")
@click.option("--stream-layers", type=int, default=0, help="Top layers that run streams (N_s).  [default: a third of the layers]")
@click.option(
    "--placement",
    type=click.Choice(get_args(Placement)),
    default="delayed",
    show_default=True,
    help="delayed: streams run after acceptance and know the correction token; fused: beside the tree (the papers).",
)
@click.option("--stream-rank", type=int, default=8, show_default=True, help="LoRA rank on stream rows.")
@click.option("--main-rank", type=int, default=8, show_default=True, help="LoRA rank of the fine-tune.")
@click.option("--entry-rank", type=int, default=16, show_default=True, help="Rank of the entry map f_η; 0 is the identity.")
@click.option("--correction-rank", type=int, default=64, show_default=True, help="Rank of the correction token's map (delayed).")
@click.option("--pair-rank", type=int, default=48, show_default=True, help="Rank of the head that re-scores by parent token (delayed).")
@click.option("--prune-rank", type=int, default=0, show_default=True, help="Rank of the pruning adapter o_θ; 0: none.")
@click.option("--kept-rows", type=int, default=2048, show_default=True, help="Rows for streams, their main states kept; 0: all, none kept.")
@click.option(
    "--self-distill",
    type=int,
    metavar="TOKENS",
    help="Streams learn answers of the model itself, of so many tokens at most, to the prompts of DATA; 0: the answers in DATA.  "
    "[default: 128, in shared mode 0]",
)
@click.option("--top-k", type=int, default=8, show_default=True, help="Candidates a stream returns (k).")
@click.option("--draft-vocab", "draft_vocab_size", type=int, default=8192, show_default=True, help="Tokens streams choose from; 0 for all.")
@click.option("--stream-decay", type=float, default=0.85, show_default=True, help="Loss weight of stream j+1 relative to stream j.")
@click.option(
    "--stream-weighting",
    type=click.Choice(["chance", "decay"]),
    default="chance",
    show_default=True,
    help="Loss weights by stream, times the chance that the streams before were right, or alone.",
)
@click.option("--stream-weight", type=float, help="Loss weight of stream 1.  [default: 1, in shared mode 0.1]")
@click.option(
    "--targets",
    type=click.Choice(["model", "reference"]),
    default="model",
    show_default=True,
    help="Streams learn the model's own distribution, or the rows' tokens (as in the papers).",
)
@click.option("--max-length", type=int, default=1024, show_default=True, help="Leave out rows of more tokens.")
@click.option("--precision", type=click.Choice(["auto", "bf16", "fp32"]), default="auto", help="auto: bf16 where the CPU has it.")
@click.option("--checkpoint-every", type=int, default=100, show_default=True, metavar="STEPS", help="Steps between checkpoints.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed gives the same run.")
@click.option("--threads", type=int, help="CPU threads.  [default: all cores]")
@click.option("--data-license", metavar="TEXT", help="Licence of DATA, for the adapter's card.")
@click.option("--force", is_flag=True, help="Replace OUT, and forget an unfinished run of it.")
@json_option
def train(
    model: str,
    data: Path,
    out: Path,
    start_from: str | None,
    main_from: str | None,
    streams_from: str | None,
    valid: Path | None,
    max_length: int,
    threads: int | None,
    data_license: str | None,
    force: bool,
    json_file: Path | None,
    **options: Any,
) -> None:
    """Train streams for MODEL on the rows of DATA and write a stream adapter to the new folder OUT.

    DATA has lines {"prompt": ..., "completion": ...}. Modes: two-stage fine-tunes the model (LoRA), then trains streams on the
    result; lossless leaves the model as it is and trains streams alone; shared trains one LoRA for both at once. A run that was
    stopped goes on when the same command is given again. With several devices or processes: accelerate launch -m
    specstream.toolchain train ...

    \b
    Example:
      specstream train smollm2-135m sql.train.jsonl sql-adapter --mode two-stage
    """
    from specstream.toolchain.extras import require
    from specstream.toolchain.zoo import resolve_adapter

    require("train")
    folder = resolve_adapter(start_from) if start_from is not None else None
    earlier = resolve_adapter(main_from) if main_from is not None else None
    other = resolve_adapter(streams_from) if streams_from is not None else None
    for path in (data, valid):
        if path is not None and not path.is_file():
            raise click.UsageError(f"{path}: no such file; expected JSON lines with 'prompt' and 'completion'")

    import torch

    from specstream.models.train import TrainOptions
    from specstream.toolchain.train_pipeline import train_adapter, work_folder

    if options["self_distill"] is None:
        options["self_distill"] = 0 if options["mode"] == "shared" else 128
    checked = TrainOptions(**options)
    if threads is not None:
        if threads < 1:
            raise click.UsageError("--threads must be at least 1")
        torch.set_num_threads(threads)
    command = shlex.join(["specstream", *sys.argv[1:]])
    try:
        with _progress() as progress:
            report = train_adapter(
                model,
                data,
                out,
                checked,
                start_from=folder,
                main_from=earlier,
                streams_from=other,
                valid=valid,
                max_length=max_length,
                data_license=data_license,
                force=force,
                command=command,
                progress=progress,
                say=lambda line: click.echo(line, err=True),
            )
    except KeyboardInterrupt:
        if (work_folder(out) / "run.json").exists():
            click.echo(f"stopped; the same command goes on from the last checkpoint in {work_folder(out)}", err=True)
        raise
    if not report:
        return
    agreement = " ".join(f"{x:.2f}" for x in report["held_out_agreement"])
    click.echo(f"{out}: {report['stream_parameters']:,} stream parameters, {report['main_parameters']:,} of the fine-tune")
    click.echo(f"held-out agreement of streams 1 to {checked.num_streams} with the model's own choice: {agreement}")
    per_call = ", ".join(f"{x:.2f} at {budget}" for budget, x in report["held_out_tokens_per_call"].items())
    click.echo(f"tokens per call on held-out rows, streams alone: {per_call} rows a call")
    write_report(json_file, "train", report)


@contextmanager
def _progress() -> Iterator[Any]:
    """A bar per stage with the latest figures; silent in a pipe and in all processes but the first."""
    if not sys.stderr.isatty() or os.environ.get("RANK", "0") != "0":
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from specstream.toolchain.terminal import console

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[figures]}"),
    )
    with Progress(*columns, console=console()) as bars:
        tasks: dict[str, Any] = {}

        def show(stage: str, done: int, steps: int, figures: dict[str, Any]) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(f"stage {stage}", total=steps, figures="")
            parts = [f"loss {figures['main_loss']:.2f}"] if "main_loss" in figures else []
            if "stream_accuracy" in figures:
                parts.append("agreement " + " ".join(f"{x:.2f}" for x in figures["stream_accuracy"]))
            bars.update(tasks[stage], completed=done, figures="  ".join(parts))

        yield show
