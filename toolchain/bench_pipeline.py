"""What `bench` does: answers the same prompts with every bundle and drafter in turn, in one process, and works out the figures.

Speed means something only as a ratio of one run, so all variants share the run, the threads and the prompts. Prints nothing.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import onnxruntime as ort

from specstream.models.errors import UserError
from specstream.runtimes.bundle import Bundle
from specstream.runtimes.language_model import Budget, GenerationResult, LanguageModel, load
from specstream.runtimes.ort_session import OrtSession
from specstream.runtimes.profile import MeasuredCall
from specstream.toolchain.prompt_rows import read_prompt_rows
from specstream.toolchain.tune_pipeline import ROWS, STREAM_ROWS, measure_calls

PLAIN: Final = "none"
SETTLE_SECONDS: Final = 0.05  # between two texts: threads of the session before stop waiting for work meanwhile
CALL_COST_TURNS: Final = 3  # each bundle's calls are timed so often, in turn with the others'


@dataclass(frozen=True)
class Task:
    """Prompts, and one reference text for each or None."""

    name: str
    prompts: tuple[str, ...]
    references: tuple[str | None, ...]


@dataclass(frozen=True)
class BenchOptions:
    """What to measure.

    Attributes:
        drafts: names of :data:`specstream.runtimes.language_model.DRAFTS`; plain decoding is always measured too.
        threads: of every bundle's operators.
        max_new_tokens: of each text.
        budget: rows of a verifying call at most.
        contexts: committed rows before the timed calls of ``call_cost``; none, no such calls.
        rounds: timed calls of each kind, bundle and context.
    """

    drafts: tuple[str, ...]
    threads: int
    max_new_tokens: int = 128
    budget: Budget = "adaptive"
    contexts: tuple[int, ...] = (128,)
    rounds: int = 9


@dataclass(frozen=True)
class BundleFacts:
    """A bundle of the run. ``memory_bytes`` is how much the process grew by opening it; None where the system does not say."""

    bundle: str
    model: str
    scheme: str
    placement: str | None
    profile: bool
    bundle_bytes: int
    memory_bytes: int | None


@dataclass(frozen=True)
class Quality:
    """Against the references. ``exact_match``: equal once case and white space are folded. ``rouge_l``: mean, see :func:`rouge_l`."""

    references: int
    exact_match: float
    rouge_l: float


@dataclass(frozen=True)
class Run:
    """A variant (bundle and drafter) on a task. Medians are over prompts that took a call; times of decoding leave the prefill out.

    Attributes:
        bundle: its folder's name.
        prompts: answered.
        tokens: emitted, prefills' first ones included.
        tokens_per_second: median; None when no prompt took a call, as all figures of calls are then.
        tokens_per_call: pooled over prompts (design: "Words").
        calls: verifying calls of all prompts.
        ms_per_call: median of each prompt's decode time over its calls; passes of delayed streams count as time.
        first_token_seconds: median.
        outside_runtime_share: of all decode time, the part that was not spent inside ONNX Runtime.
        speedup_vs_plain: ratio of the medians of tokens/s to the same bundle without drafts.
        speedup_vs_plain_per_prompt: median of each prompt's ratio to it.
        speedup_vs_fastest_plain: ratio of the medians to the fastest plain variant of the task.
        speedup_vs_fastest_plain_per_prompt: median of each prompt's ratio to it.
        same_as_plain: share of texts that are those of the same bundle without drafts, token by token.
        quality: None for a task without references.
        each_tokens_per_second: of each prompt, None for one that took no call.
    """

    task: str
    bundle: str
    scheme: str
    drafter: str
    prompts: int
    tokens: int
    tokens_per_second: float | None
    tokens_per_call: float | None
    calls: int
    ms_per_call: float | None
    first_token_seconds: float
    outside_runtime_share: float | None
    speedup_vs_plain: float | None
    speedup_vs_plain_per_prompt: float | None
    speedup_vs_fastest_plain: float | None
    speedup_vs_fastest_plain_per_prompt: float | None
    same_as_plain: float
    quality: Quality | None
    each_tokens_per_second: tuple[float | None, ...]


@dataclass(frozen=True)
class CallCost:
    """Median time of one kind of call; ``stream_rows`` of a pass of delayed streams is 1 and its ``rows`` 0."""

    bundle: str
    scheme: str
    rows: int
    stream_rows: int
    context: int
    ms: float


@dataclass(frozen=True)
class BenchReport:
    """All of ``bench --json``, made-by keys aside."""

    bundles: tuple[BundleFacts, ...]
    threads: int
    runs: tuple[Run, ...]
    call_cost: tuple[CallCost, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class _Text:
    """One generated text and how long ONNX Runtime worked on it after the first token."""

    result: GenerationResult
    runtime_seconds: float

    @property
    def decode_seconds(self) -> float:
        """Time after the first token; 0 when that was all."""
        speed = self.result.tokens_per_second
        return (self.result.tokens - 1) / speed if speed else 0.0


class _Variant:
    """A bundle with a drafter, over a session that the bundle's variants share."""

    def __init__(self, opened: _Opened, draft: str) -> None:
        self.opened, self.draft = opened, draft
        shared = opened.lm
        # Its own object: what a drafter has learned of its acceptance belongs to it alone, and starts anew with a task.
        self.lm = LanguageModel(shared.manifest, shared.session, shared.codec, shared.profile, shared.ngrams)

    def answer(self, prompt_ids: Sequence[int], options: BenchOptions) -> _Text:
        for clock in self.opened.clocks:
            clock.calls.clear()
        budget: Budget = 1 if self.draft == PLAIN else options.budget
        result = self.lm.generate(prompt_ids, options.max_new_tokens, self.draft, budget=budget)
        # The last calls of the main graph are the verifying ones; those before are the prefill.
        main = self.opened.clocks[0].calls
        decoding = main[len(main) - result.calls :]
        begin = decoding[0][0] if decoding else math.inf
        passes = [call for clock in self.opened.clocks[1:] for call in clock.calls if call[0] > begin]
        return _Text(result, sum(seconds for _, seconds in decoding + passes))


class _Clock:
    """Stands before an ONNX Runtime session and notes when each call began and how long it took."""

    def __init__(self, session: ort.InferenceSession) -> None:
        self._session = session
        self.calls: list[tuple[float, float]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def run_with_iobinding(self, binding: ort.IOBinding) -> None:
        begin = time.perf_counter()
        self._session.run_with_iobinding(binding)
        self.calls.append((begin, time.perf_counter() - begin))


class _Opened:
    """A bundle in memory, its ONNX Runtime sessions under a clock."""

    def __init__(self, path: Path, threads: int) -> None:
        before = _resident_bytes()
        if Bundle.load(path, check=False).manifest.contract.coreml is not None:
            raise UserError(f"{path}: a Core ML bundle; bench measures ONNX Runtime, so time calls on the device itself (docs/ios.md)")
        self.lm = load(path, threads=threads)
        self.name = path.absolute().name
        session = self.lm.session
        assert isinstance(session, OrtSession)
        self.clocks = [_Clock(session._session)]
        session._session = self.clocks[0]
        if session._draft_session is not None:
            self.clocks.append(_Clock(session._draft_session))
            session._draft_session = self.clocks[1]
        after = _resident_bytes()
        manifest = self.lm.manifest
        self.facts = BundleFacts(
            bundle=self.name,
            model=manifest.model.name,
            scheme=manifest.quantization.scheme,
            placement=manifest.streams.placement if manifest.streams else None,
            profile=self.lm.profile is not None,
            bundle_bytes=sum(entry.bytes for entry in manifest.files),
            memory_bytes=None if before is None or after is None else max(after - before, 0),
        )


def read_task(file: Path, limit: int) -> Task:
    """The first ``limit`` rows ``{"prompt", "completion"}`` of JSON lines; a completion may be missing, blank lines are skipped.

    Raises:
        UserError: no such file, a malformed line (with its number), or no prompts.
    """
    rows = read_prompt_rows(file, limit)
    return Task(file.stem, rows.prompts, rows.completions)


def bench(paths: Sequence[Path], tasks: Sequence[Task], options: BenchOptions, step: Callable[[str], None]) -> BenchReport:
    """Measure bundles of one model on tasks.

    Args:
        paths: the bundles' folders, one or more, each named differently.
        tasks: one or more.
        step: told what is being done.

    Raises:
        UserError: a bad bundle, bundles of different models or with the same name, a drafter that a bundle cannot run, prompts or
            contexts that are longer than the model's.
    """
    names = [path.absolute().name for path in paths]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"two bundles are named {name}; the report tells them apart by their folders' names, so rename one")
    manifests = [Bundle.load(path, check=False).manifest for path in paths]
    models = {manifest.model.fingerprint: manifest.model.name for manifest in manifests}
    if len(models) > 1:
        raise UserError(f"bundles of different base weights ({', '.join(models.values())}); their speeds are no ratio of anything")
    for path, manifest in zip(paths, manifests, strict=True):
        gamma = manifest.streams.num_streams if manifest.streams else 0
        rows, context = max(ROWS) + gamma * max(STREAM_ROWS), max(options.contexts, default=0)
        if context + rows > manifest.model.context_length and options.contexts:
            raise UserError(
                f"--contexts {context}: with its rows that is {context + rows}, the context of {path} is {manifest.model.context_length}"
            )
    drafts = tuple(dict.fromkeys((PLAIN, *options.drafts)))
    opened = []
    for path in paths:
        step(f"opening {path}")
        opened.append(_Opened(path, options.threads))
    prompt_ids = [_encode(opened, task) for task in tasks]
    for bundle in opened:
        for draft in drafts:
            bundle.lm.drafter(draft)  # refuses names and missing streams before anything is timed

    runs: list[Run] = []
    for task, ids in zip(tasks, prompt_ids, strict=True):
        variants = [_Variant(bundle, draft) for bundle in opened for draft in drafts]
        runs += _summarise(task, variants, _in_turn(task.name, variants, ids, options, step))
    cost = _call_cost(opened, prompt_ids[0], options, step)
    return BenchReport(tuple(bundle.facts for bundle in opened), options.threads, tuple(runs), tuple(cost))


def _encode(opened: Sequence[_Opened], task: Task) -> dict[str, list[list[int]]]:
    """Token ids of a task's prompts, by bundle.

    Raises:
        UserError: a prompt that is longer than a bundle's context.
    """
    found: dict[str, list[list[int]]] = {}
    for bundle in opened:
        found[bundle.name] = [bundle.lm.prompt_ids(prompt) for prompt in task.prompts]
        for number, ids in enumerate(found[bundle.name], 1):
            if len(ids) > bundle.lm.session.capacity:
                raise UserError(
                    f"{task.name}, prompt {number}: {len(ids)} tokens, the context of {bundle.name} is {bundle.lm.session.capacity}"
                )
    return found


def _in_turn(
    name: str, variants: Sequence[_Variant], ids: dict[str, list[list[int]]], options: BenchOptions, step: Callable[[str], None]
) -> list[list[_Text]]:
    """Texts by variant and prompt. The order rotates from prompt to prompt, so that a drift of the machine meets all alike."""
    texts: list[list[_Text]] = [[] for _ in variants]
    for variant in variants:
        step(f"{name}: warming up {variant.opened.name}, drafts {variant.draft}")
        variant.answer(ids[variant.opened.name][0], options)
    # Warming up must not teach the adaptive budget a prompt that is measured.
    fresh = [_Variant(variant.opened, variant.draft) for variant in variants]
    for variant in fresh:
        variant.lm.drafter(variant.draft)
    prompts = len(ids[variants[0].opened.name])
    for number in range(prompts):
        step(f"{name}: prompt {number + 1} of {prompts}")
        for turn in range(len(fresh)):
            i = (number + turn) % len(fresh)
            time.sleep(SETTLE_SECONDS)
            texts[i].append(fresh[i].answer(ids[fresh[i].opened.name][number], options))
    return texts


def _summarise(task: Task, variants: Sequence[_Variant], texts: Sequence[Sequence[_Text]]) -> Iterator[Run]:
    """The figures of each variant, and its ratios to the two baselines."""
    speeds = [tuple(text.result.tokens_per_second for text in found) for found in texts]
    plain = [i for i, variant in enumerate(variants) if variant.draft == PLAIN]
    fastest = max(plain, key=lambda i: _median(speeds[i]) or 0.0)
    for i, (variant, found) in enumerate(zip(variants, texts, strict=True)):
        own = next(j for j in plain if variants[j].opened is variant.opened)
        calls = sum(text.result.calls for text in found)
        tokens = sum(text.result.tokens for text in found)
        decode_seconds = sum(text.decode_seconds for text in found)
        each_ms = [text.decode_seconds / text.result.calls * 1e3 if text.result.calls else None for text in found]
        same = [text.result.token_ids == other.result.token_ids for text, other in zip(found, texts[own], strict=True)]
        yield Run(
            task=task.name,
            bundle=variant.opened.name,
            scheme=variant.opened.facts.scheme,
            drafter=variant.draft,
            prompts=len(found),
            tokens=tokens,
            tokens_per_second=_median(speeds[i]),
            tokens_per_call=(tokens - len(found)) / calls if calls else None,
            calls=calls,
            ms_per_call=_median(each_ms),
            first_token_seconds=statistics.median(text.result.first_token_seconds for text in found),
            outside_runtime_share=1 - sum(text.runtime_seconds for text in found) / decode_seconds if decode_seconds else None,
            speedup_vs_plain=_ratio(_median(speeds[i]), _median(speeds[own])),
            speedup_vs_plain_per_prompt=_median([_ratio(a, b) for a, b in zip(speeds[i], speeds[own], strict=True)]),
            speedup_vs_fastest_plain=_ratio(_median(speeds[i]), _median(speeds[fastest])),
            speedup_vs_fastest_plain_per_prompt=_median([_ratio(a, b) for a, b in zip(speeds[i], speeds[fastest], strict=True)]),
            same_as_plain=statistics.fmean(same),
            quality=rate([text.result.text for text in found], task.references),
            each_tokens_per_second=speeds[i],
        )


def _call_cost(
    opened: Sequence[_Opened], ids: dict[str, list[list[int]]], options: BenchOptions, step: Callable[[str], None]
) -> Iterator[CallCost]:
    """Times of calls by rows: each bundle's measured :data:`CALL_COST_TURNS` times, in turn with the others'."""
    rounds = math.ceil(options.rounds / CALL_COST_TURNS)
    for context in options.contexts:
        found: dict[str, list[list[MeasuredCall]]] = {bundle.name: [] for bundle in opened}
        for turn in range(CALL_COST_TURNS):
            for bundle in opened:
                step(f"timing calls of {bundle.name}: {context} tokens of context, turn {turn + 1} of {CALL_COST_TURNS}")
                time.sleep(SETTLE_SECONDS)
                sample = ids[bundle.name][0]
                found[bundle.name].append(measure_calls(bundle.lm.session, sample, options.threads, context, rounds))
                for clock in bundle.clocks:
                    clock.calls.clear()
        for bundle in opened:
            for same in zip(*found[bundle.name], strict=True):
                ms = statistics.median(call.ms for call in same)
                yield CallCost(bundle.name, bundle.facts.scheme, same[0].rows, same[0].stream_rows, context, ms)


def _median(values: Sequence[float | None]) -> float | None:
    """The median of those that are there."""
    there = [value for value in values if value is not None]
    return statistics.median(there) if there else None


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def rate(texts: Sequence[str], references: Sequence[str | None]) -> Quality | None:
    """How texts compare with their references, those without one left out; None when none has one."""
    pairs = [(text, reference) for text, reference in zip(texts, references, strict=True) if reference is not None]
    if not pairs:
        return None
    return Quality(
        references=len(pairs),
        exact_match=statistics.fmean(_fold(text) == _fold(reference) for text, reference in pairs),
        rouge_l=statistics.fmean(rouge_l(text, reference) for text, reference in pairs),
    )


def _fold(text: str) -> str:
    return " ".join(text.split()).casefold()


def rouge_l(text: str, reference: str) -> float:
    """ROUGE-L with one reference (Lin, "ROUGE: A Package for Automatic Evaluation of Summaries", 2004, section 3.1), F1.

    With the longest common subsequence of words, precision is its length over the text's, recall over the reference's. Words are
    runs of letters and digits in lower case, without stemming; two texts without any word are equal.
    """
    words, expected = (re.findall(r"\w+", part.casefold()) for part in (text, reference))
    if not words or not expected:
        return float(words == expected)
    lengths = [0] * (len(expected) + 1)  # of the common subsequence with each beginning of the reference
    for word in words:
        diagonal = 0
        for j, other in enumerate(expected, 1):
            above = lengths[j]
            lengths[j] = diagonal + 1 if word == other else max(above, lengths[j - 1])
            diagonal = above
    return 2 * lengths[-1] / (len(words) + len(expected))


def _resident_bytes() -> int | None:
    """Memory that this process holds now; None where the system has no /proc."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    found = re.search(r"^VmRSS:\s+(\d+) kB", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else None
