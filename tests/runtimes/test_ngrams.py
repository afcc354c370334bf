from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specstream.models.errors import UserError
from specstream.runtimes.ngrams import NgramTable, build_ngrams

texts = st.lists(st.lists(st.integers(0, 4), min_size=2, max_size=12), min_size=1, max_size=12)


def witten_bell(texts: list[list[int]], context: tuple[int, ...], token: int, vocab_size: int) -> float:
    """The recursive definition."""
    size = len(context)
    after = [text[i + size] for text in texts for i in range(len(text) - size) if tuple(text[i : i + size]) == context]
    lower = 1 / vocab_size if not context else witten_bell(texts, context[1:], token, vocab_size)
    return (after.count(token) + len(set(after)) * lower) / (len(after) + len(set(after)))


@given(texts, st.integers(1, 4))
def test_probabilities_are_those_of_the_definition(outputs: list[list[int]], order: int) -> None:
    table = build_ngrams(outputs, 5, order=order, min_count=1)
    for text in outputs:
        for end in range(1, len(text)):
            found = table.following(tuple(text[:end]))
            assert found is not None
            assert 1 <= found.order <= min(order, end)
            context = tuple(text[end - found.order : end])
            for token, logprob in zip(found.tokens, found.logprobs, strict=True):
                exact = witten_bell(outputs, context, token, 5)
                assert exact * np.exp(-1 / 16 - 1e-6) <= np.exp(logprob) <= exact + 1e-9
            assert list(found.logprobs) == sorted(found.logprobs, reverse=True)
            assert 0 <= found.rest <= 1
            assert found.rest + np.exp(found.logprobs).sum() == pytest.approx(1)


def test_the_longest_known_context_counts() -> None:
    table = build_ngrams([[1, 2, 3, 9], [5, 2, 4, 9]] * 5, 10, order=2)
    after_two = table.following((0, 2))
    assert after_two is not None
    assert (after_two.order, set(after_two.tokens)) == (1, {3, 4})
    after_one_two = table.following((7, 1, 2))
    assert after_one_two is not None
    assert (after_one_two.order, after_one_two.tokens[0]) == (2, 3)
    assert np.exp(after_one_two.logprobs[0]) > 0.8
    assert table.following((0, 0)) is None
    assert table.following(()) is None


def test_a_context_that_adds_nothing_is_not_stored() -> None:
    """After 2 always comes 3, whatever was before."""
    table = build_ngrams([[token, 2, 3] for token in (5, 6, 7, 8)] * 3, 10, order=2, max_contexts=6)
    assert table.contexts <= 6
    found = table.following((5, 2))
    assert found is not None
    assert found.tokens[0] == 3


def test_the_largest_table_is_as_small_as_asked() -> None:
    rng = np.random.default_rng(0)
    outputs = rng.integers(0, 50, size=(200, 20)).tolist()
    assert build_ngrams(outputs, 50, max_contexts=300).contexts <= 300
    assert build_ngrams(outputs, 50, max_contexts=10).contexts == 50  # single tokens always stay


@pytest.mark.parametrize("vocab_size", [50, 300_000])
def test_round_trip(tmp_path: Path, vocab_size: int) -> None:
    outputs = np.random.default_rng(1).integers(0, 50, size=(50, 10)).tolist()
    table = build_ngrams(outputs, vocab_size)
    table.save(tmp_path / "table.npz")
    again = NgramTable.load(tmp_path / "table.npz", vocab_size)
    assert (again.order, again.contexts, again.vocab_size) == (table.order, table.contexts, vocab_size)
    assert all(again.following(tuple(text[:3])) == table.following(tuple(text[:3])) for text in outputs)
    buffer = io.BytesIO()
    table.save(buffer)
    assert buffer.getvalue()


def test_what_is_no_table(tmp_path: Path) -> None:
    table = build_ngrams([[1, 2, 3, 1, 2]] * 4, 10)
    good = tmp_path / "good.npz"
    table.save(good)
    with np.load(good) as stored:
        arrays = {name: stored[name] for name in stored.files}

    def refuse(name: str, message: str, vocab_size: int | None = 10) -> None:
        with pytest.raises(UserError, match=message) as caught:
            NgramTable.load(tmp_path / name, vocab_size)
        assert "\n" not in str(caught.value)
        assert name in str(caught.value)

    refuse("missing.npz", "No such file")
    (tmp_path / "text.npz").write_text("hello")
    refuse("text.npz", "not an n-gram table")
    (tmp_path / "cut.npz").write_bytes(good.read_bytes()[:-200])
    refuse("cut.npz", "not an n-gram table")
    np.savez(tmp_path / "objects.npz", header=np.array([{}], dtype=object))
    refuse("objects.npz", "not an n-gram table")
    with zipfile.ZipFile(tmp_path / "zip.npz", "w") as other:
        other.writestr("a.txt", "hello")
    refuse("zip.npz", "not an n-gram table")
    refuse("good.npz", "vocabulary of 10 tokens, the model has 11", 11)
    np.savez(tmp_path / "other.npz", a=np.zeros(3))
    refuse("other.npz", "it has the arrays a")
    for changed, message in (
        ({"header": np.array([2, 10, 4])}, "format is 2"),
        ({"header": np.array([1, 2, 4])}, "outside its vocabulary"),
        ({"sizes": arrays["sizes"] + 1}, "contexts do not add up"),
        ({"counts": arrays["counts"] + 1}, "candidates do not add up"),
        ({"tokens": arrays["tokens"].astype(np.float32)}, "tokens of another type"),
    ):
        np.savez(tmp_path / "changed.npz", **(arrays | changed))
        refuse("changed.npz", message, None)


def test_what_cannot_be_counted() -> None:
    with pytest.raises(UserError, match="no outputs"):
        build_ngrams([[], [1]], 10)
    with pytest.raises(UserError, match="token 10, the vocabulary has 10"):
        build_ngrams([[1, 10]], 10)
    with pytest.raises(UserError, match="token -1"):
        build_ngrams([[1, -1]], 10)
