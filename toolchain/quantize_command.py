"""``specstream quantize``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from specstream.models.errors import UserError
from specstream.toolchain.report import json_option, write_report


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--scheme",
    required=True,
    metavar="NAME",
    help="ONNX: int4 or int8: weights in blocks; w8a8: 8-bit activations too; mixed: w8a8 within --max-kl. "
    "Core ML: int8, int4 (not for the Neural Engine), palette4, palette6.",
)
@click.option("--head", metavar="NAME", help="Core ML: scheme of the embedding and the head, or fp16. [default: by --scheme]")
@click.option("--group-size", type=int, metavar="N", help="Core ML: output channels that share a palette. [default: 16]")
@click.option(
    "--block-size",
    type=int,
    help="Weights that share a scale, in blocks.  [default: the first of 64, 32 and 16 that divides all matrices; Core ML: 32]",
)
@click.option("--accuracy-level", type=int, default=4, show_default=True, help="In blocks: 4 rounds activations to 8 bits, 0 does not.")
@click.option(
    "--cache",
    type=click.Choice(["float32", "int8"]),
    default="float32",
    show_default=True,
    help="Keys and values: int8 takes a quarter of the memory. After long texts plain decoding is faster with it, a tree's call slower.",
)
@click.option(
    "--calibration",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help='JSON lines with "prompt", like those to come: for scales (w8a8, mixed, --cache int8), better rounding (int4, Core ML) and '
    "figures of quality.",
)
@click.option("--held-out", type=click.Path(path_type=Path), metavar="FILE", help="Prompts to compare on. [default: --calibration's]")
@click.option("--limit", type=click.IntRange(min=1), default=24, show_default=True, help="Take each file's first prompts only.")
@click.option("--max-kl", type=click.FloatRange(min=0), metavar="NATS", help="Fail when the mean KL from BUNDLE is larger.")
@click.option("--max-flips", type=click.FloatRange(min=0, max=1), metavar="SHARE", help="Fail when siblings' rows change more argmaxes.")
@click.option("--threads", type=click.IntRange(min=1), help="Threads of ONNX Runtime. [default: all usable cores]")
@click.option("--force", is_flag=True, help="Replace OUT if it is a bundle already.")
@json_option
def quantize(
    bundle: Path,
    out: Path,
    scheme: str,
    head: str | None,
    group_size: int | None,
    block_size: int | None,
    accuracy_level: int,
    cache: str,
    calibration: Path | None,
    held_out: Path | None,
    limit: int,
    max_kl: float | None,
    max_flips: float | None,
    threads: int | None,
    force: bool,
    json_file: Path | None,
) -> None:
    """Round the weights of the bundle in the folder BUNDLE to fewer bits, into the new bundle OUT.

    int4 is the smallest and decodes single tokens fastest; with --calibration its rounding errors are made up for. w8a8 makes a call
    with many rows hardly dearer than one with one row, which is what speculation lives from. With --calibration or --held-out the result
    is loaded in a fresh process and compared with BUNDLE on the texts that BUNDLE answers these prompts with.

    Of a Core ML bundle, palette4 is the smallest that every processor of a device computes right; with --calibration its rounding
    errors are made up for. Off a Mac the texts come from the reference evaluator, about a second a call: take few prompts (--limit).

    \b
    Example:
      specstream quantize sql-bundle sql-w8a8 --scheme w8a8 --calibration prompts.jsonl --max-kl 0.02
      specstream quantize sql-bundle sql-int4 --scheme int4 --calibration prompts.jsonl --held-out others.jsonl
      specstream quantize sql-coreml sql-palette --scheme palette4 --calibration prompts.jsonl --limit 8
    """
    from specstream.runtimes.bundle import Bundle
    from specstream.toolchain.extras import require
    from specstream.toolchain.quantize_pipeline import Limits, quantize_bundle
    from specstream.toolchain.terminal import step_status

    limits = Limits(max_kl, max_flips)
    coreml = Bundle.load(bundle, check=False).manifest.contract.coreml is not None
    _refuse_others_options(bundle, coreml)
    with step_status() as progress:
        if coreml:
            from specstream.quantize.coreml_schemes import CoreMLOptions
            from specstream.toolchain.coreml_quantize import quantize_package_bundle

            options = CoreMLOptions(scheme, head or "", 32 if block_size is None else block_size, 16 if group_size is None else group_size)
            report = quantize_package_bundle(
                bundle,
                out,
                options,
                calibration=calibration,
                held_out=held_out,
                limit=limit,
                limits=limits,
                force=force,
                progress=progress,
            )
        else:
            require("export")
            report = quantize_bundle(
                bundle,
                out,
                scheme,
                block_size=block_size,
                accuracy_level=accuracy_level,
                cache=cache,
                calibration=calibration,
                held_out=held_out,
                limit=limit,
                limits=limits,
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
        _print(report["quality"], report["reference"], scheme, "fp16" if coreml else "fp32")
    write_report(json_file, "quantize", report)


def _refuse_others_options(bundle: Path, coreml: bool) -> None:
    """Options that mean nothing for this kind of bundle.

    Raises:
        UserError: one was given.
    """
    context = click.get_current_context()
    others = ("accuracy_level", "cache", "threads") if coreml else ("head", "group_size")
    given = [name for name in others if context.get_parameter_source(name) is not ParameterSource.DEFAULT]
    if given:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        kinds = ("a Core ML", "ONNX") if coreml else ("an ONNX", "Core ML")
        raise UserError(f"{options}: {bundle} is {kinds[0]} bundle; this is for {kinds[1]} only")


def _print(quality: Mapping[str, Any], before: Mapping[str, Any], scheme: str, original: str) -> None:
    from rich.table import Table

    from specstream.toolchain.terminal import table_console

    def show(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    prompts = "held-out" if quality["held_out"] else "calibration's"
    table = Table(title=f"{scheme} beside {original}: {quality['tokens']} tokens of {prompts} prompts")
    for column in ("", original, scheme):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("perplexity", show(before["perplexity"], ".4f"), show(quality["perplexity"], ".4f"))
    table.add_row(f"KL from {original}, mean (largest)", "", f"{quality['kl']:.4f} ({quality['kl_max']:.3f})")
    table.add_row("top-1 agreement", "", show(quality["top1_agreement"], ".2%"))
    table.add_row("exact match", show(before["exact_match"], ".1%"), show(quality["exact_match"], ".1%"))
    table.add_row("tokens per call", show(before["tokens_per_call"], ".2f"), show(quality["tokens_per_call"], ".2f"))
    table.add_row("argmax flips: siblings beside a row", "", show(quality["flip_rate"], ".2%"))
    table.add_row("argmax flips: one row against two", "", show(quality["flip_rate_plain"], ".2%"))
    table.add_row("rows independent", "", "yes" if quality["rows_independent"] else "NO")
    table_console().print(table)
