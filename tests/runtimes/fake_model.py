"""A toy language model behind the `Session` protocol: its cache is real, and any wrong row in it changes what it says next."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specstream.runtimes.session import DraftOutput, Rows, StepOutput

_MASK = (1 << 64) - 1


def mix(*values: int) -> int:
    """A 64-bit hash (splitmix64's finaliser over each value in turn)."""
    state = 0x9E3779B97F4A7C15
    for value in values:
        state = (state ^ (value & _MASK)) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


class FakeModel:
    """A row's cache entry hashes its token, its position and the entries of all rows it sees; the next token hashes the entry.

    Scratch rows of streams are filled with rubbish, and every call checks the contract.

    Args:
        skill: share of streams whose best candidate is what the model will really say.
        stray_ids: whether streams also name tokens outside the vocabulary.
        delayed: whether streams have a pass of their own.
        greedy: whether each text is the greedy one, which delayed streams then check.
    """

    def __init__(
        self,
        vocab_size: int = 40,
        num_streams: int = 3,
        top_k: int = 4,
        capacity: int = 96,
        skill: float = 1.0,
        stray_ids: bool = False,
        delayed: bool = False,
        greedy: bool = True,
    ) -> None:
        self.vocab_size = vocab_size
        self.num_streams = num_streams
        self.top_k = top_k
        self.capacity = capacity
        self.prompt_chunk, self.max_tree_rows, self.max_stream_rows, self.near_tie = 256, capacity, capacity, 1e-3
        self.length = 0
        self.cache = [mix(slot, 1) for slot in range(capacity)]
        self.calls: list[Rows] = []
        self._skill = skill
        self._stray_ids = stray_ids
        self.delayed = delayed
        self.greedy = greedy
        self.drafts = 0
        self._states: list[tuple[int, int, int]] = []
        self._committed: tuple[int, int, int] | None = None
        self._last_rows = 0

    def run(self, rows: Rows, logits: bool = False) -> StepOutput:
        tokens, positions, mask = rows.input_ids.tolist(), rows.position_ids.tolist(), rows.tree_mask
        count, scratch = len(tokens), len(rows.stream_rows) * self.num_streams
        assert count > 0
        assert rows.input_ids.dtype == rows.position_ids.dtype == rows.logit_rows.dtype == rows.stream_rows.dtype == np.int64
        assert len(positions) == count
        assert mask.shape == (count, count)
        assert mask.dtype == np.bool_
        assert mask.diagonal().all()
        assert not np.triu(mask, 1).any()
        assert all(0 <= token < self.vocab_size for token in tokens)
        assert all(self.length <= position < self.length + count for position in positions)
        assert sorted(set(rows.stream_rows.tolist())) == rows.stream_rows.tolist()
        assert self.length + count + scratch <= self.capacity
        assert not (self.delayed and scratch)
        self.calls.append(rows)
        self._last_rows = count
        past = self.length
        seen = []  # hash sums of what each row and those after it see
        for row in range(count):
            visible = [*self.cache[:past], *(self.cache[past + other] for other in np.flatnonzero(mask[row, :row]))]
            total = sum(mix(entry) for entry in visible) & _MASK
            self.cache[past + row] = mix(tokens[row], positions[row], total)
            seen.append((total + mix(self.cache[past + row])) & _MASK)
        for slot in range(past + count, past + count + scratch):
            self.cache[slot] = mix(self.cache[slot], 7)
        entries = [self.cache[past + row] for row in range(count)]
        self._states, self._committed = list(zip(entries, seen, positions, strict=True)), None
        scored = rows.logit_rows.tolist()
        ids, logprobs = None, None
        if len(rows.stream_rows):
            streams = [self._streams(self._next(entries[row]), seen[row], positions[row]) for row in rows.stream_rows.tolist()]
            ids = np.array(streams, dtype=np.int64)
            logprobs = np.broadcast_to(np.log(0.9 * 0.3 ** np.arange(self.top_k)), ids.shape).astype(np.float32)
        return StepOutput(
            next_ids=np.array([self._next(entries[row]) for row in scored], dtype=np.int64),
            logits=np.stack([self._logits(entries[row]) for row in scored]) if logits else None,
            stream_ids=ids,
            stream_logprobs=logprobs,
        )

    def commit(self, rows: Sequence[int]) -> None:
        kept = list(rows)
        assert kept == sorted(set(kept))
        assert all(0 <= row < self._last_rows for row in kept)
        entries = [self.cache[self.length + row] for row in kept]
        self.cache[self.length : self.length + len(kept)] = entries
        self.length += len(kept)
        self._last_rows = 0
        self._committed = self._states[kept[-1]] if kept else None

    def rewind(self, length: int) -> None:
        assert 0 <= length <= self.length
        self.length = length
        self._last_rows = 0

    def draft(self, token: int) -> DraftOutput:
        assert self.delayed
        assert self._committed is not None
        assert self.length + self.num_streams <= self.capacity
        self.drafts += 1
        for slot in range(self.length, self.length + self.num_streams):
            self.cache[slot] = mix(self.cache[slot], 8)
        entry, seen, position = self._committed
        if self.greedy:
            assert token == self._next(entry)
        ids = np.array(self._streams(token, seen, position), dtype=np.int64)
        logprobs = np.broadcast_to(np.log(0.9 * 0.3 ** np.arange(self.top_k)), ids.shape).astype(np.float32)
        return DraftOutput(ids, logprobs, np.zeros((*ids.shape, self.top_k), dtype=np.float32))

    def _next(self, entry: int) -> int:
        return mix(entry, 2) % self.vocab_size

    def _logits(self, entry: int) -> np.ndarray:
        scores = np.random.default_rng(entry).random(self.vocab_size, dtype=np.float32)
        scores[self._next(entry)] = 2.0
        return scores

    def _streams(self, token: int, total: int, position: int) -> list[list[int]]:
        """Stream j's candidates: the greedy token j positions after ``token``, the next one, comes first as often as ``skill`` says."""
        candidates = []
        for stream in range(1, self.num_streams + 1):
            entry = mix(token, position + stream, total)
            total = (total + mix(entry)) & _MASK
            token = self._next(entry)
            others = [t for t in dict.fromkeys(mix(entry, 3, i) % self.vocab_size for i in range(200)) if t != token][: self.top_k]
            if self._stray_ids:
                others[1] = self.vocab_size + stream if stream % 2 else -1
            rank = 0 if mix(entry, 4) % 1000 < self._skill * 1000 else mix(entry, 5) % (self.top_k + 1)
            others.insert(rank, token)
            candidates.append(others[: self.top_k])
        return candidates
