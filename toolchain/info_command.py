"""``specstream info``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specstream.toolchain.report import json_option, write_report
from specstream.toolchain.verify_command import compared_with

if TYPE_CHECKING:
    from specstream.runtimes.manifest import Manifest


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--check/--no-check", default=True, help="Compare every file with its checksum.")
@json_option
def info(bundle: Path, check: bool, json_file: Path | None) -> None:
    """Show what is in the folder BUNDLE: model, streams, files, and what was measured when it was made.

    \b
    Example:
      specstream info sql-bundle
    """
    from rich.console import Console
    from rich.table import Table

    from specstream.runtimes.bundle import Bundle

    manifest = Bundle.load(bundle, check=check).manifest
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in describe(manifest):
        table.add_row(name, value)
    Console().print(table)
    write_report(json_file, "info", report(manifest))


def describe(manifest: Manifest) -> list[tuple[str, str]]:
    """Rows of the table: what a person wants to know of a bundle."""
    model, streams, contract = manifest.model, manifest.streams, manifest.contract
    rows = [
        ("model", f"{model.name} ({model.architecture}), {model.parameters:,} parameters"),
        ("shape", f"{model.num_layers} layers of {model.hidden_size}, vocabulary {model.vocab_size:,}, context {model.context_length:,}"),
        ("licence", model.license or "not stated by the weights"),
    ]
    if streams is None:
        rows.append(("streams", "none: plain decoding only"))
    else:
        rows += [
            ("streams", f"{streams.num_streams} streams through the top {streams.stream_layers} layers, top {streams.top_k} of each"),
            (
                "stream parameters",
                f"{streams.parameters:,} beyond the fine-tune ({streams.parameters / model.parameters:.2%} of the model)",
            ),
            ("fine-tune", f"{streams.main_parameters:,} parameters, merged" if streams.main_parameters else "none: base weights"),
            ("trained as", f"{streams.mode}, placement {streams.placement}"),
        ]
    rows += [
        ("scheme", manifest.quantization.scheme),
        ("contract", f"version {contract.version}, profile {contract.profile}, opset {contract.opset}, {contract.cache_dtype} cache"),
    ]
    if manifest.package is not None:
        rows.append(("package", f"for {manifest.package.target}, checked with {manifest.package.capacity:,} rows of cache"))
    if contract.coreml is not None:
        names = [function.name for function in contract.coreml.functions] + ([contract.coreml.draft] if contract.coreml.draft else [])
        rows.append(("functions", f"{', '.join(names)}; room for {contract.coreml.capacity:,} tokens"))
    if manifest.parity is not None:
        parity = manifest.parity
        rows.append(("parity", f"top-1 agreement with PyTorch {parity.top1_agreement:.2%}, largest difference {parity.max_abs_diff:.1e}"))
    rows.append(("verified", _verified(manifest.verified)))
    total = sum(entry.bytes for entry in manifest.files)
    rows.append(("files", f"{len(manifest.files)}, {total / 1e6:.1f} MB"))
    rows += [("", f"{entry.path}  {entry.bytes:,} bytes") for entry in manifest.files]
    rows.append(("made with", ", ".join(f"{name} {version}" for name, version in manifest.tools.items())))
    return rows


def _verified(result: dict[str, Any] | None) -> str:
    """What ``verify`` recorded, in one line; its keys are those of the report."""
    if result is None:
        return "not yet (specstream verify)"
    return (
        f"{result['differences']} differences and {result['near_ties']} near-ties in {result['tokens']:,} tokens of {result['prompts']} "
        f"prompts ({result['prompts_file']}), compared with {compared_with(result['reference'])}"
    )


def report(manifest: Manifest) -> dict[str, Any]:
    """Stable keys of ``info --json``."""
    data = dataclasses.asdict(manifest)
    streams = manifest.streams
    return {
        "model": data["model"],
        "parameters": manifest.model.parameters,
        "stream_parameters": 0 if streams is None else streams.parameters,
        "main_parameters": 0 if streams is None else streams.main_parameters,
        "streams": data["streams"],
        "scheme": manifest.quantization.scheme,
        "files": list(data["files"]),
        "contract": data["contract"],
        "parity": data["parity"],
        "verified": data["verified"],
        "package": data["package"],
        "export": data["export"],
        "tools": data["tools"],
    }
