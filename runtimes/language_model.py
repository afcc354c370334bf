"""A bundle ready to talk: text in, text out, with what it took. Joins the bundle, its session, its tokenizer and the loop."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from specstream.models.errors import UserError
from specstream.runtimes.adaptive import AdaptiveBudget, prior_costs
from specstream.runtimes.bundle import Bundle
from specstream.runtimes.coreml_session import ComputeUnits, CoreMLSession
from specstream.runtimes.drafters import Drafter, NoDrafter, StreamDrafter
from specstream.runtimes.joined import PRIOR_WEIGHTS, JoinedDrafter
from specstream.runtimes.lookup import SuffixIndex, fold_vocabulary
from specstream.runtimes.manifest import Manifest
from specstream.runtimes.ngrams import NGRAM_FILE, NgramTable
from specstream.runtimes.ort_session import OrtSession, usable_cores
from specstream.runtimes.profile import DeviceProfile, load_profile
from specstream.runtimes.sampling import Sampling
from specstream.runtimes.session import NEAR_TIE, Session
from specstream.runtimes.speculate import FinishReason, speculate
from specstream.runtimes.text import Message, TextCodec
from specstream.runtimes.tree import StreamPolicy, every_row, likeliest_last, only_root

DEFAULT_BUDGET = 16  # rows of a call at most where nobody says otherwise; the adaptive budget takes as many as pay
DEFAULT_STREAM_ROWS = 1  # beside rows: the fastest of those tried with fp32 weights on two cores

Prompt = str | Sequence[Message] | Sequence[int]
DRAFTS = ("auto", "joined", "streams", "lookup", "none")
Draft = str | Drafter  # one of DRAFTS
Budget = int | Literal["adaptive"]
StreamRows = int | str  # a number of rows, or a name: all, root


@dataclass(frozen=True)
class GenerationResult:
    """One generated text and what it took. Keys of ``generate --json`` (design: "Reports").

    Attributes:
        text: special tokens and the stop token left out.
        token_ids: all emitted tokens, the stop token included.
        finish_reason: ``stop`` or ``length``.
        tokens: how many were emitted.
        calls: verifying calls; the prefill is not one.
        tokens_per_call: tokens after the prefill's first one, over calls; None without calls.
        tokens_per_second: the same tokens over the time after the first one; None without calls.
        first_token_seconds: from the request to the first token.
        drafted: tokens proposed and verified.
        accepted: of those, how many were emitted.
        dropped: rows that a drafter proposed and that could not be verified (0 unless a drafter or a graph is at fault).
        sampling: how tokens were chosen; None: greedily.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    tokens: int
    calls: int
    tokens_per_call: float | None
    tokens_per_second: float | None
    first_token_seconds: float
    drafted: int
    accepted: int
    dropped: int
    sampling: Sampling | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"token_ids": list(self.token_ids)}


class LanguageModel:
    """Generates text with a session. Made by :func:`load`; one text at a time, not for use from several threads at once.

    Args:
        profile: what ``specstream tune`` found out about this device; usual values without it.
        ngrams: the task's table, another source of drafts.

    Attributes:
        manifest: of the bundle.
        last: the result of the last text that was streamed to its end.
    """

    def __init__(
        self,
        manifest: Manifest,
        session: Session,
        codec: TextCodec,
        profile: DeviceProfile | None = None,
        ngrams: NgramTable | None = None,
    ) -> None:
        self.manifest = manifest
        self.session = session
        self.codec = codec
        self.profile = profile
        self.ngrams = ngrams
        self.last: GenerationResult | None = None
        self._drafters: dict[str, Drafter] = {}
        self._controllers: dict[bool, AdaptiveBudget] = {}

    @property
    def threads(self) -> int | None:
        """Threads of the session's operators, where it has a number of them."""
        return getattr(self.session, "threads", None)

    def generate(
        self,
        prompt: Prompt,
        max_new_tokens: int = 256,
        draft: Draft = "auto",
        *,
        raw: bool = False,
        budget: Budget = "adaptive",
        stream_rows: StreamRows | None = None,
        sampling: Sampling | None = None,
    ) -> GenerationResult:
        """The whole text at once; arguments as in :meth:`stream`."""
        for _ in self._pieces(False, prompt, max_new_tokens, draft, raw, budget, stream_rows, sampling):
            pass
        assert self.last is not None
        return self.last

    def stream(
        self,
        prompt: Prompt,
        max_new_tokens: int = 256,
        draft: Draft = "auto",
        *,
        raw: bool = False,
        budget: Budget = "adaptive",
        stream_rows: StreamRows | None = None,
        sampling: Sampling | None = None,
    ) -> Iterator[str]:
        """Text as it comes, in pieces of whole characters. Afterwards :attr:`last` has the result.

        Args:
            prompt: a user's text, messages ``{"role", "content"}``, or token ids.
            max_new_tokens: tokens to emit at most.
            draft: ``joined`` (streams, prompt lookup and the task's n-grams, as far as the bundle has them), ``streams``, ``lookup``,
                ``none`` (plain decoding), ``auto`` (what the device profile says, else ``joined``), or a drafter. The text is the
                same with any.
            raw: take a text as it is, without the chat template.
            budget: rows of a verifying call at most, stream rows not counted; ``adaptive`` follows what drafts have given so far,
                over all texts of this object, down to plain decoding.
            stream_rows: how many of them carry streams: ``all``, ``root``, or the n likeliest to be the last accepted. Means nothing
                for delayed streams, which run beside the last accepted row only.
            sampling: temperature, filters, penalties and seed; greedy when left out. The same settings give the same text.

        Raises:
            UserError: a prompt that is empty or too long, or an argument that makes no sense.
        """
        return self._pieces(True, prompt, max_new_tokens, draft, raw, budget, stream_rows, sampling)

    def _pieces(
        self,
        wanted: bool,
        prompt: Prompt,
        max_new_tokens: int,
        draft: Draft,
        raw: bool,
        budget: Budget,
        stream_rows: StreamRows | None,
        sampling: Sampling | None,
    ) -> Iterator[str]:
        """See :meth:`stream`; there are no pieces where they are not ``wanted``, and the text is decoded once, as a whole."""
        drafter = self.drafter(draft)
        if stream_rows is None:
            stream_rows = max(self.profile.stream_rows, 1) if self.profile is not None else DEFAULT_STREAM_ROWS
        policy = stream_policy(stream_rows)
        if sampling is not None and sampling.is_greedy:
            sampling = None
        if isinstance(self.session, OrtSession):
            # With a fixed number of rows, a call for which nothing was drafted rounds as the others do. Plain decoding is left at its
            # fastest, and so is the adaptive budget where it has come down to it.
            fixed = budget != "adaptive" and not isinstance(drafter, NoDrafter)
            self.session.pad_single = self.manifest.rounds_activations and fixed
        rows = self._adaptive(drafter) if budget == "adaptive" else budget
        start = time.perf_counter()
        prompt_ids = self.prompt_ids(prompt, raw)
        self.last = None
        self.session.rewind(0)
        blocks = speculate(
            self.session,
            prompt_ids,
            drafter,
            policy=policy,
            budget=rows,
            max_new_tokens=max_new_tokens,
            stop_ids=self.codec.stop_ids,
            sampling=sampling,
        )

        def pieces() -> Iterator[str]:
            token_ids: list[int] = []
            calls = drafted = accepted = dropped = 0
            first = paused = 0.0
            reason: FinishReason | None = None
            stream = self.codec.stream() if wanted else None
            text = None
            for block in blocks:
                if not token_ids:
                    first = time.perf_counter() - start
                token_ids += block.tokens
                calls += block.rows > 0
                drafted, accepted, dropped = drafted + block.drafted, accepted + block.accepted, dropped + block.dropped
                reason = block.finish_reason
                if stream is not None and (piece := stream.push(block.tokens)):
                    handed_over = time.perf_counter()
                    yield piece
                    paused += time.perf_counter() - handed_over  # what the caller does with a piece is not our time
            if stream is None:
                text = self.codec.decode(token_ids)
            seconds = time.perf_counter() - start - first - paused
            if stream is not None and (piece := stream.finish()):
                yield piece
            assert reason is not None
            decoded = len(token_ids) - 1
            self.last = GenerationResult(
                text=self.codec.decode(token_ids) if text is None else text,
                token_ids=tuple(token_ids),
                finish_reason=reason,
                tokens=len(token_ids),
                calls=calls,
                tokens_per_call=decoded / calls if calls else None,
                tokens_per_second=decoded / seconds if calls else None,
                first_token_seconds=first,
                drafted=drafted,
                accepted=accepted,
                dropped=dropped,
                sampling=sampling,
            )

        return pieces()

    def prompt_ids(self, prompt: Prompt, raw: bool = False) -> list[int]:
        """Token ids of a prompt in any of its three forms.

        Raises:
            UserError: as :meth:`TextCodec.encode`.
        """
        if isinstance(prompt, str):
            return self.codec.encode(prompt, raw)
        ids = [item for item in prompt if isinstance(item, int)]
        if len(ids) == len(prompt):
            return ids
        messages = [item for item in prompt if not isinstance(item, int)]
        if len(messages) != len(prompt):
            raise UserError("the prompt mixes token ids and messages; give one or the other")
        return self.codec.encode(messages)

    def drafter(self, draft: Draft) -> Drafter:
        """The drafter that a name stands for.

        Raises:
            UserError: an unknown name, or ``streams`` of a bundle without them.
        """
        if not isinstance(draft, str):
            return draft
        if draft not in DRAFTS:
            raise UserError(f"draft: {draft!r} is unknown; one of {', '.join(DRAFTS)} expected")
        streams = self.manifest.streams
        if draft == "streams" and streams is None:
            raise UserError("draft: this bundle has no streams; export it with --adapter, or use auto, lookup or none")
        if draft == "auto":
            draft = self.profile.draft if self.profile is not None else "joined"
        if draft not in self._drafters:
            self._drafters[draft] = self._make_drafter(draft)
        return self._drafters[draft]

    def _make_drafter(self, draft: str) -> Drafter:
        streams = self.manifest.streams
        temperatures = streams.calibration if streams is not None else ()
        if draft == "none":
            return NoDrafter()
        if draft == "streams":
            return StreamDrafter(temperatures)
        lookup = SuffixIndex(fold_vocabulary(self.codec.tokenizer, self.manifest.model.vocab_size))
        weights = self.profile.weights if self.profile is not None and self.profile.weights is not None else PRIOR_WEIGHTS
        joined = draft == "joined"
        return JoinedDrafter(joined and streams is not None, lookup, self.ngrams if joined else None, weights, temperatures)

    def _adaptive(self, drafter: Drafter) -> AdaptiveBudget:
        """The controller of this drafter's kind: what it has learned of earlier texts stays."""
        streams = drafter.uses_streams and self.session.num_streams > 0
        if streams not in self._controllers:
            manifest = self.manifest
            usual = prior_costs(manifest.quantization.scheme, manifest.contract.cache_dtype)
            costs = self.profile.costs if self.profile is not None else usual
            # Kernels that round activations take a second row for little, and it shows whether drafts that cost no pass are any good.
            at_least = 2 if isinstance(self.session, OrtSession) and manifest.rounds_activations else 1
            self._controllers[streams] = AdaptiveBudget(costs, DEFAULT_BUDGET, streams, at_least)
        controller = self._controllers[streams]
        controller.new_text()
        return controller


def stream_policy(stream_rows: StreamRows) -> StreamPolicy:
    """The policy that ``stream_rows`` stands for: ``all``, ``root`` or a number of rows.

    Raises:
        UserError: anything else.
    """
    if stream_rows == "all":
        return every_row
    if stream_rows == "root":
        return only_root
    if isinstance(stream_rows, str) or stream_rows < 1:
        raise UserError(f"stream_rows: {stream_rows!r} given; 'all', 'root' or a number from 1 expected")
    return likeliest_last(stream_rows)


def load(
    path: str | os.PathLike[str],
    threads: int | None = None,
    capacity: int | None = None,
    check: bool = True,
    profile: bool = True,
    compute_units: ComputeUnits | None = None,
) -> LanguageModel:
    """Open a bundle.

    Args:
        path: the bundle's folder.
        threads: for the graph's operators; left out, what the device profile says, else all usable cores. ONNX bundles only.
        capacity: rows of cache to allocate at once and never exceed; grows as needed when left out. In a Core ML bundle the cache has
            the size that it was exported with, and this is a lower limit.
        check: compare the hash of every file.
        profile: use what ``specstream tune`` found out about this bundle on this device, if it did.
        compute_units: where Core ML may run: ``all`` (when left out), ``cpu``, ``cpu-gpu`` or ``cpu-ne``; Core ML bundles only.

    Raises:
        UserError: no bundle, a damaged one or a damaged profile, or arguments that make no sense.
    """
    bundle = Bundle.load(path, check=check)
    codec = TextCodec.from_bundle(bundle)
    found = load_profile(bundle.manifest, usable_cores()) if profile and bundle.manifest.contract.coreml is None else None
    if threads is None and found is not None:
        threads = found.threads
    ngrams = NgramTable.load(bundle.path(NGRAM_FILE), bundle.manifest.model.vocab_size) if bundle.has(NGRAM_FILE) else None
    return LanguageModel(bundle.manifest, open_session(bundle, threads, capacity, compute_units), codec, found, ngrams)


def open_session(
    bundle: Bundle, threads: int | None = None, capacity: int | None = None, compute_units: ComputeUnits | None = None
) -> OrtSession | CoreMLSession:
    """The session of a bundle's kind; arguments as for :func:`load`.

    Raises:
        UserError: it cannot be loaded, or arguments that make no sense.
    """
    contract = bundle.manifest.contract
    if contract.coreml is None:
        if compute_units is not None:
            raise UserError(f"compute units: {bundle.folder} is an ONNX bundle, which runs on the CPU; leave --compute-units out")
        return OrtSession(bundle, threads=threads, capacity=capacity)
    if threads is not None:
        raise UserError(f"threads: {bundle.folder} is a Core ML bundle, whose threads are the system's; leave --threads out")
    parity = bundle.manifest.parity
    near_tie = NEAR_TIE if parity is None or parity.near_tie is None else parity.near_tie
    return CoreMLSession(bundle.path(bundle.manifest.graph), contract.coreml, capacity, compute_units or "all", near_tie)
