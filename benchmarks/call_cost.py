"""Time of one call by its number of rows, for several bundles in turn.

    python benchmarks/call_cost.py int4-bundle w8a8-bundle --threads 2 --json report.json

Run it with nothing else running. Bundles and numbers of rows take turns in one process, so that a drift meets all alike; a cell is
the median of its repeats. A call's rows are a chain whose rows are all scored, behind a context of ``--past`` rows. With ``--tiled`` each
bundle is there twice: as it runs, and with ONNX Runtime's attention in tiles, which is what one gets without `specstream`.
"""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from specstream.models.errors import UserError
from specstream.runtimes import LanguageModel, load, share_threads
from specstream.runtimes.ort_session import TILED_ATTENTION_OFF
from specstream.runtimes.session import Rows, Session, prefill, tree_rows
from specstream.runtimes.tree import chain
from specstream.toolchain.cli import run
from specstream.toolchain.report import json_option, write_report

WARM_UP = 3  # calls of each kind that are not counted


def prepare(session: Session, past: int, counts: list[int]) -> dict[int, Rows]:
    """Fill the cache with ``past`` rows; returns the calls to time, by their number of rows."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, session.vocab_size, past + max(counts)).tolist()
    if past + max(counts) > session.capacity:
        raise UserError(f"--past {past}: with {max(counts)} rows more than the {session.capacity} of the model's context")
    prefill(session, tokens[:past])
    return {count: tree_rows(chain(tokens[past], tokens[past + 1 : past + count]), past) for count in counts}


def measure(sessions: list[Session], past: int, counts: list[int], repeats: int) -> list[dict[int, float]]:
    """Median milliseconds of a call, for each session by rows."""
    calls = [prepare(session, past, counts) for session in sessions]
    times: list[dict[int, list[float]]] = [{count: [] for count in counts} for _ in sessions]
    for turn in range(repeats + WARM_UP):
        for session, by_count, kept in zip(sessions, calls, times, strict=True):
            for count, rows in by_count.items():
                start = time.perf_counter()
                session.run(rows)
                if turn >= WARM_UP:
                    kept[count].append(1000 * (time.perf_counter() - start))
    return [{count: statistics.median(values) for count, values in kept.items()} for kept in times]


def load_tiled(bundle: Path, threads: int | None) -> LanguageModel:
    """A bundle whose attention is in tiles."""
    before = os.environ.get(TILED_ATTENTION_OFF)
    os.environ[TILED_ATTENTION_OFF] = "0"
    try:
        return load(bundle, threads=threads)
    finally:
        if before is None:
            del os.environ[TILED_ATTENTION_OFF]
        else:
            os.environ[TILED_ATTENTION_OFF] = before


@click.command()
@click.argument("bundles", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--rows", default="1,2,4,8,12,16", show_default=True, help="Numbers of rows, with commas.")
@click.option("--past", type=click.IntRange(min=1), default=256, show_default=True, help="Rows in the cache.")
@click.option("--repeats", type=click.IntRange(min=1), default=30, show_default=True, help="Calls of each kind.")
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads.")
@click.option("--tiled", is_flag=True, help="Each bundle with attention in tiles beside it.")
@json_option
def call_cost(
    bundles: tuple[Path, ...], rows: str, past: int, repeats: int, threads: int | None, tiled: bool, json_file: Path | None
) -> None:
    """Milliseconds of a call of each of BUNDLES by its rows, and its ratio to a call of one row."""
    try:
        counts = sorted({int(part) for part in rows.split(",")} | {1})
    except ValueError:
        raise UserError(f"--rows {rows}: numbers with commas expected, such as 1,2,4,8") from None
    if counts[0] < 1:
        raise UserError(f"--rows {rows}: numbers from 1 expected")
    kinds = [(bundle, in_tiles) for bundle in bundles for in_tiles in ((False, True) if tiled else (False,))]
    models = [(load_tiled if in_tiles else load)(bundle, threads=threads) for bundle, in_tiles in kinds]
    found = measure([lm.session for lm in models], past, counts, repeats)
    table = Table(title=f"one call behind {past} rows, {threads or 'all'} threads: ms (ratio to one row)")
    for column in ("bundle", "scheme", *(str(count) for count in counts)):
        table.add_column(column, justify="left" if column in ("bundle", "scheme") else "right")
    report: list[dict[str, Any]] = []
    for (bundle, in_tiles), lm, cells in zip(kinds, models, found, strict=True):
        scheme = lm.manifest.quantization.scheme
        table.add_row(bundle.name + ", tiled" * in_tiles, scheme, *(f"{ms:.1f} ({ms / cells[1]:.2f})" for ms in cells.values()))
        report += [
            {"bundle": str(bundle), "tiled": in_tiles, "scheme": scheme, "rows": count, "context": past, "ms": ms, "ratio": ms / cells[1]}
            for count, ms in cells.items()
        ]
    Console(width=140).print(table)
    write_report(json_file, "call_cost", {"threads": threads, "repeats": repeats, "call_cost": report})


if __name__ == "__main__":
    import sys

    share_threads()
    sys.exit(run(sys.argv[1:], call_cost, "call_cost.py"))
