"""Rows, batches and their order."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specstream.models.data import TextRow, TokenRow, draft_vocabulary, encode_rows, make_batch, plan_batches, read_rows
from specstream.models.errors import UserError


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"prompt": "a", "completion": "b"}\n{oops}\n', ":2: not JSON"),
        (b'{"prompt": "a"}\n', ":1: 'completion' must be a non-empty string"),
        (b'{"prompt": " ", "completion": "b"}\n', ":1: 'prompt' must be"),
        (b"[1]\n", ":1: expected an object with 'prompt' and 'completion', found a list"),
        (b"\n\n", "no rows"),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_a_bad_line_is_named(content: bytes, words: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(content)
    with pytest.raises(UserError) as error:
        read_rows(file)
    assert words in str(error.value)


def test_rows_are_read(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "é", "completion": "b", "task": "x"}\n\n{"prompt": "c", "completion": "d"}', encoding="utf-8")
    assert read_rows(file) == [TextRow("é", "b"), TextRow("c", "d")]


def test_prompts_may_be_enough(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b", "completion": "c"}\n{"prompt": "d", "completion": null}\n')
    assert read_rows(path, completions=False) == [TextRow("a", ""), TextRow("b", "c"), TextRow("d", "")]
    with pytest.raises(UserError, match=":1: 'completion' must be"):
        read_rows(path)


def test_encoding_ends_with_the_stop_token_and_drops_long_rows() -> None:
    rows = [TextRow("abc", "de"), TextRow("abcdef", "ghij")]
    encoded, dropped = encode_rows(rows, lambda p: [0, *map(ord, p)], lambda t: [*map(ord, t)], 2, 8)
    assert encoded == [TokenRow((0, 97, 98, 99, 100, 101, 2), 4)]
    assert dropped == 1
    with pytest.raises(UserError, match="all 2 rows are longer than 3 tokens"):
        encode_rows(rows, lambda p: [*map(ord, p)], lambda t: [*map(ord, t)], 2, 3)


def test_draft_vocabulary_takes_the_commonest_then_the_lowest() -> None:
    rows = [TokenRow((9, 9, 9, 7, 7, 5), 3), TokenRow((1, 7, 8), 1)]
    assert draft_vocabulary(rows, 2, 20) == [5, 7]
    assert draft_vocabulary(rows, 6, 20) == [0, 1, 2, 5, 7, 8]


@given(st.lists(st.integers(1, 300), min_size=1, max_size=200), st.integers(1, 9), st.integers(0, 3), st.integers(0, 3))
def test_an_epoch_visits_each_row_at_most_once(lengths: list[int], batch: int, seed: int, epoch: int) -> None:
    plan = plan_batches(lengths, batch, seed, epoch)
    seen = [i for part in plan for i in part]
    assert len(seen) == len(set(seen))
    assert set(seen) <= set(range(len(lengths)))
    assert len(seen) > len(lengths) - batch or len(plan) == 1
    assert plan == plan_batches(lengths, batch, seed, epoch)


def test_epochs_and_seeds_differ() -> None:
    lengths = list(range(100))
    plans = [plan_batches(lengths, 4, seed, epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    assert plans[0] != plans[1] != plans[2] != plans[0]


def test_batches_point_at_the_rows_before_each_completion_token() -> None:
    batch = make_batch([TokenRow((10, 11, 12, 13, 2), 3), TokenRow((20, 21, 2), 2)])
    assert batch.ids.shape == (2, 16)
    assert batch.ids[1].tolist()[:3] == [20, 21, 2]
    assert batch.ids[1, 3:].eq(0).all()
    assert batch.anchors.tolist() == [[2, 3], [1, 1]]
    assert batch.counts.tolist() == [2, 1]
