"""``specstream package``."""

from __future__ import annotations

from pathlib import Path

import click

from specstream.toolchain.report import json_option, write_report


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--target", required=True, metavar="NAME", help="ios (of a Core ML bundle), android or linux-arm64 (of an ONNX bundle).")
@click.option("--capacity", type=int, metavar="ROWS", help="Rows of cache to check and measure with.  [default: 1024]")
@click.option("--max-size", metavar="SIZE", help="Fail when the package is larger, e.g. 300MB.")
@click.option("--max-memory", metavar="SIZE", help="Fail when weights, cache and what else a process holds are more.")
@click.option(
    "--prompts", type=click.Path(path_type=Path), metavar="FILE", help='JSON lines with "prompt" for the traces.  [default: three]'
)
@click.option("--limit", type=click.IntRange(min=1), default=4, show_default=True, help="Take the first prompts only.")
@click.option("--force", is_flag=True, help="Replace OUT and OUT.zip if OUT is a package or bundle already.")
@json_option
def package(
    bundle: Path,
    out: Path,
    target: str,
    capacity: int | None,
    max_size: str | None,
    max_memory: str | None,
    prompts: Path | None,
    limit: int,
    force: bool,
    json_file: Path | None,
) -> None:
    """Make of the folder BUNDLE what an app team takes: the folder OUT, and OUT.zip beside it.

    It holds the model in the target's form, tokenizer, chat template, licences, a manifest with the hash of every file, a page on how to
    drive the loop there, and golden.json: complete traces that a loop in any language can be checked against. The traces are replayed
    in a fresh process before anything is written.

    \b
    Example:
      specstream package sql-w8a8 sql-android --target android --max-size 400MB --max-memory 800MB
    """
    from specstream.toolchain.package_pipeline import PROMPTS, Budget, package_bundle, parse_bytes
    from specstream.toolchain.prompt_rows import read_prompt_rows
    from specstream.toolchain.terminal import step_status

    budget = Budget(
        None if max_size is None else parse_bytes(max_size, "--max-size"),
        None if max_memory is None else parse_bytes(max_memory, "--max-memory"),
    )
    asked = PROMPTS if prompts is None else read_prompt_rows(prompts, limit, "--prompts").prompts
    with step_status() as progress:
        report = package_bundle(bundle, out, target, prompts=asked, capacity=capacity, budget=budget, force=force, progress=progress)
    memory = report["memory"]
    click.echo(f"{out}: {report['package_bytes'] / 1e6:,.1f} MB for {target}, in {report['seconds']:.0f} s; {out}.zip beside it")
    rest = "overhead not measured" if memory["overhead"] is None else f"{memory['overhead'] / 1e6:,.0f} MB overhead"
    click.echo(
        f"memory: {memory['weights'] / 1e6:,.0f} MB weights + {memory['cache'] / 1e6:,.0f} MB cache ({report['capacity']:,} rows) "
        f"+ {rest} = {memory['total'] / 1e6:,.0f} MB"
    )
    traces = report["traces"]
    calls, tokens = sum(t["calls"] for t in traces), sum(t["tokens"] for t in traces)
    click.echo(f"golden.json: {len(traces)} traces, {tokens} tokens in {calls} calls")
    write_report(json_file, "package", report)
