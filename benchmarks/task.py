"""What a bundle does on a task: tokens per call at several budgets, exact match, and speed against plain decoding.

    python benchmarks/task.py BUNDLE benchmarks/data/sql.jsonl --budgets 8,12,16 --json report.json
    python benchmarks/task.py BUNDLE benchmarks/data/sql.jsonl --speed --threads 2

Tokens per call and exact match do not depend on what else the machine does. ``--speed`` does: run it with nothing else running.
It answers each prompt plainly and with speculation in turn, in one process, and reports the median of the prompts' ratios.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import track
from rich.table import Table

from specstream.models.errors import UserError
from specstream.runtimes import load, share_threads
from specstream.runtimes.language_model import Budget, LanguageModel, StreamRows
from specstream.toolchain.cli import run
from specstream.toolchain.report import json_option, write_report


def read(path: Path, limit: int) -> list[dict[str, Any]]:
    """The first rows of a JSONL file with ``prompt`` and ``completion``."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; expected JSON lines with 'prompt' and 'completion'")
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for _, line in zip(range(limit), lines, strict=False)]


def same(text: str, reference: str) -> bool:
    """Equal once case and white space are folded."""
    return " ".join(text.split()).casefold() == " ".join(reference.split()).casefold()


def measure(
    lm: LanguageModel, rows: list[dict[str, Any]], draft: str, budget: Budget, stream_rows: StreamRows, max_new_tokens: int
) -> dict[str, Any]:
    """Answer every prompt with speculation; tokens per call pooled over prompts, as the design defines it."""
    tokens = calls = hits = 0
    for row in track(rows, description=f"{budget} rows", console=Console(stderr=True), transient=True):
        result = lm.generate(row["prompt"], max_new_tokens, draft, budget=budget, stream_rows=stream_rows)
        tokens, calls = tokens + result.tokens - 1, calls + result.calls
        hits += same(result.text, row.get("completion", ""))
    return {
        "draft": draft,
        "budget": budget,
        "stream_rows": stream_rows,
        "prompts": len(rows),
        "tokens": tokens,
        "calls": calls,
        "tokens_per_call": tokens / max(calls, 1),
        "exact_match": hits / len(rows),
    }


def race(
    lm: LanguageModel, rows: list[dict[str, Any]], draft: str, budget: Budget, stream_rows: StreamRows, max_new_tokens: int
) -> dict[str, Any]:
    """Plain and speculative decoding of each prompt in turn; the order alternates, so that a drift meets both alike."""
    lm.generate(rows[0]["prompt"], max_new_tokens, draft, budget=budget, stream_rows=stream_rows)
    lm.generate(rows[0]["prompt"], max_new_tokens, "none")
    speeds: dict[str, list[float]] = {"plain": [], "speculative": []}
    for i, row in enumerate(track(rows, description="in turn", console=Console(stderr=True), transient=True)):
        for name in ("plain", "speculative") if i % 2 else ("speculative", "plain"):
            drafts = "none" if name == "plain" else draft
            result = lm.generate(row["prompt"], max_new_tokens, drafts, budget=budget, stream_rows=stream_rows)
            if result.tokens_per_second is not None:
                speeds[name].append(result.tokens_per_second)
    ratios = [s / p for s, p in zip(speeds["speculative"], speeds["plain"], strict=True)]
    return {
        "draft": draft,
        "budget": budget,
        "stream_rows": stream_rows,
        "prompts": len(ratios),
        "plain_tokens_per_second": statistics.median(speeds["plain"]),
        "speculative_tokens_per_second": statistics.median(speeds["speculative"]),
        "speedup_vs_plain": statistics.median(ratios),
        "speedup_lower_quartile": statistics.quantiles(ratios, n=4)[0] if len(ratios) > 1 else ratios[0],
    }


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("data", type=click.Path(path_type=Path))
@click.option("--limit", type=click.IntRange(min=1), default=200, show_default=True, help="Prompts, from the start of DATA.")
@click.option("--budgets", default="16", show_default=True, help="Main rows of a call, several with commas; adaptive: as many as pay.")
@click.option("--stream-rows", default="all", show_default=True, help="Rows that carry streams: all, root, or numbers with commas.")
@click.option("--draft", default="streams", show_default=True, help="Where drafts come from: streams, joined, lookup.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=128, show_default=True)
@click.option("--speed", is_flag=True, help="Race plain and speculative decoding as well.")
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads.")
@json_option
def task(
    bundle: Path,
    data: Path,
    limit: int,
    budgets: str,
    stream_rows: str,
    draft: str,
    max_new_tokens: int,
    speed: bool,
    threads: int | None,
    json_file: Path | None,
) -> None:
    """Tokens per call, exact match and speed of BUNDLE on the prompts of DATA."""
    rows = read(data, limit)
    lm = load(bundle, threads=threads)
    report: dict[str, Any] = {"bundle": str(bundle), "data": data.name, "threads": threads, "runs": [], "races": []}
    table = Table(title=f"{bundle.name} on {data.name}, {len(rows)} prompts, greedy")
    for column in ("rows a call", "with streams", "tokens per call", "exact match"):
        table.add_column(column, justify="right")
    unknown = [budget for budget in budgets.split(",") if not budget.isdecimal() and budget != "adaptive"]
    if unknown:
        raise UserError(f"--budgets {budgets}: numbers or adaptive expected, with commas")
    pairs: list[tuple[Budget, StreamRows]] = [
        (int(budget) if budget.isdecimal() else "adaptive", int(kind) if kind.isdecimal() else kind)
        for budget in budgets.split(",")
        for kind in stream_rows.split(",")
    ]
    for budget, kind in pairs:
        got = measure(lm, rows, draft, budget, kind, max_new_tokens)
        report["runs"].append(got)
        table.add_row(str(budget), str(kind), f"{got['tokens_per_call']:.2f}", f"{got['exact_match']:.1%}")
    Console().print(table)
    if speed:
        table = Table(title=f"speed, {threads or 'all'} threads: medians over prompts")
        for column in ("rows a call", "with streams", "plain tokens/s", "speculative tokens/s", "speed-up", "lower quartile"):
            table.add_column(column, justify="right")
        for budget, kind in pairs:
            got = race(lm, rows, draft, budget, kind, max_new_tokens)
            report["races"].append(got)
            table.add_row(
                str(budget),
                str(kind),
                f"{got['plain_tokens_per_second']:.1f}",
                f"{got['speculative_tokens_per_second']:.1f}",
                f"{got['speedup_vs_plain']:.2f}x",
                f"{got['speedup_lower_quartile']:.2f}x",
            )
        Console().print(table)
    write_report(json_file, "task", report)


if __name__ == "__main__":
    import sys

    share_threads()
    sys.exit(run(sys.argv[1:], task, "task.py"))
