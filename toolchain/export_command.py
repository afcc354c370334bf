"""``specstream export``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from specstream.export.contract import Profile
from specstream.models.errors import UserError
from specstream.toolchain.report import json_option, write_report

if TYPE_CHECKING:
    from specstream.toolchain.export_pipeline import Format


@click.command()
@click.argument("model")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--adapter", metavar="ADAPTER", help="Streams to fuse in: a folder made by 'train', or a name in the zoo.")
@click.option(
    "--profile",
    type=click.Choice(get_args(Profile)),
    help="ONNX: operators of the graph, ONNX Runtime's own or those of the standard (opset 24).  [default: ort]",
)
@click.option(
    "--format",
    "format_",
    type=click.Choice(["onnx", "coreml"]),
    default="onnx",
    show_default=True,
    help="ONNX graphs, or a Core ML package in 16 bits (iOS 18, macOS 15).",
)
@click.option("--capacity", type=click.IntRange(min=1), metavar="ROWS", help="Core ML: tokens that its cache can hold.  [default: 1024]")
@click.option("--tree-rows", metavar="ROWS", help="Core ML: rows of its functions for trees, with commas between.  [default: 8,16]")
@click.option("--force", is_flag=True, help="Replace OUT if it is a bundle already.")
@json_option
def export(
    model: str,
    out: Path,
    adapter: str | None,
    profile: Profile | None,
    format_: Format,
    capacity: int | None,
    tree_rows: str | None,
    force: bool,
    json_file: Path | None,
) -> None:
    """Export MODEL to a bundle in the new folder OUT, and compare it with PyTorch.

    MODEL is a Hugging Face id (owner/name or owner/name@revision), a folder, a .gguf file, or a short name (smollm2-135m). Without
    --adapter the graph has no streams and decodes plainly.

    \b
    Example:
      specstream export smollm2-135m sql-bundle --adapter smollm2-135m-sql
      specstream export smollm2-135m sql-coreml --adapter smollm2-135m-sql --format coreml
    """
    options = _format_options(format_, profile, capacity, tree_rows)
    from specstream.toolchain.extras import require
    from specstream.toolchain.terminal import step_status
    from specstream.toolchain.zoo import resolve_adapter

    require("export")
    if format_ == "coreml":
        require("coreml")
    folder = resolve_adapter(adapter) if adapter is not None else None

    from specstream.toolchain.export_pipeline import export_bundle

    with step_status() as progress:
        report = export_bundle(model=model, out=out, adapter=folder, force=force, progress=progress, format=format_, **options)
    parity = report["parity"]
    click.echo(
        f"{out}: {report['bundle_bytes'] / 1e6:.0f} MB in {report['seconds']:.0f} s, peak memory {report['peak_rss_bytes'] / 1e6:.0f} MB"
    )
    click.echo(f"parity with PyTorch: top-1 agreement {parity['top1_agreement']:.2%}, largest difference {parity['max_abs_diff']:.1e}")
    write_report(json_file, "export", report)


def _format_options(format_: str, profile: str | None, capacity: int | None, tree_rows: str | None) -> dict[str, Any]:
    """Options that belong to one format, those that were given.

    Raises:
        UserError: one of the other format, or rows that are no numbers.
    """
    given: dict[str, Any] = {"profile": profile, "capacity": capacity, "tree_rows": tree_rows}
    foreign = ("profile",) if format_ == "coreml" else ("capacity", "tree_rows")
    for name in foreign:
        if given[name] is not None:
            raise UserError(f"--{name.replace('_', '-')} means nothing with --format {format_}; leave it out")
    if tree_rows is not None:
        try:
            given["tree_rows"] = tuple(int(part) for part in tree_rows.split(","))
        except ValueError:
            raise UserError(f"--tree-rows: {tree_rows!r} given, numbers with commas between expected (8,16)") from None
    return {name: value for name, value in given.items() if value is not None}
