"""Graph contract v1: names, types and meaning of a stream-fused graph's inputs and outputs. Imports nothing heavy.

One call takes T main rows (a prompt chunk or a tree: root first, primary chain next, parents before children), L rows to
score and S rows that carry streams. The cache has capacity C and is bound in place: a ``past_key_values`` input and its
``present`` output are the same memory. Rows past..past+T hold the main rows after the call; stream rows use the S·γ slots
behind them as scratch.

Delayed placement: the main graph has no stream rows; it also returns the states at which streams enter. A second graph runs
the γ streams of one committed row through the top layers, on the caches of those layers, with its scratch rows behind them.
"""

from __future__ import annotations

from typing import Final, Literal

CONTRACT_VERSION: Final = 1

Profile = Literal["ort", "portable"]  # of an ONNX graph

INPUT_IDS: Final = "input_ids"  # int64 [1, T]
POSITION_IDS: Final = "position_ids"  # int64 [1, T]: past + depth in the tree
TREE_MASK: Final = "tree_mask"  # bool [T, T]: row i may see row j; lower-triangular, ancestors and itself
PAST_LENGTH: Final = "past_length"  # int32 [1]: rows committed to the cache
LOGIT_ROWS: Final = "logit_rows"  # int64 [L]: rows that the head scores
STREAM_ROWS: Final = "stream_rows"  # int64 [S], S >= 0: rows that carry streams (absent from graphs without streams)

NEXT_IDS: Final = "next_ids"  # int64 [L]: argmax of the logits
LOGITS: Final = "logits"  # float [L, V]
STREAM_IDS: Final = "stream_ids"  # int64 [S, γ, k]: top-k tokens of each stream, best first
STREAM_LOGPROBS: Final = "stream_logprobs"  # float [S, γ, k]

# Delayed placement
ENTRY_STATES: Final = "entry_states"  # main graph, float [T, H]: states at layer N - N_s
ENTRY_STATE: Final = "entry_state"  # streams' graph, float [1, H]: of the last committed row
ROOT_ID: Final = "root_id"  # streams' graph, int64 [1]: the token that follows that row, root of the next tree
STREAM_PAIRS: Final = "stream_pairs"  # float [1, γ, k, k]: [0, j, a, b] adds to candidate b of stream j + 1 below candidate a of stream j


def past_key(layer: int) -> str:
    """Cache input of ``layer``: float [1, kv_heads, C, head_dim]."""
    return f"past_key_values.{layer}.key"


def past_value(layer: int) -> str:
    return f"past_key_values.{layer}.value"


def present_key(layer: int) -> str:
    return f"present.{layer}.key"


def present_value(layer: int) -> str:
    return f"present.{layer}.value"
