"""Short training runs that differ in one thing each, and the tokens per call that their streams give: the table of docs/training.md.

    python benchmarks/stream_recipes.py smollm2-135m sql.train.jsonl recipes-sql --main smollm2-135m-sql --valid sql.valid.jsonl

Each recipe trains streams from the start on the same few rows in the same order, then its drafts are measured on held-out rows (without
a graph: see ``specstream.toolchain.draft_quality``). Finished recipes stay in OUT, so a stopped table goes on. ``--answers BUNDLE`` lets
a bundle of the same weights answer the prompts first, in place of the rows' own completions; ``--joint`` compares the three ways to get a
fine-tune with streams instead, on a LoRA of their own.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from specstream.models.errors import UserError
from specstream.models.train import TrainOptions
from specstream.runtimes import load
from specstream.toolchain.cli import run
from specstream.toolchain.report import json_option, write_report
from specstream.toolchain.train_pipeline import train_adapter
from specstream.toolchain.zoo import resolve_adapter

BASE = TrainOptions(
    mode="lossless", num_streams=8, entry_rank=16, stream_weighting="decay", kept_rows=1 << 20, precision="fp32", log_every=5
)
RECIPES: dict[str, dict[str, Any]] = {
    "base": {},
    "4 layers": {"stream_layers": 4},
    "6 layers": {"stream_layers": 6},
    "15 layers": {"stream_layers": 15},
    "15 layers of rank 6": {"stream_layers": 15, "stream_rank": 6},
    "LoRA rank 4": {"stream_rank": 4},
    "LoRA rank 16": {"stream_rank": 16},
    "4 streams": {"num_streams": 4},
    "6 streams": {"num_streams": 6},
    "no entry map": {"entry_rank": 0},
    "no pair head": {"pair_rank": 0},
    "weights 1": {"stream_decay": 1.0},
    "weights 0.7^j": {"stream_decay": 0.7},
    "weights by chance": {"stream_weighting": "chance"},
    "weights by chance itself": {"stream_weighting": "chance", "chance_power": 1.0},
    "the rows' tokens as targets": {"targets": "reference"},
    "fused": {"placement": "fused"},
}
# ``main_steps`` of the fine-tune and as many of the streams; shared mode has both losses in each step.
JOINT: dict[str, dict[str, Any]] = {
    "two-stage": {"mode": "two-stage"},
    "shared": {"mode": "shared", "targets": "reference", "kept_rows": 0},
    "shared with stream losses at 1": {"mode": "shared", "targets": "reference", "kept_rows": 0, "stream_weight": 1.0},
}


def some_rows(file: Path, count: int, bundle: Path | None, threads: int | None) -> list[dict[str, str]]:
    """The first rows of a file; with ``bundle``, its whole greedy answers to their prompts."""
    if not file.is_file():
        raise UserError(f"{file}: no such file; expected JSON lines with 'prompt' and 'completion'")
    with file.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line, _ in zip(lines, range(count), strict=False)]
    if bundle is None:
        return [{"prompt": row["prompt"], "completion": row["completion"]} for row in rows]
    lm = load(bundle, threads=threads)
    answers = []
    for row in track(rows, description=file.name, console=Console(stderr=True), transient=True):
        result = lm.generate(row["prompt"], 128)
        if result.finish_reason == "stop" and result.text.strip():
            answers.append({"prompt": row["prompt"], "completion": result.text})
    return answers


@click.command()
@click.argument("model")
@click.argument("data", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--valid", type=click.Path(path_type=Path), required=True, help="Held-out rows.")
@click.option("--main", metavar="ADAPTER", help="The fine-tune that streams are trained on.")
@click.option("--answers", type=click.Path(path_type=Path), metavar="BUNDLE", help="Answers the prompts, for the rows' completions.")
@click.option("--joint", is_flag=True, help="Compare shared mode with two-stage instead.")
@click.option("--only", metavar="NAMES", help="Recipes, with commas.  [default: all]")
@click.option("--rows", "count", type=click.IntRange(min=8), default=240, show_default=True, help="Rows to train on.")
@click.option("--held-out", type=click.IntRange(min=1), default=48, show_default=True, help="Rows to measure on, 200 at most.")
@click.option("--steps", type=click.IntRange(min=1), default=100, show_default=True)
@click.option("--batch-size", type=click.IntRange(min=1), default=4, show_default=True)
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads.")
@json_option
def recipes(
    model: str,
    data: Path,
    out: Path,
    valid: Path,
    main: str | None,
    answers: Path | None,
    joint: bool,
    only: str | None,
    count: int,
    held_out: int,
    steps: int,
    batch_size: int,
    threads: int | None,
    json_file: Path | None,
) -> None:
    """Tokens per call on held-out rows of short training runs of MODEL on the rows of DATA, kept in OUT."""
    known = JOINT if joint else RECIPES
    names = list(known) if only is None else only.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UserError(f"--only {','.join(unknown)}: recipes are {', '.join(known)}")
    if joint and main is not None:
        raise UserError("--joint trains fine-tunes of its own: leave out --main")
    start = resolve_adapter(main) if main is not None else None
    if threads is not None:
        torch.set_num_threads(threads)
    out.mkdir(exist_ok=True)
    files = {"train": (out / "train.jsonl", data, count), "valid": (out / "valid.jsonl", valid, held_out)}
    for file, source, number in files.values():
        if not file.exists():
            made = some_rows(source, number, answers, threads)
            file.write_text("".join(json.dumps(row) + "\n" for row in made), encoding="utf-8")
    base = dataclasses.replace(BASE, steps=steps, main_steps=steps, batch_size=batch_size)
    console = Console(width=120)
    found = []
    for name in names:
        folder = out / name.replace(" ", "-").replace("'", "")
        if not folder.exists():
            options = dataclasses.replace(base, **known[name])
            train_adapter(model, files["train"][0], folder, options, start_from=start, valid=files["valid"][0], max_length=320)
        report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        found.append({"recipe": name} | report)
        console.print(f"{name}: {report['held_out_tokens_per_call']}, {report['seconds']:.0f} s", highlight=False)
    titles = ("recipe", "8 rows", "12 rows", "16 rows", "agreement", "parameters", "s a step", *(("loss",) if joint else ()))
    table = Table(title=f"{data.name}: {steps} steps of {batch_size} rows, {held_out} held-out rows")
    for title in titles:
        table.add_column(title, justify="left" if title == "recipe" else "right")
    for report in found:
        per_call = [f"{x:.2f}" for x in report["held_out_tokens_per_call"].values()]
        agreement = " ".join(f"{x:.2f}" for x in report["held_out_agreement"])
        cells = [report["recipe"], *per_call, agreement, f"{report['stream_parameters']:,}", f"{report['seconds'] / steps:.1f}"]
        table.add_row(*cells, *([f"{report['held_out_main_loss']:.3f}"] if joint else []))
    console.print(table)
    write_report(json_file, "recipes", {"data": data.name, "recipes": found})


if __name__ == "__main__":
    import sys

    sys.exit(run(sys.argv[1:], recipes, "stream_recipes.py"))
