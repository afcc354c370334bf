"""Training rows: JSONL in, token ids out, and the order in which a run visits them. Knows tokenizers only as a function."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from specstream.models.errors import UserError


@dataclass(frozen=True)
class TextRow:
    """One example: what the user asks and what the model should answer."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class TokenRow:
    """Token ids of a whole example; the completion (stop token included) starts at ``start``."""

    ids: tuple[int, ...]
    start: int


@dataclass(frozen=True)
class Batch:
    """Rows padded on the right.

    Attributes:
        ids: int64 [B, T].
        anchors: int64 [B, A], rows t whose next token is part of the completion, the last one repeated as padding.
        counts: int64 [B], real anchors of each row.
    """

    ids: Tensor
    anchors: Tensor
    counts: Tensor


def read_rows(path: Path, completions: bool = True) -> list[TextRow]:
    """Read ``{"prompt": ..., "completion": ...}`` lines; other keys are ignored, blank lines skipped.

    Args:
        completions: whether each row must have one; else they are read as empty.

    Raises:
        UserError: no such file, a malformed line (with its number), or no rows at all.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file; expected JSON lines with 'prompt' and 'completion'")
    rows = []
    with path.open(encoding="utf-8") as lines:
        try:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    data = json.loads(line)
                except json.JSONDecodeError as error:
                    raise UserError(f"{path}:{number}: not JSON ({error.msg} at column {error.colno})") from None
                if not isinstance(data, dict):
                    raise UserError(f"{path}:{number}: expected an object with 'prompt' and 'completion', found a {type(data).__name__}")
                for key in ("prompt", "completion") if completions else ("prompt",):
                    if not isinstance(data.get(key), str) or not data[key].strip():
                        raise UserError(f"{path}:{number}: '{key}' must be a non-empty string")
                rows.append(TextRow(data["prompt"], data["completion"] if completions else ""))
        except UnicodeDecodeError:
            raise UserError(f"{path}: not UTF-8 text; expected JSON lines with 'prompt' and 'completion'") from None
    if not rows:
        raise UserError(f"{path}: no rows; expected JSON lines with 'prompt' and 'completion'")
    return rows


def encode_rows(
    rows: Sequence[TextRow],
    encode_prompt: Callable[[str], list[int]],
    encode_text: Callable[[str], list[int]],
    stop_id: int,
    max_length: int,
) -> tuple[list[TokenRow], int]:
    """Tokenize rows, prompt and completion apart so that the prompt's ids are those that decoding will see.

    Returns:
        Rows of at most ``max_length`` tokens, and how many longer ones were left out.

    Raises:
        UserError: no row fits.
    """
    encoded = []
    for row in rows:
        prompt = encode_prompt(row.prompt)
        ids = (*prompt, *encode_text(row.completion), stop_id)
        if len(ids) <= max_length:
            encoded.append(TokenRow(ids, len(prompt)))
    if not encoded:
        raise UserError(f"all {len(rows)} rows are longer than {max_length} tokens; raise --max-length")
    return encoded, len(rows) - len(encoded)


def draft_vocabulary(rows: Sequence[TokenRow], size: int, vocab_size: int) -> list[int]:
    """The ``size`` commonest tokens of the completions, then the lowest ids (byte-level and BPE vocabularies put common tokens first).

    Returns:
        Token ids in ascending order.
    """
    counts = Counter(token for row in rows for token in row.ids[row.start :])
    chosen = [token for token, _ in counts.most_common(size)]
    have = set(chosen)
    for token in range(vocab_size):
        if len(chosen) >= size:
            break
        if token not in have:
            chosen.append(token)
    return sorted(chosen)


def plan_batches(lengths: Sequence[int], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """Which rows make which batch of an epoch: shuffled, then sorted by length within windows of 32 batches.

    A function of its arguments alone, so that a resumed run sees what the killed one would have seen. The last, short batch of
    an epoch is dropped unless it is the only one.
    """
    order = random.Random(f"{seed}/{epoch}")
    index = list(range(len(lengths)))
    order.shuffle(index)
    window = 32 * batch_size
    batches = []
    for start in range(0, len(index), window):
        part = sorted(index[start : start + window], key=lambda i: lengths[i])
        batches += [part[i : i + batch_size] for i in range(0, len(part), batch_size)]
    full = [b for b in batches if len(b) == batch_size] or batches
    order.shuffle(full)
    return full


def make_batch(rows: Sequence[TokenRow]) -> Batch:
    """Pad rows to one tensor (padding id 0: causal rows never see it), to a multiple of 16 so that kernels meet few shapes."""
    width = -(-max(len(row.ids) for row in rows) // 16) * 16
    counts = [len(row.ids) - row.start for row in rows]
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    anchors = torch.zeros(len(rows), max(counts), dtype=torch.int64)
    for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
        ids[i, : len(row.ids)] = torch.tensor(row.ids)
        anchors[i] = torch.clamp(torch.arange(anchors.shape[1]) + row.start - 1, max=len(row.ids) - 2)
        assert count >= 1
    return Batch(ids, anchors, torch.tensor(counts))
