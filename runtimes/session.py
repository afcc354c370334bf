"""What the speculative loop needs of a backend: one protocol, its inputs and outputs, and the prompt in chunks.

Knows rows, caches by length, and ids; nothing of ONNX Runtime, Core ML or text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from specstream.runtimes.tree import BoolArray, FloatArray, IntArray, TokenTree

PROMPT_CHUNK = 256  # rows of a prompt in one call where the backend takes any: bounds activations, costs nothing in speed
NEAR_TIE = 1e-3  # the two best logits closer than this: fp32 rounding decides between them

NO_ROWS = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Rows:
    """Inputs of one call (graph contract v1), without the batch dimension.

    Attributes:
        input_ids: int64 [T].
        position_ids: int64 [T]: past + depth.
        tree_mask: bool [T, T]: row i may see row j of this call; all rows see the cache.
        logit_rows: int64 [L]: rows that the head scores.
        stream_rows: int64 [S]: rows that carry streams.
    """

    input_ids: IntArray
    position_ids: IntArray
    tree_mask: BoolArray
    logit_rows: IntArray
    stream_rows: IntArray


@dataclass(frozen=True, eq=False)
class StepOutput:
    """Outputs of one call.

    Attributes:
        next_ids: int64 [L], argmax of each scored row.
        logits: float32 [L, V] when they were asked for.
        stream_ids: int64 [S, γ, k], best first; None when no row carried streams.
        stream_logprobs: float32 [S, γ, k].
    """

    next_ids: IntArray
    logits: FloatArray | None
    stream_ids: IntArray | None
    stream_logprobs: FloatArray | None


@dataclass(frozen=True, eq=False)
class DraftOutput:
    """Streams of a pass of their own (delayed placement).

    Attributes:
        stream_ids: int64 [γ, k], best first.
        stream_logprobs: float32 [γ, k].
        stream_pairs: float32 [γ, k, k]: [j, a, b] adds to candidate b of stream j + 1 below candidate a of stream j, before
            renormalising; None when the streams have no pair head.
    """

    stream_ids: IntArray
    stream_logprobs: FloatArray
    stream_pairs: FloatArray | None


class Session(Protocol):
    """A model with a cache. After :meth:`run` the cache is as long as before, until :meth:`commit` says which rows stay.

    Attributes:
        length: rows committed to the cache.
        capacity: rows that it can ever hold, scratch rows of streams included: length + T + S · γ must not exceed it.
        vocab_size: token ids are below it.
        num_streams: γ; 0 for a model without streams.
        delayed: whether streams run in a pass of their own (:meth:`draft`) and not beside rows of a call.
        top_k: k candidates of each stream.
        prompt_chunk: rows of a prompt in one call at most.
        max_tree_rows: rows of a tree in one call at most.
        max_stream_rows: rows of one call that may carry streams.
        near_tie: how close two logits must be for the backend's rounding to decide between them.
    """

    @property
    def length(self) -> int: ...
    @property
    def capacity(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def num_streams(self) -> int: ...
    @property
    def top_k(self) -> int: ...
    @property
    def delayed(self) -> bool: ...
    @property
    def prompt_chunk(self) -> int: ...
    @property
    def max_tree_rows(self) -> int: ...
    @property
    def max_stream_rows(self) -> int: ...
    @property
    def near_tie(self) -> float: ...

    def run(self, rows: Rows, logits: bool = False) -> StepOutput:
        """One call. Arrays of the result are valid until the next call.

        Args:
            logits: whether to return them too.

        Raises:
            ValueError: more rows than the capacity allows.
        """
        ...

    def commit(self, rows: Sequence[int]) -> None:
        """Keep these rows of the last call, in this order (ascending, each once), and forget its others."""
        ...

    def rewind(self, length: int) -> None:
        """Forget all rows from ``length`` on."""
        ...

    def draft(self, token: int) -> DraftOutput:
        """Delayed streams of the last committed row. Arrays of the result are valid until the next call.

        Args:
            token: the token after that row, root of the next tree.

        Raises:
            ValueError: streams are not delayed, the last row was not committed by the last call, or length + γ exceeds the capacity.
        """
        ...


def prompt_rows(tokens: Sequence[int], past: int, streams: bool = False) -> Rows:
    """Rows of a prompt or a chunk of one: each sees all before it, the last is scored and may carry streams."""
    last = np.array([len(tokens) - 1], dtype=np.int64)
    return Rows(
        input_ids=np.array(tokens, dtype=np.int64),
        position_ids=np.arange(past, past + len(tokens), dtype=np.int64),
        tree_mask=np.tri(len(tokens), dtype=np.bool_),
        logit_rows=last,
        stream_rows=last if streams else NO_ROWS,
    )


def tree_rows(tree: TokenTree, past: int, stream_rows: IntArray = NO_ROWS) -> Rows:
    """Rows of a tree whose root is the token at position ``past``; all are scored."""
    return Rows(
        input_ids=tree.tokens,
        position_ids=np.array(tree.positions(past), dtype=np.int64),
        tree_mask=tree.mask(),
        logit_rows=np.arange(len(tree), dtype=np.int64),
        stream_rows=stream_rows,
    )


def prefill(
    session: Session, prompt_ids: Sequence[int], streams: bool = False, chunk: int | None = None, logits: bool = False
) -> StepOutput:
    """Run and commit a prompt, of which the first ``session.length`` tokens are in the cache already.

    Args:
        prompt_ids: the whole prompt, at least one token longer than the cache.
        streams: whether its last token carries streams (only there: nothing else of a prompt is drafted from).
        chunk: rows of one call at most; what the session says when left out.
        logits: whether to return the last row's.

    Returns:
        The last call's output: one scored row, streams of one row or none.
    """
    if not session.length < len(prompt_ids) <= session.capacity:
        raise ValueError(f"{len(prompt_ids)} tokens of prompt, {session.length} in the cache, capacity {session.capacity}")
    while True:
        past = session.length
        tokens = prompt_ids[past : past + (session.prompt_chunk if chunk is None else min(chunk, session.prompt_chunk))]
        last = past + len(tokens) == len(prompt_ids)
        fits = not session.delayed and len(prompt_ids) + session.num_streams <= session.capacity
        output = session.run(prompt_rows(tokens, past, streams=last and streams and fits), logits=logits and last)
        session.commit(range(len(tokens)))
        if last:
            return output
