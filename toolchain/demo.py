"""``make demo``: exports SmolLM2-135M with the zoo's SQL adapter and answers three questions, with and without drafts.

python -m specstream.toolchain.demo [--out build/demo] [--force]
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from specstream.models.errors import CheckFailed, UserError
from specstream.toolchain import cli
from specstream.toolchain.zoo import resolve_adapter

if TYPE_CHECKING:
    from specstream.runtimes import GenerationResult, LanguageModel

MODEL: Final = "smollm2-135m"
ADAPTER: Final = "smollm2-135m-sql"
ROUNDS: Final = 3  # timed, after one that is not

_INSTRUCTION: Final = "Write a SQL query that answers the question, given the table schema."
QUESTIONS: Final = (
    (
        "CREATE TABLE mountains (name VARCHAR, country VARCHAR, height NUMERIC, first_ascent NUMERIC)",
        "What is the name of the mountain in Nepal with a height of 8091?",
    ),
    (
        "CREATE TABLE employee (id NUMERIC, name VARCHAR, age NUMERIC, city VARCHAR)",
        "How many employees are there in each city?",
    ),
    (
        "CREATE TABLE matches (date VARCHAR, opponent VARCHAR, venue VARCHAR, result VARCHAR, attendance NUMERIC)",
        "What was the highest attendance when the venue was home and the opponent was Leeds United?",
    ),
)


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=Path("build/demo"), show_default=True, help="Where the bundle is made.")
@click.option("--force", is_flag=True, help="Export again even if the bundle is there.")
def demo(out: Path, force: bool) -> None:
    """Export SmolLM2-135M with the SQL adapter (unless that is done) and answer three questions, speculating and plainly in turn.

    \b
    Example:
      python -m specstream.toolchain.demo
    """
    from rich.table import Table

    from specstream.runtimes import load
    from specstream.toolchain.terminal import table_console

    if force or not is_made(out):
        export(out)
    lm = load(out)
    table = Table(title=f"{MODEL} with {ADAPTER}, fp32, ONNX Runtime", title_justify="left", show_lines=True)
    table.add_column("question", ratio=2)
    table.add_column("SQL", ratio=3)
    for column in ("tokens per call", "tokens/s", "plain tokens/s", "speed-up"):
        table.add_column(column, justify="right", width=9)
    drafted: list[GenerationResult] = []
    plain: list[GenerationResult] = []
    for schema, question in QUESTIONS:
        with_drafts, without = _in_turn(lm, f"{_INSTRUCTION}\n\n{schema}\n\nQuestion: {question}")
        drafted += with_drafts
        plain += without
        table.add_row(question, with_drafts[0].text.strip(), *_figures(with_drafts, without))
    table.add_row("all three", "", *_figures(drafted, plain), style="bold")
    table_console().print(table)


def is_made(out: Path) -> bool:
    """Whether ``out`` holds an undamaged bundle of the adapter as it is now."""
    from specstream.models.fetch import sha256_of
    from specstream.runtimes import Bundle

    try:
        streams = Bundle.load(out).manifest.streams
    except UserError:
        return False
    return streams is not None and streams.adapter_sha256 == sha256_of(resolve_adapter(ADAPTER) / "adapter.safetensors")


def export(out: Path) -> None:
    """Make the bundle with the command that a user would call."""
    arguments = ["export", MODEL, str(out), "--adapter", ADAPTER, "--force"]
    click.echo(f"$ specstream {' '.join(arguments)}", err=True)
    if code := cli.run(arguments):
        raise SystemExit(code)


def _in_turn(lm: LanguageModel, prompt: str) -> tuple[list[GenerationResult], list[GenerationResult]]:
    """The same prompt with drafts and without, one after the other, so that both meet the same machine.

    Raises:
        CheckFailed: the texts differ.
    """
    drafted, plain = [], []
    for number in range(ROUNDS + 1):
        with_drafts, without = lm.generate(prompt, draft="auto"), lm.generate(prompt, draft="none")
        if with_drafts.token_ids != without.token_ids:
            raise CheckFailed(f"speculation changed the text: {with_drafts.text!r} instead of {without.text!r}")
        if number:
            drafted.append(with_drafts)
            plain.append(without)
    return drafted, plain


def _figures(drafted: list[GenerationResult], plain: list[GenerationResult]) -> tuple[str, str, str, str]:
    """Tokens per call, tokens/s with drafts and without (medians), and the median of the paired ratios."""
    tokens_per_call = sum(r.tokens - 1 for r in drafted) / sum(r.calls for r in drafted)
    fast, slow = [_speed(result) for result in drafted], [_speed(result) for result in plain]
    ratio = statistics.median(d / p for d, p in zip(fast, slow, strict=True))
    return f"{tokens_per_call:.2f}", f"{statistics.median(fast):.1f}", f"{statistics.median(slow):.1f}", f"{ratio:.2f}x"


def _speed(result: GenerationResult) -> float:
    if result.tokens_per_second is None:
        raise CheckFailed(f"the answer {result.text!r} is too short to time: a SQL query was expected")
    return result.tokens_per_second


if __name__ == "__main__":
    from specstream.runtimes import share_threads

    share_threads()
    sys.exit(cli.run(sys.argv[1:], demo, "python -m specstream.toolchain.demo"))
