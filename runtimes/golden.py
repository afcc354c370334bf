"""Complete traces of the speculative loop, so that a loop in another language, or another session, can be checked against ours.

A trace has what went into every call and what came out: rows, drafts, the model's own tokens, what was accepted and committed. Written
by recording a :class:`specstream.runtimes.session.Session`, replayed through another one. Token ids and numbers; of text only what a
codec makes of it, and nothing of files.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from specstream.models.errors import UserError
from specstream.runtimes.drafters import DraftContext, Drafter, Streams
from specstream.runtimes.joined import JoinedDrafter, JoinWeights
from specstream.runtimes.manifest import decode
from specstream.runtimes.ort_session import OrtSession
from specstream.runtimes.sampling import NO_HISTORY, History, Sampling, scores
from specstream.runtimes.session import DraftOutput, Rows, Session, StepOutput, prompt_rows, tree_rows
from specstream.runtimes.speculate import Block, FinishReason, Sampler, accept, sanitise, speculate
from specstream.runtimes.text import TextCodec
from specstream.runtimes.tree import StreamPolicy, TokenTree, only_root, root_only

GOLDEN_FILE: Final = "golden.json"
GOLDEN_FORMAT: Final = 1
LARGEST_MARGIN: Final = 1e6  # stands for "nothing else was possible"; JSON has no infinity


@dataclass(frozen=True)
class StreamsOut:
    """What the streams beside one row said: drafts of the next tree begin with them.

    Attributes:
        position: of the row that carried them. Stream j (from 1) is about position + 1 + j.
        row: of the call; None for a pass of their own (delayed placement), which is about the last committed row.
        root: the token that the pass was given; None beside rows.
        ids: [γ][k], best first.
        logprobs: [γ][k].
        pairs: [γ][k][k]; None without a pair head.
    """

    position: int
    row: int | None
    root: int | None
    ids: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]
    pairs: tuple[tuple[tuple[float, ...], ...], ...] | None

    def streams(self) -> Streams:
        """As a drafter takes them."""
        pairs = None if self.pairs is None else np.array(self.pairs, dtype=np.float32)
        return Streams(np.array(self.ids, dtype=np.int64), np.array(self.logprobs, dtype=np.float32), self.position, pairs)


@dataclass(frozen=True)
class Gram:
    """What the n-gram table says after the root: the context's length in tokens, candidates and what is left."""

    order: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    rest: float


@dataclass(frozen=True)
class Continuation:
    """A token that followed earlier occurrences of the text's end: length of the longest match and share of the matches."""

    token: int
    length: int
    share: float


@dataclass(frozen=True)
class Sources:
    """What the sources beside the streams say at the root of a joined tree."""

    ngrams: Gram | None
    lookup: tuple[Continuation, ...]


@dataclass(frozen=True)
class Prefill:
    """The prompt's calls.

    Attributes:
        chunks: rows of each.
        next_ids: of the last row: the graph's argmax.
        margins: best minus second-best logit of it.
        choice_margins: the same of what was sampled from; None when greedy.
        emitted: the first token.
        length: rows committed afterwards.
        text: what can be shown.
        streams: that came out.
    """

    chunks: tuple[int, ...]
    next_ids: tuple[int, ...]
    margins: tuple[float, ...]
    choice_margins: tuple[float, ...] | None
    emitted: tuple[int, ...]
    length: int
    text: str
    streams: tuple[StreamsOut, ...]


@dataclass(frozen=True)
class Step:
    """One verifying call.

    Attributes:
        past: rows committed before it.
        budget: rows that its tree might have.
        max_depth: levels below the root that could still be accepted.
        tokens, parents, positions: of the tree's rows, the root first.
        logprob: of each row's path, by the drafter's account.
        sources: beside the streams; None for other drafters.
        stream_rows: rows that carried streams (fused placement).
        next_ids: the graph's argmax after each row.
        margins: best minus second-best logit of each row: below about 1e-3 another processor may say another token.
        accepted: rows that stay, those behind a stop token left out.
        choice_margins: of the scores that each accepted row's token was sampled by; None when greedy.
        emitted: tokens that came out: those after the accepted rows.
        length: rows committed afterwards.
        text: what the emitted tokens complete.
        streams: that came out; for the next tree those of the last accepted row that carried some.
    """

    past: int
    budget: int
    max_depth: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    positions: tuple[int, ...]
    logprob: tuple[float, ...]
    sources: Sources | None
    stream_rows: tuple[int, ...]
    next_ids: tuple[int, ...]
    margins: tuple[float, ...]
    accepted: tuple[int, ...]
    choice_margins: tuple[float, ...] | None
    emitted: tuple[int, ...]
    length: int
    text: str
    streams: tuple[StreamsOut, ...]

    def tree(self) -> TokenTree:
        return TokenTree(
            np.array(self.tokens, dtype=np.int64), np.array(self.parents, dtype=np.int32), np.array(self.logprob, dtype=np.float32)
        )


@dataclass(frozen=True)
class Trace:
    """One text.

    Attributes:
        name: of the trace.
        prompt: a user's text.
        rendered: the prompt in the chat template; None for models without one.
        prompt_ids: tokens of that.
        draft: where trees came from: ``none``, ``streams``, ``lookup`` or ``joined``.
        budget: rows of a call at most.
        max_new_tokens: tokens to emit at most.
        sampling: None: greedy.
        prefill: the prompt's calls.
        steps: the others.
        token_ids: all emitted tokens, the stop token included.
        text: special tokens and the stop token left out.
        rest: of the text, what only came when there were no more tokens (a broken character).
        finish_reason: ``stop`` or ``length``.
    """

    name: str
    prompt: str
    rendered: str | None
    prompt_ids: tuple[int, ...]
    draft: str
    budget: int
    max_new_tokens: int
    sampling: Sampling | None
    prefill: Prefill
    steps: tuple[Step, ...]
    token_ids: tuple[int, ...]
    text: str
    rest: str
    finish_reason: FinishReason


@dataclass(frozen=True)
class Golden:
    """All of ``golden.json``: what a loop must know, and traces. Unknown keys are refused.

    Attributes:
        contract: version of the graph contract.
        placement: of the streams: ``fused``, ``delayed``; None without.
        num_streams, stream_layers, top_k: γ, N_s and k; 0 without streams.
        temperatures: of the streams; empty: as they come.
        weights: that join draft sources.
        num_layers, num_kv_heads, head_dim, hidden_size, vocab_size: of the model.
        capacity: rows of cache.
        prompt_chunk: rows of a prompt's call at most.
        max_tree_rows: rows of a tree at most.
        max_stream_rows: rows of a call that may carry streams.
        near_tie: logits closer than this may change places by rounding in the same backend.
        pad_single: a call of one row, without streams beside it, takes a copy of that row along (neither sees the other, and the copy's
            output is not used), where the capacity has room: with 8-bit activations kernels for one row round differently.
        stop_ids: tokens that end a text.
        bos_id: None for tokenizers without one.
        scheme: of the weights.
        recorded_on: versions and processor; numbers are bit for bit those of the same ones.
    """

    contract: int
    placement: str | None
    num_streams: int
    stream_layers: int
    top_k: int
    temperatures: tuple[float, ...]
    weights: JoinWeights | None
    num_layers: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    capacity: int
    prompt_chunk: int
    max_tree_rows: int
    max_stream_rows: int
    near_tie: float
    pad_single: bool
    stop_ids: tuple[int, ...]
    bos_id: int | None
    scheme: str
    recorded_on: dict[str, str]
    traces: tuple[Trace, ...]
    format: int = GOLDEN_FORMAT

    def to_json(self) -> str:
        """A line for each step. Numbers are written as short as they can be read again as the same 32-bit floats."""
        data = dataclasses.asdict(self)
        traces = data.pop("traces")
        lines = [f"{json.dumps(name)}: {_compact(value)}," for name, value in data.items()]
        written = []
        for trace in traces:
            steps = trace.pop("steps")
            head = ",\n".join(f"{json.dumps(name)}: {_compact(value)}" for name, value in trace.items())
            body = ",\n".join(_compact(step) for step in steps)
            written.append(f"{{\n{head},\n" + (f'"steps": [\n{body}\n]\n}}' if steps else '"steps": []\n}'))
        return "{\n" + "\n".join(lines) + '\n"traces": [\n' + ",\n".join(written) + "\n]\n}\n"

    @classmethod
    def from_json(cls, text: str, source: str = GOLDEN_FILE) -> Golden:
        """Read what :meth:`to_json` wrote.

        Raises:
            UserError: not JSON, another format, or other keys and types (all problems at once).
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(f"{source}: not JSON ({error}); make the package again") from None
        if not isinstance(data, dict) or data.get("format") != GOLDEN_FORMAT:
            found = data.get("format") if isinstance(data, dict) else None
            raise UserError(f"{source}: not traces of format {GOLDEN_FORMAT} (found {found!r}); make the package again")
        problems: list[str] = []
        golden = decode(cls, data, "", problems)
        if problems:
            raise UserError(f"{source}: {'; '.join(problems[:5])}; make the package again")
        assert isinstance(golden, cls)
        return golden


def record(
    session: Session,
    codec: TextCodec,
    drafter: Drafter,
    *,
    name: str,
    prompt: str,
    draft: str,
    budget: int,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    policy: StreamPolicy = only_root,
) -> Trace:
    """Generate after a prompt and keep everything.

    Args:
        session: rewound first.
        drafter: what ``draft`` names.
        policy: which rows of a tree carry streams (fused placement).

    Raises:
        UserError: a prompt that the session cannot hold.
    """
    prompt_ids = codec.encode(prompt)
    recorder, proposals = _Recorder(session), _Proposals(drafter, session.vocab_size)
    session.rewind(0)
    text = codec.stream()
    emitted: list[int] = []
    prefill: Prefill | None = None
    steps: list[Step] = []
    reason: FinishReason | None = None
    blocks: Iterator[Block] = speculate(
        recorder,
        prompt_ids,
        proposals,
        policy=policy,
        budget=budget,
        max_new_tokens=max_new_tokens,
        stop_ids=codec.stop_ids,
        sampling=sampling,
    )
    for block in blocks:
        reason = block.finish_reason
        piece = text.push(block.tokens)
        calls, recorder.calls = recorder.calls, []
        call = calls[-1]
        before = [*prompt_ids, *emitted]
        if prefill is None:
            prefill = Prefill(
                chunks=tuple(len(one.rows.input_ids) for one in calls),
                next_ids=_ints(call.output.next_ids),
                margins=call.margins(),
                choice_margins=_choice_margins(call, root_only(0), (0,), before, len(prompt_ids), sampling, first=True),
                emitted=block.tokens,
                length=session.length,
                text=piece,
                streams=call.streams(),
            )
        else:
            proposal = proposals.latest
            # Near the capacity, or at the end, the loop asks for no draft.
            if proposal is None or len(proposal.tree) != len(call.rows.input_ids):
                proposal = _Proposal(1, len(prompt_ids) + max_new_tokens - len(before) - 1, root_only(before[-1]), None)
            steps.append(
                Step(
                    past=call.past,
                    budget=proposal.budget,
                    max_depth=proposal.max_depth,
                    tokens=_ints(proposal.tree.tokens),
                    parents=_ints(proposal.tree.parents),
                    positions=_ints(call.rows.position_ids),
                    logprob=_floats(proposal.tree.logprob),
                    sources=proposal.sources,
                    stream_rows=_ints(call.rows.stream_rows),
                    next_ids=_ints(call.output.next_ids),
                    margins=call.margins(),
                    accepted=call.committed,
                    choice_margins=_choice_margins(call, proposal.tree, call.committed, before, len(prompt_ids), sampling),
                    emitted=block.tokens,
                    length=session.length,
                    text=piece,
                    streams=call.streams(),
                )
            )
        proposals.latest = None
        emitted += block.tokens
    assert prefill is not None
    assert reason is not None
    return Trace(
        name=name,
        prompt=prompt,
        rendered=codec.render([{"role": "user", "content": prompt}]) if codec.has_template else None,
        prompt_ids=tuple(prompt_ids),
        draft=draft,
        budget=budget,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        prefill=prefill,
        steps=tuple(steps),
        token_ids=tuple(emitted),
        text=codec.decode(emitted),
        rest=text.finish(),
        finish_reason=reason,
    )


@dataclass(frozen=True)
class Difference:
    """Where a replay said something else.

    Attributes:
        step: -1 for the prefill.
        what: which field of the step.
        found, recorded: in words.
        margin: of the recorded choice, where it was one: small ones are near-ties of another processor's arithmetic.
    """

    trace: str
    step: int
    what: str
    found: str
    recorded: str
    margin: float | None = None

    def __str__(self) -> str:
        where = "prefill" if self.step < 0 else f"step {self.step}"
        near = "" if self.margin is None else f" (margin {self.margin:g})"
        return f"{self.trace}, {where}: {self.what} is {self.found}, recorded {self.recorded}{near}"


def replay(session: Session, golden: Golden, trace: Trace, tolerance: float = 1e-4) -> list[Difference]:
    """Drive a session through the recorded trees and compare what it says.

    The recorded rows are committed whatever the session says, so one near-tie does not spoil the comparison of what comes after it.

    Args:
        session: rewound first.
        tolerance: allowed between log-probabilities.
    """
    compare = _Comparison(trace.name, tolerance)
    if isinstance(session, OrtSession):
        session.pad_single = golden.pad_single
    session.rewind(0)
    streamed = trace.draft in ("streams", "joined") and golden.num_streams > 0
    sampler_text = list(trace.prompt_ids)
    sampler = None if trace.sampling is None else Sampler(trace.sampling, sampler_text, len(trace.prompt_ids))
    output = None
    past = 0
    for rows in trace.prefill.chunks:
        last = past + rows == len(trace.prompt_ids)
        carries = last and streamed and not session.delayed and bool(trace.prefill.streams)
        chunk = prompt_rows(trace.prompt_ids[past : past + rows], past, streams=carries)
        output = session.run(chunk, logits=last and sampler is not None)
        session.commit(range(rows))
        past += rows
    assert output is not None
    compare.at = -1
    compare.ids("next_ids", _ints(output.next_ids), trace.prefill.next_ids, trace.prefill.margins)
    chosen = int(output.next_ids[0]) if sampler is None else sampler.after(output, 0)
    choice = trace.prefill.margins if trace.prefill.choice_margins is None else trace.prefill.choice_margins
    compare.ids("emitted", (chosen,), trace.prefill.emitted, choice)
    compare.streams(session, output, trace.prefill.streams)
    sampler_text += trace.prefill.emitted
    for number, step in enumerate(trace.steps):
        compare.at = number
        compare.ids("past", (session.length,), (step.past,))
        tree = step.tree()
        rows_in = tree_rows(tree, step.past, np.array(step.stream_rows, dtype=np.int64))
        compare.ids("positions", _ints(rows_in.position_ids), step.positions)
        output = session.run(rows_in, logits=sampler is not None)
        found = _ints(output.next_ids)
        compare.ids("next_ids", found, step.next_ids, step.margins)
        paths = [tree.tokens[tree.path(row)[1:]].tolist() for row in step.accepted]
        emitted = tuple(
            found[row] if sampler is None else sampler.after(output, row, path) for row, path in zip(step.accepted, paths, strict=True)
        )
        choice = step.choice_margins if step.choice_margins is not None else tuple(step.margins[row] for row in step.accepted)
        compare.ids("emitted", emitted, step.emitted, choice)
        # From what was recorded, the rule must give what was recorded: this is about the loop, not about the session.
        known = dict(zip(step.accepted, step.emitted, strict=True))
        accepted = tuple(accept(tree, [known.get(row, -1) for row in range(len(tree))]))
        compare.ids("accepted", accepted[: len(step.accepted)], step.accepted)
        session.commit(step.accepted)
        compare.ids("length", (session.length,), (step.length,))
        sampler_text += step.emitted
        compare.streams(session, output, step.streams)
    return compare.found


@dataclass
class _Comparison:
    trace: str
    tolerance: float
    at: int = -1
    found: list[Difference] = dataclasses.field(default_factory=list)

    def ids(self, what: str, found: Sequence[int], recorded: Sequence[int], margins: Sequence[float] | None = None) -> None:
        if tuple(found) != tuple(recorded):
            where = next((i for i, (a, b) in enumerate(zip(found, recorded, strict=False)) if a != b), None)
            margin = margins[where] if margins is not None and where is not None else None
            self.found.append(Difference(self.trace, self.at, what, str(list(found)), str(list(recorded)), margin))

    def streams(self, session: Session, output: StepOutput, recorded: Sequence[StreamsOut]) -> None:
        for number, expected in enumerate(recorded):
            if expected.row is None:
                assert expected.root is not None
                drafted = session.draft(expected.root)
                ids, logprobs, pairs = drafted.stream_ids, drafted.stream_logprobs, drafted.stream_pairs
            else:
                assert output.stream_ids is not None
                assert output.stream_logprobs is not None
                ids, logprobs, pairs = output.stream_ids[number], output.stream_logprobs[number], None
            self.ids("stream ids", _ints(ids.reshape(-1)), [token for level in expected.ids for token in level])
            self._close("stream log-probabilities", logprobs, expected.logprobs)
            if expected.pairs is not None and pairs is not None:
                self._close("stream pairs", pairs, expected.pairs)

    def _close(self, what: str, found: npt.NDArray[Any], recorded: Any) -> None:
        largest = float(np.abs(found - np.array(recorded, dtype=np.float32)).max(initial=0.0))
        if not largest <= self.tolerance:
            self.found.append(Difference(self.trace, self.at, what, f"{largest:g} away", f"at most {self.tolerance:g} away"))


@dataclass(eq=False)
class _Call:
    """One call with copies of what came out."""

    past: int
    rows: Rows
    output: StepOutput
    committed: tuple[int, ...] = ()
    draft: tuple[int, int, DraftOutput] | None = None  # length, root, what came out

    def margins(self) -> tuple[float, ...]:
        assert self.output.logits is not None
        return tuple(_margin(row) for row in self.output.logits)

    def streams(self) -> tuple[StreamsOut, ...]:
        if self.draft is not None:
            length, root, out = self.draft
            pairs = None if out.stream_pairs is None else tuple(_matrix(level) for level in out.stream_pairs)
            return (StreamsOut(length - 1, None, root, _id_matrix(out.stream_ids), _matrix(out.stream_logprobs), pairs),)
        if self.output.stream_ids is None or self.output.stream_logprobs is None:
            return ()
        return tuple(
            StreamsOut(int(self.rows.position_ids[row]), row, None, _id_matrix(ids), _matrix(logprobs), None)
            for row, ids, logprobs in zip(self.rows.stream_rows.tolist(), self.output.stream_ids, self.output.stream_logprobs, strict=True)
        )


class _Recorder:
    """A session that keeps what goes through it; always fetches logits, which change nothing else."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.calls: list[_Call] = []
        self.capacity, self.vocab_size = session.capacity, session.vocab_size
        self.num_streams, self.top_k, self.delayed = session.num_streams, session.top_k, session.delayed
        self.prompt_chunk, self.near_tie = session.prompt_chunk, session.near_tie
        self.max_tree_rows, self.max_stream_rows = session.max_tree_rows, session.max_stream_rows

    @property
    def length(self) -> int:
        return self._session.length

    def run(self, rows: Rows, logits: bool = False) -> StepOutput:
        out = self._session.run(rows, logits=True)
        copied = StepOutput(
            out.next_ids.copy(),
            None if out.logits is None else out.logits.copy(),
            None if out.stream_ids is None else out.stream_ids.copy(),
            None if out.stream_logprobs is None else out.stream_logprobs.copy(),
        )
        self.calls.append(_Call(self._session.length, rows, copied))
        return copied

    def commit(self, rows: Sequence[int]) -> None:
        self._session.commit(rows)
        self.calls[-1].committed = tuple(int(row) for row in rows)

    def rewind(self, length: int) -> None:
        self._session.rewind(length)

    def draft(self, token: int) -> DraftOutput:
        out = self._session.draft(token)
        pairs = None if out.stream_pairs is None else out.stream_pairs.copy()
        copied = DraftOutput(out.stream_ids.copy(), out.stream_logprobs.copy(), pairs)
        self.calls[-1].draft = (self._session.length, token, copied)
        return copied


@dataclass(frozen=True)
class _Proposal:
    budget: int
    max_depth: int
    tree: TokenTree
    sources: Sources | None


class _Proposals:
    """A drafter that keeps its latest tree and what it was made from."""

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        self._drafter = drafter
        self._vocab_size = vocab_size
        self.latest: _Proposal | None = None

    @property
    def uses_streams(self) -> bool:
        return self._drafter.uses_streams

    def propose(self, context: DraftContext) -> TokenTree:
        tree, _ = sanitise(self._drafter.propose(context), context, self._vocab_size)
        sources = _sources(self._drafter, context) if isinstance(self._drafter, JoinedDrafter) else None
        self.latest = _Proposal(context.budget, context.max_depth, tree, sources)
        return tree


def _sources(drafter: JoinedDrafter, context: DraftContext) -> Sources:
    """What lookup and n-grams say at the root; the drafter has taken in the text by now."""
    following = drafter.ngrams.following(tuple(context.tokens[-drafter.ngrams.order :])) if drafter.ngrams is not None else None
    gram = None
    if following is not None:
        gram = Gram(following.order, following.tokens, _floats(following.logprobs), _float(following.rest))
    found = drafter.lookup.continuations(drafter.lookup.root_matches()) if drafter.lookup is not None else ()
    return Sources(gram, tuple(Continuation(one.token, one.length, _float(one.share)) for one in found))


def _choice_margins(
    call: _Call,
    tree: TokenTree,
    rows: Sequence[int],
    before: Sequence[int],
    prompt_length: int,
    sampling: Sampling | None,
    first: bool = False,
) -> tuple[float, ...] | None:
    """Best minus second-best score of what each of these rows' tokens was sampled by."""
    if sampling is None:
        return None
    assert call.output.logits is not None
    margins = []
    for row in rows:
        path = [] if first else tree.tokens[tree.path(row)[1:]].tolist()
        history = NO_HISTORY
        if sampling.penalises:
            history = History(before[:prompt_length], [*before[prompt_length:], *path])
        margins.append(_margin(scores(call.output.logits[row], len(before) + len(path), history, sampling)))
    return tuple(margins)


def _margin(values: npt.NDArray[Any]) -> float:
    second, first = np.partition(values, -2)[-2:]
    margin = float(first) - float(second)
    return _float(margin) if math.isfinite(margin) else LARGEST_MARGIN


def _float(value: float) -> float:
    """The shortest decimal number that reads as the same 32-bit float."""
    return float(str(np.float32(value)))


def _floats(values: Any) -> tuple[float, ...]:
    return tuple(float(text) for text in np.asarray(values, dtype=np.float32).astype(str))


def _matrix(values: npt.NDArray[Any]) -> tuple[tuple[float, ...], ...]:
    return tuple(_floats(row) for row in values)


def _id_matrix(values: npt.NDArray[Any]) -> tuple[tuple[int, ...], ...]:
    return tuple(_ints(row) for row in values)


def _ints(values: Any) -> tuple[int, ...]:
    return tuple(np.asarray(values).tolist())


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
