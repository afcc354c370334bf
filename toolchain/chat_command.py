"""``specstream chat``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from specstream.models.errors import UserError
from specstream.toolchain.generate_command import statistics
from specstream.toolchain.sampling_options import NewSampling, sampling_options
from specstream.toolchain.session_options import session_options

if TYPE_CHECKING:
    from specstream.runtimes import LanguageModel, Sampling
    from specstream.runtimes.coreml_session import ComputeUnits


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--system", metavar="TEXT", help="A system message to begin with.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=512, show_default=True, help="Tokens of an answer at most.")
@click.option("--draft", default="auto", show_default=True, metavar="NAME", help="Drafts: auto, joined, streams, lookup or none.")
@session_options
@sampling_options
@click.option("--stats/--no-stats", default=False, help="A line of statistics on standard error after each answer.")
def chat(
    bundle: Path,
    system: str | None,
    max_new_tokens: int,
    draft: str,
    threads: int | None,
    compute_units: ComputeUnits | None,
    new_sampling: NewSampling,
    stats: bool,
) -> None:
    """Talk with the model in the folder BUNDLE; it sees the whole conversation.

    /clear starts again, /quit or the end of the input leaves. Ctrl-C stops an answer. With a --temperature and no --seed, every answer
    has a seed of its own, which --stats shows.

    \b
    Example:
      specstream chat sql-bundle --temperature 0.7
    """
    from specstream.runtimes import load

    lm = load(bundle, threads=threads, compute_units=compute_units)
    if not lm.manifest.tokenizer.has_chat_template:
        raise UserError(f"{bundle}: this model has no chat template; use 'specstream generate'")
    opening = [{"role": "system", "content": system}] if system else []
    history = list(opening)
    while (line := _ask()) is not None:
        if line in ("/quit", "/exit"):
            return
        if line == "/clear":
            history = list(opening)
        elif line:
            turn = [*history, {"role": "user", "content": line}]
            try:
                answer = _answer(lm, turn, max_new_tokens, draft, new_sampling())
            except UserError as error:  # mostly a conversation that has grown too long: it is not lost
                click.echo(f"error: {error} (/clear starts again)", err=True)
                continue
            history = [*turn, {"role": "assistant", "content": answer}]
            if stats and lm.last is not None:
                click.echo(click.style(statistics(lm.last), dim=True), err=True)


def _ask() -> str | None:
    """The user's next line; None at the end of the input."""
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        return line.strip() if line else None
    import contextlib

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - lines can be edited and called back once it is imported
    try:
        return input("> ").strip()
    except EOFError:
        click.echo()
        return None


def _answer(lm: LanguageModel, turn: list[dict[str, str]], max_new_tokens: int, draft: str, sampling: Sampling | None) -> str:
    """Stream one answer to standard output. Ctrl-C ends it early; what was said so far stays in the conversation."""
    pieces: list[str] = []
    try:
        for piece in lm.stream(turn, max_new_tokens, draft, sampling=sampling):
            pieces.append(piece)
            click.echo(piece, nl=False)
    except KeyboardInterrupt:
        click.echo(" ...", nl=False)
    click.echo()
    return "".join(pieces)
