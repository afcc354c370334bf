from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specstream.runtimes.lookup import LONGEST_MATCH, Continuation, Matches, SuffixIndex, fold_tokens, fold_vocabulary

from .tiny_bundle import tokenizer

texts = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def brute_force(text: list[int], path: list[int]) -> dict[int, int]:
    """Every place before the text's end whose last token is the path's: position -> length of the match."""
    whole = text + path
    lengths = {}
    for place in range(len(text) - (1 if not path else 0)):
        length = 0
        while length < LONGEST_MATCH and length <= place and text[place - length] == whole[-1 - length]:
            length += 1
        if length:
            lengths[place] = length
    return lengths


@given(texts, st.data())
def test_matches_are_true_and_the_longest_is_among_them(text: list[int], data: st.DataObject) -> None:
    index = SuffixIndex()
    index.update(text)
    matches, path = index.root_matches(), []
    for _ in range(4):
        # All but the text's own end, which nothing follows yet.
        expected = {place: length for place, length in brute_force(text, path).items() if place < len(text) - 1}
        useful = {place: length for place, length in matches if place < len(text) - 1}
        assert useful.items() <= expected.items()
        if useful and len(expected) <= 16:
            assert max(useful.values()) == max(expected.values())
        found = index.continuations(matches)
        assert {c.token for c in found} == {text[place + 1] for place in useful}
        assert not found or sum(c.share for c in found) == pytest.approx(1)
        path.append(data.draw(st.sampled_from([c.token for c in found] or [0, 1, 2, 3])))
        matches = index.child_matches(matches, path)


@given(texts, st.integers(1, 40))
def test_a_growing_text_gives_the_same_as_a_whole_one(text: list[int], cut: int) -> None:
    whole, grown, copied = SuffixIndex(), SuffixIndex(), SuffixIndex()
    whole.update(text)
    growing = text[:cut]
    grown.update(growing)
    copied.update(text[:cut])
    growing.extend(text[cut:])
    grown.update(growing)
    copied.update(list(text))
    assert whole.root_matches() == grown.root_matches() == copied.root_matches()


def test_another_text_starts_anew() -> None:
    index = SuffixIndex()
    for text, following in ([1, 2, 3, 1], 2), ([1, 5, 1], 5), ([1, 5, 1, 7, 1], 7), ([9, 8, 1, 7, 1], 7), ([1, 1], 1), ([4], None):
        index.update(text)
        found = index.continuations(index.root_matches())
        assert max((c.share, c.token) for c in found)[1] == following if following is not None else not found


def test_longer_matches_weigh_more() -> None:
    index = SuffixIndex()
    index.update([9, 7, 8, 1, 5, 7, 8, 2, 9, 7, 8])
    assert index.continuations(index.root_matches()) == [Continuation(1, 3, 64 / 80), Continuation(2, 2, 16 / 80)]


def test_below_a_token_that_never_occurred_there_is_nothing() -> None:
    index = SuffixIndex()
    index.update([1, 2, 1])
    nothing: Matches = index.child_matches(index.root_matches(), [9])
    assert index.continuations(nothing) == []


def test_folded_tokens_match_across_case_and_spaces() -> None:
    fold = fold_tokens(["Nepal", " nepal", " ", "\n", "is", " Is", "high", "\ufffd", "\ufffd", ""])
    assert fold == [0, 0, 2, 3, 4, 4, 6, 7, 8, 9]
    index = SuffixIndex(fold)
    index.update([0, 5, 6, 3, 1])
    assert [c.token for c in index.continuations(index.root_matches())] == [5]
    # A path goes on with what really stood there, whichever of the class was drafted.
    assert [c.token for c in index.continuations(index.child_matches(index.root_matches(), [4]))] == [6]


def test_a_tokenizers_vocabulary_is_folded() -> None:
    made = tokenizer()
    size = made.get_vocab_size()
    fold = fold_vocabulary(made, size + 2)  # a model's vocabulary may be padded
    assert len(fold) == size + 2
    assert fold[made.token_to_id("T")] == fold[made.token_to_id("t")]
    assert fold[-2:] == [size, size + 1]
    assert fold[made.token_to_id("\u00e6")] == made.token_to_id("\u00e6")  # a byte that begins a character
