"""``specstream export``."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import click

from specstream.export.contract import Profile
from specstream.toolchain.report import json_option, write_report


@click.command()
@click.argument("model")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--adapter", metavar="ADAPTER", help="Streams to fuse in: a folder made by 'train', or a name in the zoo.")
@click.option(
    "--profile",
    type=click.Choice(get_args(Profile)),
    default="ort",
    show_default=True,
    help="Operators of the graph: ONNX Runtime's own, or standard ONNX (opset 24).",
)
@click.option("--force", is_flag=True, help="Replace OUT if it is a bundle already.")
@json_option
def export(model: str, out: Path, adapter: str | None, profile: Profile, force: bool, json_file: Path | None) -> None:
    """Export MODEL to an ONNX bundle in the new folder OUT, and compare it with PyTorch.

    MODEL is a Hugging Face id (owner/name or owner/name@revision), a folder, a .gguf file, or a short name (smollm2-135m). Without
    --adapter the graph has no streams and decodes plainly.

    \b
    Example:
      specstream export smollm2-135m sql-bundle --adapter smollm2-135m-sql
    """
    from specstream.toolchain.extras import require
    from specstream.toolchain.terminal import step_status
    from specstream.toolchain.zoo import resolve_adapter

    require("export")
    folder = resolve_adapter(adapter) if adapter is not None else None

    from specstream.toolchain.export_pipeline import export_bundle

    with step_status() as progress:
        report = export_bundle(model=model, out=out, adapter=folder, profile=profile, force=force, progress=progress)
    parity = report["parity"]
    click.echo(
        f"{out}: {report['bundle_bytes'] / 1e6:.0f} MB in {report['seconds']:.0f} s, peak memory {report['peak_rss_bytes'] / 1e6:.0f} MB"
    )
    click.echo(f"parity with PyTorch: top-1 agreement {parity['top1_agreement']:.2%}, largest difference {parity['max_abs_diff']:.1e}")
    write_report(json_file, "export", report)
