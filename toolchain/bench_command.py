"""``specstream bench``."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import click

from specstream.models.errors import UserError
from specstream.toolchain.report import json_option, write_report

if TYPE_CHECKING:
    from specstream.toolchain.bench_pipeline import BenchReport, Run


def _names(_context: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:
    """``none,auto`` as names; what they may be is the runtime's to say."""
    names = tuple(dict.fromkeys(part.strip() for part in value.split(",")))
    if "" in names:
        raise UserError(f"--{parameter.name} {value}: names with commas between them were expected, like none,auto")
    return names


def _contexts(_context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    """``128,512`` as numbers; ``none`` is none."""
    if value == "none":
        return ()
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UserError(f"--{parameter.name} {value}: numbers from 1 with commas between them were expected, like 128,512, or none")
    return tuple(sorted({int(part) for part in parts}))


@click.command()
@click.argument("bundles", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="BUNDLE...")
@click.option(
    "--task",
    "task_files",
    type=click.Path(path_type=Path),
    multiple=True,
    required=True,
    metavar="FILE",
    help='JSON lines with "prompt", and "completion" to compare with. May be given several times.',
)
@click.option("--limit", type=click.IntRange(min=1), default=100, show_default=True, help="Take the first prompts of a task only.")
@click.option(
    "--drafts", callback=_names, default="none,auto", show_default=True, metavar="LIST", help="Drafters; none is always among them."
)
@click.option("--budget", type=click.IntRange(min=1), metavar="ROWS", help="Rows of a verifying call at most.  [default: as many as pay]")
@click.option("--threads", type=click.IntRange(min=1), help="Threads of ONNX Runtime. [default: all usable cores]")
@click.option("--max-new-tokens", type=click.IntRange(min=2), default=128, show_default=True, help="Tokens of each text at most.")
@click.option(
    "--contexts", callback=_contexts, default="128", show_default=True, metavar="LIST", help="Tokens before a timed call; none: no such."
)
@click.option("--rounds", type=click.IntRange(min=1), default=9, show_default=True, help="Timed calls of each kind.")
@click.option("--plot", "plot_file", type=click.Path(path_type=Path), metavar="PNG", help="Draw the figures (needs matplotlib).")
@json_option
def bench(
    bundles: tuple[Path, ...],
    task_files: tuple[Path, ...],
    limit: int,
    drafts: tuple[str, ...],
    budget: int | None,
    threads: int | None,
    max_new_tokens: int,
    contexts: tuple[int, ...],
    rounds: int,
    plot_file: Path | None,
    json_file: Path | None,
) -> None:
    """Measure the bundles in the folders BUNDLE on tasks: tokens per second with and without drafts, tokens per call, quality.

    All bundles and drafters answer each prompt in turn, in one process. Ratios are to the same bundle without drafts, and to the
    fastest bundle without drafts. Leave the machine alone meanwhile: times of a busy one mean nothing.

    \b
    Example:
      specstream bench sql-int4 sql-w8a8 --task benchmarks/data/sql.jsonl --threads 2 --json bench.json
    """
    from specstream.runtimes.ort_session import usable_cores
    from specstream.toolchain.bench_pipeline import BenchOptions, read_task
    from specstream.toolchain.bench_pipeline import bench as measure
    from specstream.toolchain.export_pipeline import peak_rss_bytes
    from specstream.toolchain.terminal import step_status

    tasks = [read_task(file, limit) for file in task_files]
    if len({task.name for task in tasks}) < len(tasks):
        raise UserError("two --task files have the same name; the report tells tasks apart by it, so rename one")
    cores = usable_cores()
    if threads is not None and threads > cores:
        raise UserError(f"--threads {threads}: this process may use {cores} cores")
    if plot_file is not None and not plot_file.absolute().parent.is_dir():
        raise UserError(f"--plot {plot_file}: there is no folder {plot_file.absolute().parent}")
    options = BenchOptions(drafts, threads or cores, max_new_tokens, budget or "adaptive", contexts, rounds)
    with step_status() as step:
        report = measure(bundles, tasks, options, step)
    _print(report)
    if plot_file is not None:
        if importlib.util.find_spec("matplotlib") is None:
            click.echo("no plot: matplotlib is not installed (pip install matplotlib)", err=True)
        else:
            from specstream.toolchain.bench_plot import plot

            plot(report, plot_file)
    made_by = {
        "model": report.bundles[0].model,
        "scheme": ", ".join(dict.fromkeys(bundle.scheme for bundle in report.bundles)),
        "task_files": [str(file) for file in task_files],
        "max_new_tokens": max_new_tokens,
        "budget": options.budget,
        "peak_rss_bytes": peak_rss_bytes(),
    }
    write_report(json_file, "bench", made_by | report.to_json())


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def _print(report: BenchReport) -> None:
    from rich.table import Table

    from specstream.toolchain.terminal import table_console

    console = table_console()
    if not console.is_terminal:
        console.width = 160  # a file has no edge, and 80 columns would break words
    for task in dict.fromkeys(run.task for run in report.runs):
        runs = [run for run in report.runs if run.task == task]
        rated = any(run.quality for run in runs)
        table = Table(title=f"{task}: {runs[0].prompts} prompts, {report.threads} threads; medians over prompts, prefill apart")
        for column in ("bundle", "drafts"):
            table.add_column(column)
        for column in (
            "tokens/s",
            "vs plain",
            "vs fastest plain",
            "tokens/call",
            "calls",
            "ms/call",
            "first token ms",
        ):
            table.add_column(column, justify="right")
        for column in ("outside ORT", "same text", *(("exact match", "ROUGE-L") if rated else ())):
            table.add_column(column, justify="right")
        for run in runs:
            table.add_row(*_row(run, rated))
        console.print(table)
    if report.call_cost:
        table = Table(title=f"ms of a call by its rows, {report.threads} threads")
        table.add_column("bundle")
        table.add_column("context", justify="right")
        kinds = list(dict.fromkeys((call.rows, call.stream_rows) for call in report.call_cost))
        for rows, streamed in kinds:
            name = f"{rows}" if not streamed else "streams" if not rows else f"{rows} + {streamed} with streams"
            table.add_column(name, justify="right")
        for bundle, context in dict.fromkeys((call.bundle, call.context) for call in report.call_cost):
            ms = {(c.rows, c.stream_rows): c.ms for c in report.call_cost if (c.bundle, c.context) == (bundle, context)}
            table.add_row(bundle, str(context), *(_number(ms.get(kind), ".2f") for kind in kinds))
        console.print(table)
    for facts in report.bundles:
        memory = "" if facts.memory_bytes is None else f", {facts.memory_bytes / 1e6:.0f} MB in memory"
        tuned = "with the device profile" if facts.profile else "not tuned on this device"
        click.echo(f"{facts.bundle}: {facts.model}, {facts.scheme}, {facts.bundle_bytes / 1e6:.0f} MB on disk{memory}, {tuned}")


def _row(run: Run, rated: bool) -> list[str]:
    plain = run.drafter == "none"
    cells = [
        run.bundle,
        "plain" if plain else run.drafter,
        _number(run.tokens_per_second, ".1f"),
        "" if plain else _times(run.speedup_vs_plain),
        _times(run.speedup_vs_fastest_plain),
        _number(run.tokens_per_call, ".2f"),
        str(run.calls),
        _number(run.ms_per_call, ".2f"),
        f"{run.first_token_seconds * 1e3:.0f}",
        _number(run.outside_runtime_share, ".1%"),
        f"{run.same_as_plain:.0%}",
    ]
    if rated:
        cells += ["", ""] if run.quality is None else [f"{run.quality.exact_match:.1%}", f"{run.quality.rouge_l:.3f}"]
    return cells
