from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from specstream.models.errors import UserError
from specstream.runtimes.drafters import DraftContext, Drafter, NoDrafter, StreamDrafter
from specstream.runtimes.speculate import Block, accept, sanitise, speculate
from specstream.runtimes.tree import StreamPolicy, TokenTree, every_row, likeliest_last, likeliest_rows, only_root, root_only

from .drafters import SPOILS, AlwaysRight, AlwaysWrong, Broken, Empty, OverBudget, Randomly
from .fake_model import FakeModel

POLICIES: dict[str, StreamPolicy] = {
    "every_row": every_row,
    "only_root": only_root,
    "likeliest_1": likeliest_last(1),
    "likeliest_3": likeliest_last(3),
}


def emitted(blocks: Sequence[Block]) -> list[int]:
    return [token for block in blocks for token in block.tokens]


def compare_with_plain(
    drafter: Drafter | None, prompt: list[int], *, model: FakeModel | None = None, maker: type | None = None, **options: object
) -> tuple[FakeModel, list[Block]]:
    """Run with the drafter and without: text, finish reason and cache must be the same. Returns what ran with it."""
    model = model or FakeModel()
    plain_model = FakeModel(capacity=model.capacity)
    budget = options.pop("budget", 8)
    controller = options.pop("controller", budget)
    policy = options.pop("policy", every_row)
    plain = list(speculate(plain_model, prompt, NoDrafter(), **options))  # type: ignore[arg-type]
    assert all(block.rows <= 1 and block.drafted == block.accepted == 0 for block in plain)
    if drafter is None:
        assert maker is not None
        # What would follow the end is known as well, so that drafts may run past stop tokens and limits.
        longer = FakeModel(capacity=200)
        chosen = {"sampling": options.get("sampling")}
        truth = prompt + emitted(list(speculate(longer, prompt, NoDrafter(), max_new_tokens=150, **chosen)))  # type: ignore[arg-type]
        drafter = maker(truth)
    blocks = list(speculate(model, prompt, drafter, budget=controller, policy=policy, **options))  # type: ignore[arg-type]
    assert emitted(blocks) == emitted(plain)
    assert [b.finish_reason for b in blocks[:-1]] == [None] * (len(blocks) - 1)
    assert blocks[-1].finish_reason == plain[-1].finish_reason
    assert model.length == plain_model.length == len(prompt) + len(emitted(blocks)) - 1
    assert model.cache[: model.length] == plain_model.cache[: plain_model.length]
    for block in blocks:
        assert len(block.tokens) >= 1
        assert len(block.tokens) - 1 <= block.accepted <= min(len(block.tokens), block.drafted)
        assert block.rows <= budget
    return model, blocks


requests = st.fixed_dictionaries(
    {
        "prompt": st.lists(st.integers(0, 39), min_size=1, max_size=30),
        "max_new_tokens": st.integers(1, 40),
        "stop_ids": st.sets(st.integers(0, 39), max_size=3),
        "budget": st.integers(1, 12),
        "chunk": st.sampled_from([1, 7, 64]),
    }
)


@pytest.mark.parametrize("maker", [AlwaysRight, AlwaysWrong, OverBudget])
@given(request=requests)
def test_text_and_cache_are_those_of_plain_decoding(maker: type, request: dict[str, object]) -> None:
    compare_with_plain(None, maker=maker, **request)  # type: ignore[arg-type]


@given(request=requests, seed=st.integers(0, 10**6))
def test_random_trees(request: dict[str, object], seed: int) -> None:
    compare_with_plain(None, maker=lambda truth: Randomly(truth, seed=seed), **request)  # type: ignore[arg-type]


@given(request=requests)
def test_empty_drafts(request: dict[str, object]) -> None:
    _, blocks = compare_with_plain(Empty(), **request)  # type: ignore[arg-type]
    assert sum(block.drafted for block in blocks) == 0


@pytest.mark.parametrize("spoil", SPOILS, ids=lambda spoil: spoil.__name__)
@given(request=requests)
def test_broken_drafts_never_change_the_text(spoil: object, request: dict[str, object]) -> None:
    request["budget"] = 6
    _, blocks = compare_with_plain(None, maker=lambda truth: Broken(truth, spoil=spoil), **request)  # type: ignore[arg-type]
    harmless = spoil.__name__ in ("_no_numbers", "_impossible_probabilities")  # type: ignore[attr-defined]
    for block in blocks[1:]:
        # With six rows of chain and room for one to six, whatever was not verified was counted.
        assert harmless or block.dropped > 0 or spoil.__name__ == "_nothing"  # type: ignore[attr-defined]


@pytest.mark.parametrize("policy", POLICIES)
@given(request=requests, skill=st.sampled_from([0.0, 0.5, 0.9, 1.0]), stray_ids=st.booleans(), capacity=st.integers(31, 96))
@example(
    request={"prompt": [1] * 30, "max_new_tokens": 40, "stop_ids": set(), "budget": 8, "chunk": 7}, skill=1.0, stray_ids=False, capacity=31
)
def test_streams(policy: str, request: dict[str, object], skill: float, stray_ids: bool, capacity: int) -> None:
    model = FakeModel(skill=skill, stray_ids=stray_ids, capacity=capacity)
    compare_with_plain(StreamDrafter(), model=model, policy=POLICIES[policy], **request)  # type: ignore[arg-type]


@given(request=requests, skill=st.sampled_from([0.0, 0.5, 1.0]), stray_ids=st.booleans(), capacity=st.integers(31, 96))
@example(
    request={"prompt": [1] * 30, "max_new_tokens": 40, "stop_ids": set(), "budget": 8, "chunk": 7}, skill=1.0, stray_ids=False, capacity=33
)
def test_delayed_streams(request: dict[str, object], skill: float, stray_ids: bool, capacity: int) -> None:
    model = FakeModel(skill=skill, stray_ids=stray_ids, capacity=capacity, delayed=True)
    compare_with_plain(StreamDrafter(), model=model, **request)  # type: ignore[arg-type]


def test_delayed_streams_are_always_fresh_and_never_run_in_vain() -> None:
    model, blocks = compare_with_plain(StreamDrafter(), prompt=[3, 1, 4], model=FakeModel(delayed=True), max_new_tokens=41, budget=4)
    assert [len(block.tokens) for block in blocks] == [1, *[4] * 10]  # a chain of γ = 3 below every root
    assert model.drafts == len(blocks) - 1 == sum(block.stream_rows for block in blocks)
    plain = FakeModel(delayed=True)
    list(speculate(plain, [3, 1, 4], NoDrafter(), max_new_tokens=9))
    assert plain.drafts == 0


class Restless:
    """A controller that changes its mind before every call."""

    def __init__(self, seed: int, most: int) -> None:
        self.random = random.Random(seed)
        self.most = most
        self.told: list[tuple[int, int, float]] = []

    def budget(self) -> int:
        return self.random.choice([1, 1, self.most])

    def streams(self) -> bool:
        return self.random.random() < 0.7

    def least(self) -> list[float]:
        return [self.random.choice([0.0, 0.1, 0.5])] * self.most

    def trim(self, tree: TokenTree) -> TokenTree:
        return tree if self.random.random() < 0.5 else likeliest_rows(tree, self.random.randint(1, len(tree)))

    def record(self, rows: int, emitted: int, expected: float) -> None:
        self.told.append((rows, emitted, expected))


@given(request=requests, skill=st.sampled_from([0.0, 0.5, 1.0]), delayed=st.booleans(), seed=st.integers(0, 10**6))
def test_a_budget_that_changes(request: dict[str, object], skill: float, delayed: bool, seed: int) -> None:
    controller = Restless(seed, int(request["budget"]))  # type: ignore[call-overload]
    model = FakeModel(skill=skill, delayed=delayed)
    _, blocks = compare_with_plain(StreamDrafter(), model=model, controller=controller, **request)  # type: ignore[arg-type]
    assert [(rows, emitted) for rows, emitted, _ in controller.told] == [(block.rows, len(block.tokens)) for block in blocks[1:]]
    assert all(1.0 <= expected <= rows + 1e-6 for rows, _, expected in controller.told)


def test_right_streams_are_accepted_to_their_full_depth() -> None:
    _, blocks = compare_with_plain(StreamDrafter(), prompt=[3, 1, 4], max_new_tokens=41, budget=16)
    assert [len(block.tokens) for block in blocks] == [1, *[4] * 10]  # γ = 3 accepted and the correction


def test_streams_of_an_ancestor_are_shifted() -> None:
    """With right streams at the root alone, each draft uses what the last accepted path left of them."""
    _, blocks = compare_with_plain(StreamDrafter(), prompt=[3, 1, 4], max_new_tokens=31, budget=16, policy=only_root)
    # The prompt's streams give 3 levels; the root's own then reach 0 levels below the next root: an empty draft, and again.
    assert [len(block.tokens) for block in blocks] == [1, *[4, 1] * 6]
    _, blocks = compare_with_plain(StreamDrafter(), prompt=[3, 1, 4], max_new_tokens=31, budget=3, policy=only_root)
    # Two levels accepted each time (budget 3): one stream is left for the next call, whose root has new ones.
    assert [len(block.tokens) for block in blocks[:7]] == [1, 3, 2, 3, 2, 3, 2]


def test_kept_streams_of_earlier_calls_still_reach() -> None:
    """Nothing of the accepted path carried streams: those of two calls ago serve while they reach."""

    def leaf_only(tree: TokenTree) -> np.ndarray:
        return np.array([len(tree) - 1], dtype=np.int64)

    model = FakeModel(skill=0.0, num_streams=6)
    _, blocks = compare_with_plain(StreamDrafter(), prompt=[3, 1, 4], model=model, max_new_tokens=60, budget=3, policy=leaf_only)
    drafted_without_own = [b for a, b in itertools.pairwise(blocks[1:]) if a.accepted == 0 and a.drafted > 0 and b.drafted > 0]
    assert drafted_without_own


def test_the_last_call_carries_no_streams_and_drafts_only_what_is_left() -> None:
    model, _ = compare_with_plain(StreamDrafter(), prompt=[5, 6], max_new_tokens=6, budget=16)
    # 1 from the prompt, 4 from the first call; one token is left.
    assert [(len(rows.input_ids), len(rows.stream_rows)) for rows in model.calls[-1:]] == [(1, 0)]
    model, blocks = compare_with_plain(StreamDrafter(), prompt=[5, 6], max_new_tokens=1)
    assert len(blocks) == 1
    assert len(model.calls[0].stream_rows) == 0


@pytest.mark.parametrize("offset", range(1, 9))
def test_a_stop_token_inside_an_accepted_block_cuts_it(offset: int) -> None:
    prompt = [2, 7, 1]
    truth = emitted(list(speculate(FakeModel(), prompt, NoDrafter(), max_new_tokens=30)))
    stop = truth[offset]
    end = truth.index(stop)
    _, blocks = compare_with_plain(None, prompt, maker=AlwaysRight, stop_ids={stop}, max_new_tokens=30, budget=6)
    assert emitted(blocks) == truth[: end + 1]
    last = blocks[-1]
    assert last.finish_reason == "stop"
    # All rows were right. Where the block was cut, its last token is a drafted one; otherwise it is the correction.
    if last.rows:
        assert last.accepted == len(last.tokens) - (len(last.tokens) == last.rows)


def test_stop_wins_over_length_when_both_come_at_once() -> None:
    prompt = [2, 7, 1]
    truth = emitted(list(speculate(FakeModel(), prompt, NoDrafter(), max_new_tokens=5)))
    assert truth.index(truth[4]) == 4
    blocks = list(speculate(FakeModel(), prompt, NoDrafter(), max_new_tokens=5, stop_ids={truth[4]}))
    assert emitted(blocks) == truth
    assert blocks[-1].finish_reason == "stop"


@pytest.mark.parametrize("prompt_length", [10, 11, 12])
def test_generation_ends_when_the_cache_is_full(prompt_length: int) -> None:
    model = FakeModel(capacity=12)
    model, blocks = compare_with_plain(StreamDrafter(), [1] * prompt_length, model=model, max_new_tokens=50)
    assert blocks[-1].finish_reason == "length"
    assert model.length == 12
    assert len(emitted(blocks)) == 12 - prompt_length + 1


def test_a_cached_beginning_of_the_prompt_is_not_run_again() -> None:
    model = FakeModel()
    list(speculate(model, [1, 2, 3, 4], NoDrafter(), max_new_tokens=3))
    model.rewind(3)
    model.calls.clear()
    again = emitted(list(speculate(model, [1, 2, 3, 4], NoDrafter(), max_new_tokens=3)))
    assert again == emitted(list(speculate(FakeModel(), [1, 2, 3, 4], NoDrafter(), max_new_tokens=3)))
    assert len(model.calls[0].input_ids) == 1


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "prompt is empty"),
        ([1] * 97, {}, "97 tokens, the context holds 96"),
        ([1, 40], {}, "token 40, the vocabulary goes from 0 to 39"),
        ([1, -1], {}, "token -1"),
        ([1], {"budget": 0}, "budget: 0"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens: 0"),
    ],
)
def test_bad_requests_fail_before_any_call(prompt: list[int], options: dict[str, int], message: str) -> None:
    model = FakeModel()
    with pytest.raises(UserError, match=message):
        speculate(model, prompt, NoDrafter(), **options)  # type: ignore[arg-type]
    assert not model.calls


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    parents = [-1, *(draw(st.integers(0, row - 1)) for row in range(1, draw(st.integers(1, 12))))]
    # Few tokens, so that paths match often; no two siblings alike.
    tokens: list[int] = []
    for row, parent in enumerate(parents):
        taken = {tokens[other] for other in range(row) if parents[other] == parent}
        tokens.append(draw(st.sampled_from([t for t in range(16) if t not in taken][:3])))
    return TokenTree(np.array(tokens), np.array(parents, dtype=np.int32), np.zeros(len(tokens), dtype=np.float32))


@given(trees(), st.data())
def test_accept_finds_the_longest_right_path(tree: TokenTree, data: st.DataObject) -> None:
    next_ids = data.draw(st.lists(st.integers(0, 5), min_size=len(tree), max_size=len(tree)))
    # Brute force: of all paths from the root whose every token is the argmax at its parent, the longest.
    right = [
        path
        for path in (tree.path(row) for row in range(len(tree)))
        if all(tree.tokens[below] == next_ids[above] for above, below in itertools.pairwise(path))
    ]
    assert accept(tree, next_ids) == max(right, key=len)
    assert accept(tree, np.array(next_ids)) == max(right, key=len)


def context(root: int = 5, budget: int = 4, max_depth: int = 3) -> DraftContext:
    return DraftContext([1, root], None, budget, max_depth)


@given(trees())
def test_sanitise_leaves_good_trees_alone(tree: TokenTree) -> None:
    clean, dropped = sanitise(tree, context(int(tree.tokens[0]), budget=20, max_depth=20), 40)
    assert clean is tree
    assert dropped == 0
    assert clean.tokens.tolist() == tree.tokens.tolist()
    assert clean.parents.tolist() == tree.parents.tolist()
    assert clean.logprob.tolist() == tree.logprob.tolist()


def test_sanitise_drops_what_hangs_below_a_dropped_row() -> None:
    tree = TokenTree(np.array([5, 99, 1, 2]), np.array([-1, 0, 1, 0], dtype=np.int32), np.zeros(4, dtype=np.float32))
    clean, dropped = sanitise(tree, context(), 40)
    assert (clean.tokens.tolist(), clean.parents.tolist(), dropped) == ([5, 2], [-1, 0], 2)


def test_sanitise_keeps_to_the_depth() -> None:
    tree = TokenTree(np.array([5, 1, 2, 3, 4]), np.arange(-1, 4, dtype=np.int32), np.zeros(5, dtype=np.float32))
    clean, dropped = sanitise(tree, context(budget=9, max_depth=2), 40)
    assert (clean.tokens.tolist(), dropped) == ([5, 1, 2], 2)


def test_sanitise_makes_probabilities_usable() -> None:
    logprob = np.array([0, 3, np.nan, -1], dtype=np.float32)
    clean, dropped = sanitise(TokenTree(np.array([5, 1, 2, 3]), np.arange(-1, 3, dtype=np.int32), logprob), context(), 40)
    assert (clean.logprob.tolist(), dropped) == ([0, 0, 0, -1], 0)


def test_sanitise_of_a_foreign_tree_is_an_empty_draft() -> None:
    clean, dropped = sanitise(root_only(6), context(root=5), 40)
    assert (clean.tokens.tolist(), dropped) == ([5], 1)
