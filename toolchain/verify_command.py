"""``specstream verify``."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specstream.models.errors import CheckFailed, UserError
from specstream.toolchain.prompt_rows import read_prompt_rows
from specstream.toolchain.report import json_option, write_report
from specstream.toolchain.sampling_options import NewSampling, sampling_options
from specstream.toolchain.session_options import session_options

if TYPE_CHECKING:
    from specstream.runtimes import LanguageModel, Sampling
    from specstream.runtimes.coreml_session import ComputeUnits
    from specstream.runtimes.verify import Mismatch, VerifyReport


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--prompts", "prompts_file", type=click.Path(path_type=Path), required=True, metavar="FILE", help='JSON lines with "prompt".')
@click.option("--limit", type=click.IntRange(min=1), default=200, show_default=True, help="Take the first prompts only.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=128, show_default=True, help="Tokens of each text at most.")
@click.option("--draft", default="auto", show_default=True, metavar="NAME", help="Drafts: auto, joined, streams, lookup or none.")
@click.option("--budget", type=click.IntRange(min=1), metavar="ROWS", help="Rows of a verifying call at most.  [default: 16]")
@click.option(
    "--reference",
    type=click.Choice(["auto", "plain", "transformers"]),
    default="auto",
    show_default=True,
    help="Besides plain decoding, compare with transformers: if possible, never, or always.",
)
@click.option("--model", metavar="MODEL", help="Base weights for transformers. [default: the name in the bundle]")
@click.option("--adapter", metavar="ADAPTER", help="Adapter for transformers. [default: the zoo's with the bundle's checksum]")
@session_options
@click.option("--raw", is_flag=True, help="Take prompts as they are, without the chat template.")
@sampling_options
@click.option("--record/--no-record", default=True, help="Note the result in the bundle, where 'info' shows it.")
@json_option
def verify(
    bundle: Path,
    prompts_file: Path,
    limit: int,
    max_new_tokens: int,
    draft: str,
    budget: int | None,
    reference: str,
    model: str | None,
    adapter: str | None,
    threads: int | None,
    compute_units: ComputeUnits | None,
    raw: bool,
    new_sampling: NewSampling,
    record: bool,
    json_file: Path | None,
) -> None:
    """Check that speculation does not change the text of the bundle in the folder BUNDLE.

    Each prompt is decoded with drafts, plainly by the same graph, and by transformers' greedy generate from the original weights;
    the texts must be equal token by token. Places where they differ and the two best logits are closer than 0.001 count as near-ties
    and are listed. Exit code 1 when there are other differences; with rounded activations (int4, int8, w8a8), when there are more than
    plain decoding itself has between its kernels for one row and for several.

    With a --temperature (or penalties), speculative sampled text is compared with plain sampled text of the same seed only: transformers
    draws other noise. The bundle keeps its record of greedy decoding.

    \b
    Example:
      specstream verify sql-bundle --prompts tests/data/sql.jsonl --limit 200
      specstream verify sql-bundle --prompts tests/data/sql.jsonl --temperature 0.8 --seed 7
    """
    sampling = new_sampling()
    texts = read_prompt_rows(prompts_file, limit, "--prompts").prompts

    from specstream.runtimes import load
    from specstream.runtimes.language_model import DEFAULT_BUDGET, DEFAULT_STREAM_ROWS, stream_policy
    from specstream.runtimes.ort_session import OrtSession, usable_cores
    from specstream.runtimes.verify import verify as compare
    from specstream.toolchain.terminal import progress_bar, step_status

    lm = load(bundle, threads=threads, compute_units=compute_units)
    prompts = [lm.prompt_ids(text, raw) for text in texts]
    drafter = lm.drafter(draft)  # the runtime checks the name
    with step_status() as step:
        step("loading the weights for transformers")
        transformers_text, why_not = _transformers(lm, reference, model, adapter, sampling)
    if transformers_text is None:
        click.echo(f"not compared with transformers: {why_not}", err=True)
    session = lm.session

    def one_row(wanted: bool) -> None:
        if isinstance(session, OrtSession):
            session.pad_single = not wanted

    rounded = isinstance(session, OrtSession) and lm.manifest.rounds_activations
    if rounded:
        one_row(False)
    with progress_bar("verifying", len(prompts)) as progress:
        report = compare(
            session,
            prompts,
            drafter,
            max_new_tokens=max_new_tokens,
            stop_ids=lm.codec.stop_ids,
            budget=budget or DEFAULT_BUDGET,
            policy=stream_policy(DEFAULT_STREAM_ROWS),
            reference=transformers_text,
            on_prompt=progress,
            sampling=sampling,
            one_row=one_row if rounded else None,
        )
    _print(report, lm, sampling)
    summary = report.to_json()
    made_by = {"model": lm.manifest.model.name, "scheme": lm.manifest.quantization.scheme, "threads": threads or usable_cores()}
    settings = {"prompts_file": str(prompts_file), "draft": draft, "sampling": None if sampling is None else sampling.to_json()}
    write_report(json_file, "verify", made_by | settings | summary)
    if record and sampling is None:
        _record(bundle, lm, {k: v for k, v in summary.items() if k != "mismatches"} | {"prompts_file": prompts_file.name})
    if not report.passed:
        raise CheckFailed(f"{bundle}: {failure(report)}")


def _transformers(
    lm: LanguageModel, reference: str, model: str | None, adapter: str | None, sampling: Sampling | None
) -> tuple[Callable[[Sequence[int], int], Sequence[int]] | None, str]:
    """transformers' decoding of the bundle's weights; or None and why there is none.

    Raises:
        UserError: it was asked for (by --reference, --model or --adapter) and cannot be had.
    """
    from specstream.toolchain.zoo import adapter_with, resolve_adapter

    if reference == "plain":
        return None, "--reference plain"
    asked = reference == "transformers" or model is not None or adapter is not None
    if sampling is not None:
        if asked:
            raise UserError(
                "transformers is compared with greedy decoding only: leave out the sampling options, or --reference, --model and --adapter"
            )
        return None, "its noise and penalties are others"
    if not asked and (importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None):
        return None, "torch and transformers are not installed (the export extra brings them)"
    streams = lm.manifest.streams
    folder = None
    try:
        if adapter is not None:
            folder = resolve_adapter(adapter)
        elif streams is not None and streams.main_parameters:
            folder = adapter_with(streams.adapter_sha256)
            if folder is None:
                raise UserError("the bundle has a fine-tune that is not in the zoo; name its adapter with --adapter")
        from specstream.toolchain.reference import TransformersReference

        text = TransformersReference(model or lm.manifest.model.name, folder, lm.manifest.model.fingerprint, lm.codec.stop_ids)
    except UserError as error:
        if asked:
            raise
        return None, str(error)
    return text, ""


def failure(report: VerifyReport) -> str:
    """What a failed report says in one line."""
    said = []
    if report.differences:
        first = next(m for m in report.mismatches if not m.near_tie)
        said.append(f"{report.differences} differences; the first: prompt {first.prompt}, token {first.position}, against {first.against}")
    if not report.rows_independent:
        said.append(f"a row's logits change with other branches beside it, by up to {report.rows_max_abs_diff:.1e}")
    return "; ".join(said)


def compared_with(reference: str) -> str:
    """The report's ``reference`` in words: plain decoding is always among it."""
    return "plain decoding" if reference == "plain" else f"plain decoding and {reference}"


def _print(report: VerifyReport, lm: LanguageModel, sampling: Sampling | None) -> None:
    calls = "" if report.tokens_per_call is None else f", {report.tokens_per_call:.2f} tokens per call"
    seed = "" if sampling is None or sampling.temperature == 0 else f", seed {sampling.seed}"
    click.echo(f"{report.prompts} prompts, {report.tokens} tokens{calls}, compared with {compared_with(report.reference)}{seed}")
    click.echo(f"differences {report.differences}, near-ties {report.near_ties}, flip rate {report.flip_rate:.2e}")
    if report.one_row_flip_rate is not None:
        click.echo(f"flip rate of plain decoding between kernels for one row and for several: {report.one_row_flip_rate:.2e}")
    if report.one_row_flip_rate is None:
        click.echo(f"rows of a tree independent: {'yes' if report.rows_independent else 'no'}, to {report.rows_max_abs_diff:.1e}")
    else:
        # A kernel of rounded activations may depend on how many rows a call has, so logits move; what counts is what is chosen.
        kept = "changed no choice" if report.rows_independent else "CHANGED A CHOICE"
        click.echo(f"other branches of a tree {kept} (logits by up to {report.rows_max_abs_diff:.1e})")
    for mismatch in report.mismatches:
        click.echo(f"  {'near-tie' if mismatch.near_tie else 'DIFFERENT'}: {_explain(mismatch, lm)}")


def _explain(mismatch: Mismatch, lm: LanguageModel) -> str:
    def show(token: int | None) -> str:
        return "the end" if token is None else f"{lm.codec.tokenizer.decode([token], skip_special_tokens=False)!r} ({token})"

    # Of a sampled text, those are logits with noise.
    best = ", ".join(f"{show(token)} {logit:.6f}" for token, logit in zip(mismatch.best, mismatch.logits, strict=True))
    return (
        f"prompt {mismatch.prompt}, token {mismatch.position}, against {mismatch.against}: {show(mismatch.speculative)} instead of "
        f"{show(mismatch.other)}; best logits {best}"
    )


def _record(bundle: Path, lm: LanguageModel, summary: dict[str, Any]) -> None:
    """Put the result into the bundle's manifest; a bundle that cannot be written to is left as it is."""
    from specstream.runtimes.manifest import MANIFEST_NAME

    partial = bundle / f".{MANIFEST_NAME}.partial"
    try:
        partial.write_text(dataclasses.replace(lm.manifest, verified=summary).to_json(), encoding="utf-8")
        partial.replace(bundle / MANIFEST_NAME)
    except OSError as error:
        click.echo(f"the result is not recorded in {bundle}: {error.strerror}", err=True)
    finally:
        try:
            partial.unlink(missing_ok=True)
        except OSError as error:
            click.echo(f"{partial} is left behind: {error.strerror}", err=True)
