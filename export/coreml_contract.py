"""What a Core ML package of a stream-fused model takes and returns: names, functions, sizes. Imports nothing heavy.

The meaning is that of graph contract v1 (``contract.py``), in a form that Core ML holds: one ML Program with several functions of
static shapes, which share their weights and one pair of states. A call pads its rows to those of the function; the cache is not
bound but lives in the states, so rows that the last call accepted are moved by the next call, before anything else.

One function has T rows, of which L are scored and S carry γ streams; W is the width of a commit, C the number of slots.

    input_ids     int32 [1, T]    tokens; any id in padding
    position_ids  int32 [1, T]    place in the text: committed rows + depth
    tree_mask     float16 [T, T]  1 where row i sees row j of this call, else 0; padding sees itself
    past_length   int32 [1]       rows committed, those of ``commit_rows`` included; this call's rows are written behind them
    commit_start  int32 [1]       first slot of the commit
    commit_rows   int32 [W]       slot ``commit_start + i`` gets what slot ``commit_rows[i]`` holds; ``commit_start + i`` itself
                                  where nothing moves
    logit_rows    int32 [L]       rows that the head scores; absent where all are (L = T)
    stream_rows   int32 [S]       rows that carry streams (fused placement); absent where none do

    next_ids      int32 [L]       logits  float16 [L, V]      entry_states  float16 [L, H] (delayed placement)
    stream_ids    int32 [S, γ, k] stream_logprobs  float16 [S, γ, k]

Delayed streams have a function of their own: ``entry_state`` float16 [1, H], ``root_id`` int32 [1], ``past_length``,
``commit_start`` and ``commit_rows`` as above; it returns ``stream_ids``, ``stream_logprobs`` [1, γ, k] and, with a pair head,
``stream_pairs`` [1, γ, k, k].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from specstream.models.errors import UserError

COMMIT_START: Final = "commit_start"
COMMIT_ROWS: Final = "commit_rows"
KEY_CACHE: Final = "keyCache"  # states, float16 [layers, kv_heads, C, head_dim]
VALUE_CACHE: Final = "valueCache"
DRAFT: Final = "draft"  # the function of delayed streams

PREFILL_ROWS: Final = 64
TREE_ROWS: Final = (8, 16)
FUSED_STREAM_ROWS: Final = 1  # of the functions that carry streams (fused placement)
_SLOT_MULTIPLE: Final = 32  # the Neural Engine wants the dimensions of a state so


@dataclass(frozen=True)
class CoreMLFunction:
    """One function of a package. ``scored`` is ``rows`` where all rows are scored and there is no ``logit_rows``."""

    name: str
    rows: int
    scored: int
    stream_rows: int


@dataclass(frozen=True)
class CoreMLContract:
    """Sizes that a session needs to drive a package.

    Attributes:
        functions: of main rows, in the order of their rows; those that carry streams behind the others of as many rows.
        draft: name of the delayed streams' own function; None without.
        capacity: rows of text that the states can hold, a call's own rows and streams included, padding not.
        slots: rows that the states have: the capacity and room for padding.
        commit_width: W.
        vocab_size: V.
        hidden_size: H.
        num_streams: γ; 0 without streams.
        top_k: k; 0 without streams.
        pairs: whether the draft function returns ``stream_pairs``.
    """

    functions: tuple[CoreMLFunction, ...]
    draft: str | None
    capacity: int
    slots: int
    commit_width: int
    vocab_size: int
    hidden_size: int
    num_streams: int
    top_k: int
    pairs: bool


def plan_functions(tree_rows: tuple[int, ...], fused_streams: bool) -> tuple[CoreMLFunction, ...]:
    """The functions of a package: one token, trees, prompts; each with streams too where they are fused.

    Raises:
        UserError: rows of a tree that make no sense.
    """
    if not tree_rows or any(not 2 <= rows < PREFILL_ROWS for rows in tree_rows) or len(set(tree_rows)) < len(tree_rows):
        raise UserError(
            f"tree rows: {', '.join(map(str, tree_rows)) or 'none'} given; different numbers from 2 to {PREFILL_ROWS - 1} expected"
        )
    shapes = [
        ("decode_1", 1, 1),
        *((f"tree_{rows}", rows, rows) for rows in sorted(tree_rows)),
        (f"prefill_{PREFILL_ROWS}", PREFILL_ROWS, 1),
    ]
    made = []
    for name, rows, scored in shapes:
        made.append(CoreMLFunction(name, rows, scored, 0))
        if fused_streams:
            made.append(CoreMLFunction(f"{name}_streams", rows, scored, FUSED_STREAM_ROWS))
    return tuple(made)


def count_slots(capacity: int, num_streams: int) -> int:
    """Slots for a capacity: a function writes all its rows, so padding needs room behind the last row that counts."""
    needed = capacity + PREFILL_ROWS + FUSED_STREAM_ROWS * num_streams
    return -(-needed // _SLOT_MULTIPLE) * _SLOT_MULTIPLE
