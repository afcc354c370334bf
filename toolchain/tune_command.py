"""``specstream tune``."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import click

from specstream.models.errors import UserError
from specstream.toolchain.prompt_rows import read_prompt_rows
from specstream.toolchain.report import json_option, write_report

if TYPE_CHECKING:
    from specstream.runtimes.profile import DeviceProfile


def _numbers(_context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """``1,2,4`` as numbers from 1."""
    if value is None:
        return None
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UserError(f"--{parameter.name} {value}: numbers from 1 with commas between them were expected, like 1,2")
    return tuple(sorted({int(part) for part in parts}))


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--prompts", "prompts_file", type=click.Path(path_type=Path), metavar="FILE", help='JSON lines with "prompt", of your task.')
@click.option("--limit", type=click.IntRange(min=1), default=16, show_default=True, help="Take the first prompts only.")
@click.option("--threads", callback=_numbers, metavar="LIST", help="Threads to try. [default: 1, 2, 4, ... all usable cores]")
@click.option("--contexts", callback=_numbers, default="128,512", show_default=True, metavar="LIST", help="Tokens before a timed call.")
@click.option("--rounds", type=click.IntRange(min=1), default=9, show_default=True, help="Timed calls of each kind.")
@click.option("--max-new-tokens", type=click.IntRange(min=2), default=64, show_default=True, help="Tokens of each sample text at most.")
@click.option("--plot", "plot_file", type=click.Path(path_type=Path), metavar="PNG", help="Draw the curves (needs matplotlib).")
@json_option
def tune(
    bundle: Path,
    prompts_file: Path | None,
    limit: int,
    threads: tuple[int, ...] | None,
    contexts: tuple[int, ...],
    rounds: int,
    max_new_tokens: int,
    plot_file: Path | None,
    json_file: Path | None,
) -> None:
    """Measure the bundle in the folder BUNDLE on this device, and choose threads, drafts and rows of a call for it.

    Times calls with more and more rows, decodes sample prompts, and works out what gives most tokens per second. The choice is kept
    in the user's cache folder, where generate, chat and others find it. Give prompts of your task: what pays depends on them. Leave
    the machine alone meanwhile.

    \b
    Example:
      specstream tune sql-bundle --prompts tests/data/sql.jsonl
    """
    from specstream.runtimes.ort_session import usable_cores
    from specstream.runtimes.profile import save_profile
    from specstream.toolchain.terminal import step_status
    from specstream.toolchain.tune_pipeline import SAMPLE_PROMPTS, TuneOptions, default_threads
    from specstream.toolchain.tune_pipeline import tune as measure

    prompts = list(SAMPLE_PROMPTS) if prompts_file is None else list(read_prompt_rows(prompts_file, limit, "--prompts").prompts)
    cores = usable_cores()
    if threads is not None and threads[-1] > cores:
        raise UserError(f"--threads {threads[-1]}: this process may use {cores} cores")
    if plot_file is not None and not plot_file.absolute().parent.is_dir():
        raise UserError(f"--plot {plot_file}: there is no folder {plot_file.absolute().parent}")
    options = TuneOptions(threads or default_threads(cores), contexts, rounds, max_new_tokens)
    with step_status() as step:
        profile, manifest = measure(bundle, prompts, options, step)
    _print(profile)
    if prompts_file is None:
        click.echo("measured with general sample prompts; --prompts FILE tunes for your task", err=True)
    path = save_profile(profile, manifest)
    click.echo(f"kept in {path}", err=True)
    if plot_file is not None:
        if importlib.util.find_spec("matplotlib") is None:
            click.echo("no plot: matplotlib is not installed (pip install matplotlib)", err=True)
        else:
            from specstream.toolchain.tune_plot import plot

            plot(profile, plot_file)
    write_report(
        json_file, "tune", {"bundle": str(bundle), "prompts_file": prompts_file and str(prompts_file), "profile": profile.to_dict()}
    )


def _print(profile: DeviceProfile) -> None:
    from rich.table import Table

    from specstream.toolchain.terminal import table_console

    console = table_console()
    table = Table(title=f"{profile.model}, {profile.scheme}: ms of a call")
    for column in ("threads", "context"):
        table.add_column(column, justify="right")
    kinds = list(dict.fromkeys((call.rows, call.stream_rows) for call in profile.call_cost))
    for rows, streamed in kinds:
        name = f"{rows} row{'s' if rows > 1 else ''}" if not streamed else "streams" if not rows else f"{rows} + {streamed} streams"
        table.add_column(name, justify="right")
    for threads, context in dict.fromkeys((call.threads, call.context) for call in profile.call_cost):
        ms = {(c.rows, c.stream_rows): c.ms for c in profile.call_cost if (c.threads, c.context) == (threads, context)}
        table.add_row(str(threads), str(context), *(f"{ms[kind]:.1f}" for kind in kinds))
    console.print(table)
    table = Table(title=f"{profile.prompts} sample prompts: tokens per call, and tokens/s worked out from them")
    table.add_column("drafts")
    budgets = sorted({speed.budget for speed in profile.speeds if speed.draft != "none"})
    for budget in budgets:
        table.add_column(f"{budget} rows", justify="right")
    for draft, stream_rows in dict.fromkeys((s.draft, s.stream_rows) for s in profile.speeds if s.draft != "none"):
        found = {s.budget: s for s in profile.speeds if (s.draft, s.stream_rows) == (draft, stream_rows)}
        name = draft if profile.placement != "fused" or not stream_rows else f"{draft}, {stream_rows} rows with streams"
        table.add_row(name, *(f"{found[b].tokens_per_call:.2f}  {found[b].tokens_per_second:.0f}/s" for b in budgets))
    console.print(table)
    streams = f", {profile.stream_rows} with streams" if profile.stream_rows and profile.placement == "fused" else ""
    size = "" if profile.draft == "none" else f", {profile.budget} rows a call{streams}"
    click.echo(
        f"chosen: {profile.threads} threads, drafts {profile.draft}{size}: about {profile.tokens_per_second:.0f} tokens/s, "
        f"{profile.tokens_per_second / profile.plain_tokens_per_second:.2f}x plain decoding"
    )
