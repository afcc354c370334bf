"""Tokens per call of each draft source and of sources joined, replayed over texts that are decoded once.

    python benchmarks/draft_sources.py BUNDLE benchmarks/data/sql.jsonl --outputs train.jsonl --recordings sql.npz

Greedy text does not depend on the drafter, so one plain decoding of the prompts, with the streams of every position, is enough. It is
kept in the file of ``--recordings``. ``--outputs`` are rows with "completion" of which the n-gram table is built; never rows of DATA. The
weights that join the sources are fitted on each half of the prompts and judged on the other. Nothing here is a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table
from task import read

from specstream.models.errors import UserError
from specstream.runtimes import load
from specstream.runtimes.drafters import Drafter, StreamDrafter, Streams
from specstream.runtimes.join_fit import fit_join
from specstream.runtimes.joined import JoinedDrafter, JoinWeights
from specstream.runtimes.language_model import LanguageModel
from specstream.runtimes.lookup import SuffixIndex, fold_vocabulary
from specstream.runtimes.ngrams import NgramTable, build_ngrams
from specstream.runtimes.replay import Recording, record, replay
from specstream.toolchain.cli import run
from specstream.toolchain.report import json_option, write_report


def recorded(lm: LanguageModel, prompts: Sequence[str], max_new_tokens: int, file: Path | None) -> list[Recording]:
    """Decode the prompts, or read what was decoded earlier."""
    ids = [lm.prompt_ids(prompt) for prompt in prompts]
    if file is not None and file.exists():
        kept = read_recordings(file)
        if [list(r.prompt_ids) for r in kept] != ids or {r.max_new_tokens for r in kept} != {max_new_tokens}:
            raise UserError(f"{file}: recordings of other prompts or of another length; name another file with --recordings")
        return kept
    bar = track(ids, description="decoding", console=Console(stderr=True), transient=True)
    made = [record(lm.session, prompt, max_new_tokens=max_new_tokens, stop_ids=lm.codec.stop_ids) for prompt in bar]
    if file is not None:
        write_recordings(file, made)
    return made


def write_recordings(file: Path, recordings: Sequence[Recording]) -> None:
    """An .npz of plain arrays."""
    arrays: dict[str, Any] = {"count": len(recordings)}
    for i, recording in enumerate(recordings):
        arrays |= {f"{i}.prompt": recording.prompt_ids, f"{i}.tokens": recording.tokens}
        arrays[f"{i}.limits"] = (recording.max_new_tokens, recording.vocab_size)
        there = [s for s in recording.streams if s is not None]
        arrays[f"{i}.positions"] = [-1 if s is None else s.position for s in recording.streams]
        if there:
            arrays |= {f"{i}.ids": np.stack([s.ids for s in there]), f"{i}.logprobs": np.stack([s.logprobs for s in there])}
            if there[0].pairs is not None:
                arrays[f"{i}.pairs"] = np.stack([s.pairs for s in there if s.pairs is not None])
    np.savez_compressed(file, allow_pickle=False, **{name: np.asarray(value) for name, value in arrays.items()})


def read_recordings(file: Path) -> list[Recording]:
    """Read what :func:`write_recordings` wrote."""
    made = []
    with np.load(file, allow_pickle=False) as stored:
        for i in range(int(stored["count"])):
            streams: list[Streams | None] = []
            ids, logprobs, pairs = (stored[f"{i}.{n}"] if f"{i}.{n}" in stored.files else None for n in ("ids", "logprobs", "pairs"))
            used = 0
            for position in stored[f"{i}.positions"].tolist():
                if position < 0 or ids is None or logprobs is None:
                    streams.append(None)
                    continue
                streams.append(Streams(ids[used], logprobs[used], position, None if pairs is None else pairs[used]))
                used += 1
            prompt, tokens = stored[f"{i}.prompt"].tolist(), stored[f"{i}.tokens"].tolist()
            made.append(Recording(tuple(prompt), tuple(tokens), tuple(streams), *stored[f"{i}.limits"].tolist()))
    return made


def table_of(lm: LanguageModel, outputs: Path, prompt_tail: Sequence[int]) -> NgramTable:
    """The n-gram table of the completions in ``outputs``; ``prompt_tail`` is what stands before each."""
    rows = read(outputs, 10**9)
    texts = lm.codec.tokenizer.encode_batch([row["completion"] for row in rows], add_special_tokens=False)
    return build_ngrams(([*prompt_tail, *text.ids, *lm.manifest.tokenizer.stop_ids[:1]] for text in texts), lm.manifest.model.vocab_size)


def tokens_per_call(halves: Sequence[Sequence[Recording]], drafters: Sequence[Drafter], budget: int) -> float:
    """Pooled over prompts; drafter i on half i."""
    done = [replay(recording, drafter, budget) for half, drafter in zip(halves, drafters, strict=True) for recording in half]
    return sum(r.tokens for r in done) / max(sum(r.calls for r in done), 1)


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("data", type=click.Path(path_type=Path))
@click.option(
    "--outputs", type=click.Path(path_type=Path), help='JSON lines with "completion" for the n-gram table. [default: the bundle\'s]'
)
@click.option("--recordings", type=click.Path(path_type=Path), help="Where decoded texts are kept (.npz).")
@click.option("--limit", type=click.IntRange(min=2), default=60, show_default=True, help="Prompts, from the start of DATA.")
@click.option("--budgets", default="8,12,16", show_default=True, help="Rows of a call, several with commas.")
@click.option("--max-new-tokens", type=click.IntRange(min=2), default=96, show_default=True)
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads.")
@json_option
def draft_sources(
    bundle: Path,
    data: Path,
    outputs: Path | None,
    recordings: Path | None,
    limit: int,
    budgets: str,
    max_new_tokens: int,
    threads: int | None,
    json_file: Path | None,
) -> None:
    """Tokens per call of BUNDLE's draft sources on the prompts of DATA."""
    rows = read(data, limit)
    lm = load(bundle, threads=threads)
    texts = recorded(lm, [row["prompt"] for row in rows], max_new_tokens, recordings)
    ngrams = table_of(lm, outputs, texts[0].prompt_ids[-4:]) if outputs is not None else lm.ngrams
    fold = fold_vocabulary(lm.codec.tokenizer, lm.manifest.model.vocab_size)
    streams = lm.manifest.streams
    temperatures = streams.calibration if streams is not None else ()
    halves = [texts[::2], texts[1::2]]

    def fitted(use_streams: bool, use_lookup: bool, table: NgramTable | None) -> list[Drafter]:
        """For each half, the sources joined with weights fitted on the other."""
        drafters: list[Drafter] = []
        for half in halves[::-1]:
            known = half if use_streams else [dataclasses.replace(r, streams=(None,) * len(r.streams)) for r in half]
            weights: JoinWeights = fit_join(known, fold=fold, use_lookup=use_lookup, ngrams=table, temperatures=temperatures).weights
            index = SuffixIndex(fold) if use_lookup else None
            drafters.append(JoinedDrafter(use_streams, index, table, weights, temperatures))
        return drafters

    kinds: dict[str, Callable[[], list[Drafter]]] = {"lookup": lambda: fitted(False, True, None)}
    if ngrams is not None:
        kinds |= {"n-grams": lambda: fitted(False, False, ngrams), "lookup + n-grams": lambda: fitted(False, True, ngrams)}
    if streams is not None:
        kinds |= {"streams": lambda: [StreamDrafter(temperatures)] * 2, "streams + lookup": lambda: fitted(True, True, None)}
        if ngrams is not None:
            kinds |= {"streams + n-grams": lambda: fitted(True, False, ngrams), "all three": lambda: fitted(True, True, ngrams)}
    sizes = [int(budget) for budget in budgets.split(",")]
    table = Table(title=f"{bundle.name} on {data.name}: tokens per call, {len(texts)} prompts, {sum(len(t.tokens) for t in texts)} tokens")
    table.add_column("drafts")
    for size in sizes:
        table.add_column(f"{size} rows", justify="right")
    results: dict[str, dict[str, float]] = {}
    for name, make in kinds.items():
        drafters = make()
        results[name] = {str(size): tokens_per_call(halves, drafters, size) for size in sizes}
        table.add_row(name, *(f"{value:.2f}" for value in results[name].values()))
    Console().print(table)
    write_report(json_file, "draft_sources", {"bundle": str(bundle), "data": data.name, "prompts": len(texts), "tokens_per_call": results})


if __name__ == "__main__":
    import sys

    sys.exit(run(sys.argv[1:], draft_sources, "draft_sources.py"))
