"""``specstream generate``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from specstream.models.errors import UserError
from specstream.toolchain.report import json_option, write_report
from specstream.toolchain.sampling_options import NewSampling, sampling_options
from specstream.toolchain.session_options import session_options

if TYPE_CHECKING:
    from specstream.runtimes import GenerationResult
    from specstream.runtimes.coreml_session import ComputeUnits


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("prompt", required=False)
@click.option("--prompt-file", type=click.Path(path_type=Path), metavar="FILE", help="Read the prompt from a file; '-' is standard input.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=256, show_default=True, help="Tokens to generate at most.")
@click.option("--draft", default="auto", show_default=True, metavar="NAME", help="Drafts: auto, joined, streams, lookup or none.")
@click.option("--budget", type=click.IntRange(min=1), metavar="ROWS", help="Rows of a verifying call at most.  [default: as many as pay]")
@session_options
@click.option("--raw", is_flag=True, help="Take the prompt as it is, without the chat template.")
@sampling_options
@click.option("--stats/--no-stats", default=True, help="End with a line of statistics on standard error.")
@json_option
def generate(
    bundle: Path,
    prompt: str | None,
    prompt_file: Path | None,
    max_new_tokens: int,
    draft: str,
    budget: int | None,
    threads: int | None,
    compute_units: ComputeUnits | None,
    raw: bool,
    new_sampling: NewSampling,
    stats: bool,
    json_file: Path | None,
) -> None:
    """Answer PROMPT with the model in the folder BUNDLE. The text goes to standard output as it comes; '-' reads standard input.

    The text is the same with any --draft: drafts only change how fast it comes. Decoding is greedy without a --temperature; with one,
    the same --seed gives the same text (left out, one is chosen and shown).

    \b
    Example:
      specstream generate sql-bundle "Name three rivers." --max-new-tokens 64
      specstream generate sql-bundle "Name three rivers." --temperature 0.8 --top-p 0.95 --seed 7
      cat question.txt | specstream generate sql-bundle - --draft none
    """
    text = read_prompt(prompt, prompt_file)

    from specstream.runtimes import load

    lm = load(bundle, threads=threads, compute_units=compute_units)
    # --draft is checked against the names that the runtime knows.
    for piece in lm.stream(text, max_new_tokens, draft, raw=raw, budget=budget or "adaptive", sampling=new_sampling()):
        click.echo(piece, nl=False)
    click.echo()
    assert lm.last is not None
    if stats:
        click.echo(click.style(statistics(lm.last), dim=True), err=True)
    model, scheme = lm.manifest.model.name, lm.manifest.quantization.scheme
    made_by = {"model": model, "scheme": scheme, "threads": lm.threads, "draft": draft}
    write_report(json_file, "generate", made_by | lm.last.to_json())


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The prompt from where it was given; the final line break of a file or of standard input is dropped.

    Raises:
        UserError: none, two, an empty one, or a file that cannot be read.
    """
    if (prompt is None) == (prompt_file is None):
        raise UserError("give the prompt either as PROMPT ('-' reads standard input) or with --prompt-file")
    if prompt == "-" or prompt_file == Path("-"):
        text = _decode(sys.stdin.buffer.read(), "standard input")
    elif prompt_file is not None:
        try:
            text = _decode(prompt_file.read_bytes(), str(prompt_file))
        except OSError as error:
            raise UserError(f"--prompt-file {prompt_file}: {error.strerror}") from error
    else:
        assert prompt is not None
        text = prompt
    if not text.strip():
        raise UserError("the prompt is empty; give some text")
    return text


def _decode(data: bytes, source: str) -> str:
    try:
        return data.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise UserError(f"{source}: not UTF-8 text ({error.reason} at byte {error.start})") from None


def statistics(result: GenerationResult) -> str:
    """One line: tokens, tokens per call, tokens/s, time to first token, the seed when noise took part."""
    parts = [f"{result.tokens} tokens"]
    if result.tokens_per_call is not None:
        parts.append(f"{result.tokens_per_call:.2f} tokens per call")
    if result.tokens_per_second is not None:
        parts.append(f"{result.tokens_per_second:.1f} tokens/s")
    parts.append(f"first token after {result.first_token_seconds:.2f} s")
    if result.finish_reason == "length":
        parts.append("cut at the length limit")
    if result.sampling is not None and result.sampling.temperature > 0:
        parts.append(f"seed {result.sampling.seed}")
    return " · ".join(parts)
