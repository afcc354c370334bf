"""The speculative loop: draft a tree, verify it in one call, keep the longest right path, repeat.

Token ids only: nothing of a backend, of tokenizers or of clocks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, SupportsInt

import numpy as np

from specstream.models.errors import UserError
from specstream.runtimes.adaptive import BudgetController, FixedBudget
from specstream.runtimes.drafters import DraftContext, Drafter, Streams
from specstream.runtimes.sampling import NO_HISTORY, History, Sampling, pick
from specstream.runtimes.session import NO_ROWS, Session, StepOutput, prefill, tree_rows
from specstream.runtimes.tree import StreamPolicy, TokenTree, every_row, likeliest_last, path_probabilities, root_only

FinishReason = Literal["stop", "length"]

_ROW_DTYPES = (np.dtype(np.int64), np.dtype(np.int32), np.dtype(np.float32))  # of a tree's tokens, parents and logprob


@dataclass(frozen=True)
class Block:
    """Tokens that one call added to the text, and what it took.

    Attributes:
        tokens: emitted, a stop token included.
        rows: main rows of the verifying call; 0 for the prefill, which verifies nothing.
        stream_rows: rows that carried streams; 1 when delayed streams ran after the call.
        accepted: drafted tokens that were emitted.
        dropped: rows of the drafter's tree that could not be used (see :func:`sanitise`).
        finish_reason: set on the last block: ``stop`` (a stop token) or ``length`` (as many as asked for, or the cache is full).
    """

    tokens: tuple[int, ...]
    rows: int
    stream_rows: int
    accepted: int
    dropped: int
    finish_reason: FinishReason | None

    @property
    def drafted(self) -> int:
        return max(self.rows - 1, 0)


class NextIds(Protocol):
    """Of each row of a tree, the token that plain decoding would put after it."""

    def __getitem__(self, row: int, /) -> SupportsInt: ...


def accept(tree: TokenTree, next_ids: NextIds) -> list[int]:
    """Rows of the longest path whose every token is what the model itself says after its parent; the root is always right.

    Verification as in Stern et al., arXiv 1811.03115, section 3; trees as in Speculative Streaming, arXiv 2402.11131, section 3.2:
    from the root, go to the child whose token equals the model's own after the path to the node while there is one. That is
    argmax p(. | path), or the token which the keyed noise makes of it. The model's own token after the last accepted row is the
    correction: the text of accepted tokens and correction is that of plain decoding.

    Args:
        next_ids: int [M], the model's own token after each row; asked for accepted rows only, so that others need not be sampled.

    Returns:
        Row numbers, ascending, starting with 0.
    """
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    accepted, following = [0], int(next_ids[0])
    for row in range(1, len(tokens)):  # children come after their parents, so one pass finds the whole path
        if parents[row] == accepted[-1] and tokens[row] == following:
            accepted.append(row)
            following = int(next_ids[row])
    return accepted


@dataclass(frozen=True)
class Sampler:
    """Samples from the outputs of calls. ``text`` is what is there so far, the prompt in front; it goes on growing.

    Attributes:
        prompt_length: tokens of the prompt.
    """

    sampling: Sampling
    text: Sequence[int]
    prompt_length: int

    def after(self, output: StepOutput, row: int, path: Sequence[int] = ()) -> int:
        """The token after a row of a call, which is ``path`` after the text: the row's own path below the root."""
        assert output.logits is not None
        history = NO_HISTORY
        if self.sampling.penalises:
            history = History(self.text[: self.prompt_length], [*self.text[self.prompt_length :], *path])
        return pick(output.logits[row], len(self.text) + len(path), history, self.sampling)


class SampledIds:
    """``next_ids`` of a tree, each sampled when it is asked for: as many as plain decoding samples, however many rows there are."""

    def __init__(self, sampler: Sampler, output: StepOutput, tree: TokenTree) -> None:
        self._sampler = sampler
        self._output = output
        self._tree = tree
        self._known: dict[int, int] = {}

    def __getitem__(self, row: int, /) -> int:
        if row not in self._known:
            path: list[int] = self._tree.tokens[self._tree.path(row)[1:]].tolist()
            self._known[row] = self._sampler.after(self._output, row, path)
        return self._known[row]


def speculate(
    session: Session,
    prompt_ids: Sequence[int],
    drafter: Drafter,
    *,
    policy: StreamPolicy = every_row,
    budget: int | BudgetController = 16,
    max_new_tokens: int = 256,
    stop_ids: Collection[int] = (),
    chunk: int | None = None,
    sampling: Sampling | None = None,
) -> Iterator[Block]:
    """Generate after a prompt. The text is that of plain decoding, whatever the drafter proposes.

    After the last block (and after each one) the cache holds what plain decoding would have cached: the prompt and all emitted
    tokens but the last, which is the root of the next tree.

    Args:
        session: its cache may hold a beginning of the prompt already.
        prompt_ids: the whole prompt.
        policy: which rows of a tree carry streams, when the drafter uses them.
        budget: main rows of a call at most, the root included; or what decides it before each call.
        max_new_tokens: tokens to emit at most.
        stop_ids: tokens that end the text, wherever in an accepted block they are.
        chunk: rows of the prompt in one call at most; what the session says when left out.
        sampling: how tokens are chosen; left out, greedily.

    Returns:
        An iterator of blocks: one after the prefill and one after each verifying call.

    Raises:
        UserError: empty prompt, longer than the session can hold, or limits below 1.
    """
    # Checked here, not at the first block: a generator's body does not run before that.
    if isinstance(budget, int):
        if budget < 1:
            raise UserError(f"budget: {budget} given, 1 or more expected")
        budget = FixedBudget(budget)
    _check_request(session, prompt_ids, max_new_tokens)
    if sampling is not None and sampling.is_greedy:
        sampling = None  # the graph's own argmax, without fetching logits
    return _blocks(session, prompt_ids, drafter, policy, budget, max_new_tokens, stop_ids, chunk, sampling)


def _blocks(
    session: Session,
    prompt_ids: Sequence[int],
    drafter: Drafter,
    policy: StreamPolicy,
    controller: BudgetController,
    max_new_tokens: int,
    stop_ids: Collection[int],
    chunk: int | None,
    sampling: Sampling | None,
) -> Iterator[Block]:
    draft_streams = drafter.uses_streams and session.num_streams > 0
    # Of the next call; asked early, since delayed streams run before it.
    budget, streaming = _plan(controller, draft_streams)
    draws = sampling is not None
    output = prefill(session, prompt_ids, streams=streaming and max_new_tokens > 1, chunk=chunk, logits=draws)
    tokens = list(prompt_ids)
    sampler = None if sampling is None else Sampler(sampling, tokens, len(tokens))
    tokens.append(int(output.next_ids[0]) if sampler is None else sampler.after(output, 0))
    end = len(prompt_ids) + max_new_tokens
    streams = None
    if output.stream_ids is not None and output.stream_logprobs is not None:
        streams = Streams(output.stream_ids[0].copy(), output.stream_logprobs[0].copy(), len(prompt_ids) - 1)
    reason = _finish_reason(tokens, end, stop_ids, session)
    if reason is None and streaming and session.delayed:
        streams = _delayed(session, tokens, end)
    yield Block((tokens[-1],), 0, int(streams is not None), 0, 0, reason)

    while reason is None:
        past, left, room = session.length, end - len(tokens), session.capacity - session.length
        context = DraftContext(tokens, streams, min(budget, room, session.max_tree_rows), left - 1, controller.least())
        if context.budget > 1:
            tree, dropped = sanitise(drafter.propose(context), context, session.vocab_size)
            tree = controller.trim(tree)
        else:
            tree, dropped = root_only(context.root), 0
        # The last call needs no streams; near the capacity only as many rows carry them as fit.
        stream_rows = NO_ROWS
        if streaming and left > 1 and not session.delayed:
            fits = (room - len(tree)) // session.num_streams
            stream_rows = (policy(tree) if len(tree) > 1 else every_row(tree))[:fits]
            if len(stream_rows) > session.max_stream_rows:
                stream_rows = likeliest_last(session.max_stream_rows)(tree)[:fits]
        output = session.run(tree_rows(tree, past, stream_rows), logits=draws)

        next_ids: NextIds = output.next_ids if sampler is None else SampledIds(sampler, output, tree)
        accepted = accept(tree, next_ids)
        emitted = [int(next_ids[row]) for row in accepted]
        stop = next((i for i, token in enumerate(emitted) if token in stop_ids), len(emitted) - 1)
        emitted = emitted[: stop + 1]
        # Of the rows, those stay whose following token is emitted: a stop token cuts the accepted rows behind it as well.
        kept = accepted[: len(emitted)]
        session.commit(kept)
        tokens += emitted
        controller.record(len(tree), len(emitted), sum(path_probabilities(tree)))
        budget, streaming = _plan(controller, draft_streams)
        if output.stream_ids is not None and output.stream_logprobs is not None:
            carrying = {row: i for i, row in enumerate(stream_rows.tolist())}
            deepest = next((level for level in reversed(range(len(kept))) if kept[level] in carrying), None)
            if deepest is not None:
                i = carrying[kept[deepest]]
                streams = Streams(output.stream_ids[i].copy(), output.stream_logprobs[i].copy(), past + deepest)
        reason = _finish_reason(tokens, end, stop_ids, session)
        carried = len(stream_rows)
        if draft_streams and session.delayed:
            streams = _delayed(session, tokens, end) if reason is None and streaming else None
            carried = int(streams is not None)
        # The correction after the last accepted row is the model's own; after a cut there is one drafted token fewer than rows.
        yield Block(tuple(emitted), len(tree), carried, len(emitted) - 1 + (len(accepted) > len(kept)), dropped, reason)


def _plan(controller: BudgetController, draft_streams: bool) -> tuple[int, bool]:
    """Rows of the next call at most, and whether it has streams."""
    budget = controller.budget()
    return budget, draft_streams and budget > 1 and controller.streams()


def _delayed(session: Session, tokens: Sequence[int], end: int) -> Streams | None:
    """Streams of the last committed row, for the tree below the last token; None where no draft can be used or the cache has no
    room for them."""
    if end - len(tokens) < 2 or session.length + session.num_streams > session.capacity:
        return None
    output = session.draft(tokens[-1])
    pairs = None if output.stream_pairs is None else output.stream_pairs.copy()
    return Streams(output.stream_ids.copy(), output.stream_logprobs.copy(), len(tokens) - 2, pairs)


def sanitise(tree: TokenTree, context: DraftContext, vocab_size: int) -> tuple[TokenTree, int]:
    """The part of a drafter's tree that can be verified, and how many rows had to be dropped.

    Dropped are tokens outside the vocabulary, repeated siblings, rows over the budget or deeper than the context allows, rows
    whose parent is dropped or does not come before them; everything when the arrays do not belong together or the root is not
    the last token.
    """
    proposed = len(tree)
    tokens, parents, logprob = np.asarray(tree.tokens), np.asarray(tree.parents), np.asarray(tree.logprob)
    whole = tokens.ndim == 1 and tokens.shape == parents.shape == logprob.shape and proposed > 0
    if not (
        whole and tokens.dtype.kind in "iu" and parents.dtype.kind in "iu" and logprob.dtype.kind in "iuf" and tokens[0] == context.root
    ):
        return root_only(context.root), proposed
    rows = tokens.tolist(), parents.tolist(), logprob.tolist()
    kept_tokens, kept_parents, kept_logprob, depths = [context.root], [-1], [0.0], [0]
    new_row = {0: 0}
    seen: set[tuple[int, int]] = set()
    budget, max_depth = context.budget, context.max_depth
    for row, (token, parent, path) in enumerate(zip(*rows, strict=True)):
        above = new_row.get(parent)
        if row == 0 or above is None or len(kept_tokens) >= budget or depths[above] >= max_depth:
            continue
        if not 0 <= token < vocab_size or (above, token) in seen:
            continue
        seen.add((above, token))
        new_row[row] = len(kept_tokens)
        kept_tokens.append(token)
        kept_parents.append(above)
        # Probabilities only steer which rows carry streams; a path is no likelier than its parent, whatever a drafter says.
        kept_logprob.append(min(path, kept_logprob[above]) if path == path else kept_logprob[above])
        depths.append(depths[above] + 1)
    # Usually there is nothing to mend.
    if (kept_tokens, kept_parents, kept_logprob) == rows and (tokens.dtype, parents.dtype, logprob.dtype) == _ROW_DTYPES:
        return tree, 0
    clean = TokenTree(
        np.array(kept_tokens, dtype=np.int64), np.array(kept_parents, dtype=np.int32), np.array(kept_logprob, dtype=np.float32)
    )
    return clean, proposed - len(clean)


def _check_request(session: Session, prompt_ids: Sequence[int], max_new_tokens: int) -> None:
    if not prompt_ids:
        raise UserError("the prompt is empty; give at least one token")
    if len(prompt_ids) > session.capacity:
        raise UserError(
            f"the prompt has {len(prompt_ids)} tokens, the context holds {session.capacity}; shorten the prompt or raise the capacity"
        )
    bad = [token for token in prompt_ids if not 0 <= token < session.vocab_size]
    if bad:
        raise UserError(f"the prompt has token {bad[0]}, the vocabulary goes from 0 to {session.vocab_size - 1}")
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens: {max_new_tokens} given, 1 or more expected")


def _finish_reason(tokens: Sequence[int], end: int, stop_ids: Collection[int], session: Session) -> FinishReason | None:
    if tokens[-1] in stop_ids:
        return "stop"
    return "length" if len(tokens) >= end or session.length >= session.capacity else None
