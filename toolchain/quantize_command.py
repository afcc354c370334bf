"""``specstream quantize``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from specstream.toolchain.report import json_option, write_report


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--scheme",
    required=True,
    metavar="NAME",
    help="int4 or int8: weights in blocks. w8a8: 8-bit activations too. mixed: w8a8 within --max-kl.",
)
@click.option("--block-size", type=int, default=32, show_default=True, help="Weights that share a scale, in blocks.")
@click.option("--accuracy-level", type=int, default=4, show_default=True, help="In blocks: 4 rounds activations to 8 bits, 0 does not.")
@click.option(
    "--calibration",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help='JSON lines with "prompt", like those to come: for scales (w8a8, mixed) and figures of quality.',
)
@click.option("--limit", type=click.IntRange(min=1), default=24, show_default=True, help="Take the first prompts only.")
@click.option("--max-kl", type=click.FloatRange(min=0), metavar="NATS", help="Fail when the mean KL from fp32 is larger.")
@click.option("--max-flips", type=click.FloatRange(min=0, max=1), metavar="SHARE", help="Fail when siblings' rows change more argmaxes.")
@click.option("--threads", type=click.IntRange(min=1), help="Threads of ONNX Runtime. [default: all usable cores]")
@click.option("--force", is_flag=True, help="Replace OUT if it is a bundle already.")
@json_option
def quantize(
    bundle: Path,
    out: Path,
    scheme: str,
    block_size: int,
    accuracy_level: int,
    calibration: Path | None,
    limit: int,
    max_kl: float | None,
    max_flips: float | None,
    threads: int | None,
    force: bool,
    json_file: Path | None,
) -> None:
    """Round the weights of the bundle in the folder BUNDLE to fewer bits, into the new bundle OUT.

    int4 is the smallest and decodes single tokens fastest; w8a8 makes a call with many rows hardly dearer than one with one row, which
    is what speculation lives from. With --calibration the result is loaded in a fresh process and compared with BUNDLE on the texts
    that BUNDLE answers these prompts with.

    \b
    Example:
      specstream quantize sql-bundle sql-w8a8 --scheme w8a8 --calibration prompts.jsonl --max-kl 0.02
    """
    from specstream.toolchain.extras import require
    from specstream.toolchain.terminal import step_status

    require("export")

    from specstream.toolchain.quantize_pipeline import Limits, quantize_bundle

    with step_status() as progress:
        report = quantize_bundle(
            bundle,
            out,
            scheme,
            block_size=block_size,
            accuracy_level=accuracy_level,
            calibration=calibration,
            limit=limit,
            limits=Limits(max_kl, max_flips),
            threads=threads,
            force=force,
            progress=progress,
        )
    click.echo(
        f"{out}: {report['bundle_bytes'] / 1e6:.0f} MB, {report['bundle_share']:.3f} of the original, in {report['seconds']:.0f} s, "
        f"peak memory {report['peak_rss_bytes'] / 1e6:.0f} MB"
    )
    click.echo("matrices: " + ", ".join(f"{count} {kind}" for kind, count in report["products"].items()))
    if report["quality"] is not None:
        _print(report["quality"], report["reference"], scheme)
    write_report(json_file, "quantize", report)


def _print(quality: Mapping[str, Any], before: Mapping[str, Any], scheme: str) -> None:
    from rich.table import Table

    from specstream.toolchain.terminal import table_console

    def show(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    table = Table(title=f"{scheme} beside fp32, {quality['tokens']} tokens that fp32 wrote")
    for column in ("", "fp32", scheme):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("perplexity", show(before["perplexity"], ".4f"), show(quality["perplexity"], ".4f"))
    table.add_row("KL from fp32, mean (largest)", "", f"{quality['kl']:.4f} ({quality['kl_max']:.3f})")
    table.add_row("top-1 agreement", "", show(quality["top1_agreement"], ".2%"))
    table.add_row("exact match", show(before["exact_match"], ".1%"), show(quality["exact_match"], ".1%"))
    table.add_row("tokens per call", show(before["tokens_per_call"], ".2f"), show(quality["tokens_per_call"], ".2f"))
    table.add_row("argmax flips: siblings beside a row", "", show(quality["flip_rate"], ".2%"))
    table.add_row("argmax flips: one row against two", "", show(quality["flip_rate_plain"], ".2%"))
    table.add_row("rows independent", "", "yes" if quality["rows_independent"] else "NO")
    table_console().print(table)
