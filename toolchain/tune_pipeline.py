"""What `tune` does: times calls, records texts, works out which way of drafting is fastest. Prints nothing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Final

import numpy as np

from specstream.models.errors import UserError
from specstream.runtimes.adaptive import CallCosts
from specstream.runtimes.bundle import Bundle
from specstream.runtimes.drafters import Drafter, NoDrafter, StreamDrafter
from specstream.runtimes.join_fit import fit_join
from specstream.runtimes.joined import PRIOR_WEIGHTS, JoinedDrafter, JoinWeights, lookup_drafter
from specstream.runtimes.lookup import SuffixIndex, fold_vocabulary
from specstream.runtimes.manifest import Manifest
from specstream.runtimes.ngrams import NGRAM_FILE, NgramTable
from specstream.runtimes.ort_session import OrtSession, usable_cores
from specstream.runtimes.profile import DeviceProfile, DraftName, MeasuredCall, Speed, bundle_id
from specstream.runtimes.replay import Recording, record, replay
from specstream.runtimes.session import Session, prefill, tree_rows
from specstream.runtimes.text import TextCodec
from specstream.runtimes.threads import share_threads, sharing
from specstream.runtimes.tree import StreamPolicy, chain, likeliest_last
from specstream.toolchain.report import versions

ROWS: Final = (1, 2, 4, 6, 8, 12, 16, 18, 24)  # kernels of 8-bit products take rows by sixes
STREAM_ROWS: Final = (1, 2, 4)  # beside tree rows; a pass of delayed streams is always for one
STREAMS_BESIDE: Final = 8  # rows of the calls in which streams beside rows are timed
FIT_PROMPTS: Final = 8  # fewer say too little to fit weights to

# Where --prompts gives none: what a general model may be asked. A task's own prompts are better.
SAMPLE_PROMPTS: Final = (
    "Name three rivers and the countries they flow through.",
    "Write a short thank-you note to a colleague who helped me move house.",
    "Explain in two sentences why the sky is blue.",
    "List the steps to make a cup of tea.",
    'Rewrite this sentence in the past tense: "The children play in the garden and their parents watch them from the house."',
    "Write a Python function that returns the larger of two numbers.",
    'Repeat the following list as a comma-separated line: "apples, oranges, ripe bananas, green grapes, dried figs".',
    "What should I consider when I buy a used bicycle?",
)


@dataclass(frozen=True)
class TuneOptions:
    """What to measure.

    Attributes:
        threads: to try; the last one also decodes the sample prompts.
        contexts: committed rows before a timed call.
        rounds: timed calls of each kind.
        max_new_tokens: of each sample text.
    """

    threads: tuple[int, ...]
    contexts: tuple[int, ...] = (128, 512)
    rounds: int = 9
    max_new_tokens: int = 64


def default_threads(cores: int) -> tuple[int, ...]:
    """1, 2, 4, ... and all cores."""
    counts = [1]
    while counts[-1] * 2 <= cores:
        counts.append(counts[-1] * 2)
    return tuple(sorted({*counts, cores}))


def tune(path: Path, prompts: Sequence[str], options: TuneOptions, step: Callable[[str], None]) -> tuple[DeviceProfile, Manifest]:
    """Measure a bundle on this device and choose.

    Args:
        path: the bundle's folder.
        prompts: sample prompts, at least one.
        step: told what is being done.

    Returns:
        The profile, and the manifest of the bundle that it is of.

    Raises:
        UserError: a bad bundle, or options and prompts that do not fit it.
    """
    bundle = Bundle.load(path)
    if bundle.manifest.contract.coreml is not None:
        raise UserError(f"{path}: a Core ML bundle; tune measures ONNX Runtime, so time calls on the device itself (docs/ios.md)")
    codec = TextCodec.from_bundle(bundle)
    model, streams = bundle.manifest.model, bundle.manifest.streams
    gamma = streams.num_streams if streams else 0
    needed = max(options.contexts) + max(ROWS) + gamma * max(STREAM_ROWS)
    if needed > model.context_length:
        raise UserError(
            f"--contexts {max(options.contexts)}: with its rows that is {needed}, the model's context is {model.context_length}"
        )
    prompt_ids = [codec.encode(prompt) for prompt in prompts]
    ngrams = NgramTable.load(bundle.path(NGRAM_FILE), model.vocab_size) if bundle.has(NGRAM_FILE) else None

    calls: list[MeasuredCall] = []
    recordings: list[Recording] = []
    # ONNX Runtime's shared pool has one size in a process.
    apart = sharing() and sum(threads > 1 for threads in options.threads) > 1
    for threads in options.threads:
        recorded = prompt_ids if threads == options.threads[-1] else []
        if apart:
            step(f"timing calls{' and decoding sample prompts' * bool(recorded)}: {threads} threads")
            with ProcessPoolExecutor(1, get_context("spawn"), initializer=share_threads) as process:
                found = process.submit(_measure, path, prompt_ids[0], recorded, threads, options).result()
        else:
            found = _measure(path, prompt_ids[0], recorded, threads, options, step)
        calls += found[0]
        recordings += found[1]
    step("comparing")
    sources = Sources(
        fold=fold_vocabulary(codec.tokenizer, model.vocab_size),
        ngrams=ngrams,
        temperatures=streams.calibration if streams else (),
        has_streams=streams is not None,
        delayed=streams is not None and streams.placement == "delayed",
    )
    return choose(bundle.manifest, calls, recordings, sources, options), bundle.manifest


def _measure(
    path: Path,
    sample: Sequence[int],
    prompts: Sequence[Sequence[int]],
    threads: int,
    options: TuneOptions,
    step: Callable[[str], None] = lambda _: None,
) -> tuple[list[MeasuredCall], list[Recording]]:
    """Times of calls with these threads, and recordings of ``prompts``. A session of its own: one model in memory at a time."""
    bundle = Bundle.load(path, check=False)  # read whole by who calls
    session, stop_ids = OrtSession(bundle, threads=threads), TextCodec.from_bundle(bundle).stop_ids
    calls: list[MeasuredCall] = []
    for context in options.contexts:
        step(f"timing calls: {threads} threads, {context} tokens of context")
        calls += measure_calls(session, sample, threads, context, options.rounds)
    recordings = []
    for i, ids in enumerate(prompts):
        step(f"decoding sample prompt {i + 1} of {len(prompts)}")
        recordings.append(record(session, ids, max_new_tokens=options.max_new_tokens, stop_ids=stop_ids))
    return calls, recordings


def measure_calls(session: Session, sample: Sequence[int], threads: int, context: int, rounds: int) -> list[MeasuredCall]:
    """Median time of calls with each number of rows, and with streams, after ``context`` committed tokens.

    Kinds take turns, so that a drift of the machine meets all alike; the first round is warm-up. Nothing is committed, so every call
    has the same past.
    """
    text = [sample[i % len(sample)] for i in range(context + max(ROWS))]
    session.rewind(0)
    prefill(session, text[:context])
    kinds = [(rows, 0) for rows in ROWS]
    if session.num_streams:
        kinds += [(0, 1)] if session.delayed else [(STREAMS_BESIDE, count) for count in STREAM_ROWS]
    times: dict[tuple[int, int], list[float]] = {kind: [] for kind in kinds}
    for turn in range(rounds + 1):
        for rows, streamed in kinds:
            if rows == 0:
                session.run(tree_rows(chain(text[context], ()), context))
                session.commit([0])
                start = time.perf_counter()
                session.draft(text[context + 1])
            else:
                carrying = np.arange(streamed, dtype=np.int64)
                start = time.perf_counter()
                session.run(tree_rows(chain(text[context], text[context + 1 : context + rows]), context, carrying))
            seconds = time.perf_counter() - start
            session.rewind(context)
            if turn:
                times[rows, streamed].append(seconds)
    return [MeasuredCall(threads, context, *kind, statistics.median(found) * 1e3) for kind, found in times.items()]


@dataclass(frozen=True)
class Sources:
    """Where drafts may come from."""

    fold: Sequence[int]
    ngrams: NgramTable | None
    temperatures: tuple[float, ...]
    has_streams: bool
    delayed: bool


def call_costs(calls: Sequence[MeasuredCall], threads: int, stream_rows: int) -> tuple[CallCosts, float]:
    """Costs with these threads, and a plain call's ms: geometric means over the contexts that were measured."""
    by_kind: dict[tuple[int, int], list[float]] = {}
    for call in calls:
        if call.threads == threads:
            by_kind.setdefault((call.rows, call.stream_rows), []).append(call.ms)
    ms = {kind: statistics.geometric_mean(found) for kind, found in by_kind.items()}
    plain = ms[1, 0]
    rows = tuple(sorted(rows for rows, streamed in ms if not streamed))
    streams = 0.0
    if stream_rows and (0, 1) in ms:
        streams = ms[0, 1] / plain
    elif stream_rows:
        streams = max(ms[STREAMS_BESIDE, stream_rows] - ms[STREAMS_BESIDE, 0], 0.0) / plain
    return CallCosts(rows, tuple(ms[n, 0] / plain for n in rows), streams), plain


def choose(
    manifest: Manifest, calls: Sequence[MeasuredCall], recordings: Sequence[Recording], sources: Sources, options: TuneOptions
) -> DeviceProfile:
    """Work out every combination's tokens per second and take the largest; among equals the first, which has fewer rows.

    The text does not depend on the drafter, so replaying the recordings gives the exact calls of each. With enough prompts, weights
    that join the sources are fitted, and each half of the prompts is judged with those of the other half.
    """
    weights: JoinWeights | None = None
    per_half = [PRIOR_WEIGHTS, PRIOR_WEIGHTS]
    if len(recordings) >= FIT_PROMPTS:

        def fitted(part: Sequence[Recording]) -> JoinWeights:
            return fit_join(part, fold=sources.fold, ngrams=sources.ngrams, temperatures=sources.temperatures).weights

        weights, per_half = fitted(recordings), [fitted(recordings[1::2]), fitted(recordings[::2])]

    best: tuple[Speed, int] | None = None
    speeds: list[Speed] = []
    tokens = sum(len(recording.tokens) - 1 for recording in recordings)
    if tokens < 1:
        raise UserError("the sample prompts end after one token each, so nothing can be measured; give others with --prompts")
    for draft, stream_rows, drafters, policy in _ways(sources, per_half):
        for budget in (1,) if draft == "none" else ROWS[1:]:
            replays = [replay(recording, drafters[i % 2], budget, policy) for i, recording in enumerate(recordings)]
            rows = np.array([n for done in replays for n in done.rows])
            for threads in options.threads:
                costs, ms = call_costs(calls, threads, stream_rows)
                seconds = float((costs.table(max(ROWS))[rows - 1] + costs.streams).sum()) * ms / 1e3
                speed = Speed(draft, budget, stream_rows, tokens / len(rows), tokens / seconds)
                if best is None or speed.tokens_per_second > best[0].tokens_per_second:
                    best = speed, threads
                if threads == options.threads[-1]:
                    speeds.append(speed)
    assert best is not None
    chosen, threads = best
    costs, ms = call_costs(calls, threads, chosen.stream_rows)
    return DeviceProfile(
        bundle=bundle_id(manifest),
        model=manifest.model.name,
        scheme=manifest.quantization.scheme,
        cores=usable_cores(),
        threads=threads,
        draft=chosen.draft,
        budget=chosen.budget,
        stream_rows=chosen.stream_rows,
        placement=manifest.streams.placement if manifest.streams else None,
        costs=costs,
        weights=weights,
        tokens_per_second=chosen.tokens_per_second,
        plain_tokens_per_second=1e3 / ms,
        prompts=len(recordings),
        call_cost=tuple(calls),
        speeds=tuple(speeds),
        versions=versions(),
    )


def _ways(sources: Sources, weights: Sequence[JoinWeights]) -> Iterator[tuple[DraftName, int, list[Drafter], StreamPolicy | None]]:
    """Name, stream rows, a drafter for each half of the prompts, and which rows carry streams (None: always fresh)."""
    yield "none", 0, [NoDrafter(), NoDrafter()], None
    yield "lookup", 0, [lookup_drafter(sources.fold, w) for w in weights], None
    if not sources.has_streams:
        if sources.ngrams is not None:
            yield "joined", 0, [JoinedDrafter(False, SuffixIndex(sources.fold), sources.ngrams, w) for w in weights], None
        return
    temperatures = sources.temperatures
    for count in (1,) if sources.delayed else STREAM_ROWS:
        policy = None if sources.delayed else likeliest_last(count)
        yield "streams", count, [StreamDrafter(temperatures)] * 2, policy
        joined: list[Drafter] = [JoinedDrafter(True, SuffixIndex(sources.fold), sources.ngrams, w, temperatures) for w in weights]
        yield "joined", count, joined, policy
