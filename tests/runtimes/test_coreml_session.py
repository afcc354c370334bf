"""The session over a package: which function, what padding, when rows move. Functions are PyTorch's unless a test says otherwise."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specstream.export import contract
from specstream.export.coreml_contract import COMMIT_ROWS, COMMIT_START, CoreMLContract
from specstream.export.coreml_trace import plan_contract
from specstream.models.errors import UserError
from specstream.models.stream_model import StreamModel
from specstream.runtimes import coreml_session
from specstream.runtimes.coreml_session import CoreMLSession
from specstream.runtimes.drafters import NoDrafter, StreamDrafter
from specstream.runtimes.session import prefill, prompt_rows, tree_rows
from specstream.runtimes.speculate import speculate
from specstream.runtimes.tree import TokenTree, chain, every_row, likeliest_last, root_only

from ..coreml_tiny import CAPACITY, TorchFunction, streams_model
from ..export.tiny import VOCAB
from .drafters import Randomly

PACKAGE = Path("model.mlpackage")
LOAD_FUNCTION = coreml_session._load_function


class Made:
    """A session over PyTorch's functions, and what it was made of."""

    def __init__(self, streams: str, monkeypatch: pytest.MonkeyPatch, tree_rows: tuple[int, ...] = (4, 16), **options: Any) -> None:
        self.model: StreamModel = streams_model("Llama", streams)
        self.sizes: CoreMLContract = plan_contract(self.model, CAPACITY, tree_rows)
        self.functions: dict[str, TorchFunction] = {}
        names = [f.name for f in self.sizes.functions] + ([self.sizes.draft] if self.sizes.draft else [])
        monkeypatch.setattr(coreml_session, "_list_functions", lambda package: names)
        monkeypatch.setattr(coreml_session, "_load_function", self.load)
        self.session = CoreMLSession(PACKAGE, self.sizes, **options)

    def load(self, package: Path, name: str, compute_units: str) -> TorchFunction:
        self.functions[name] = TorchFunction(self.model, self.sizes, name)
        return self.functions[name]

    def cached(self) -> np.ndarray:
        """The committed rows, a pending move carried out."""
        assert self.session._state is not None
        slots = np.arange(self.session.length)
        if self.session._move is not None:
            slots[self.session._move_start :] = self.session._move
        return np.stack([state[:, :, slots].numpy() for state in self.session._state.values()])


@pytest.fixture(scope="module")
def patch() -> Any:
    with pytest.MonkeyPatch.context() as context:
        yield context


@pytest.fixture(scope="module")
def made(patch: pytest.MonkeyPatch) -> Made:
    return Made("delayed", patch)


def dense(model: StreamModel, tokens: list[int]) -> np.ndarray:
    """Logits [len(tokens), V] of a plain sequence."""
    with torch.inference_mode():
        return model.head(model.main_pass(torch.tensor([tokens])).final)[0].numpy()


def random_tree(rng: np.random.Generator, rows: int) -> TokenTree:
    parents = [-1, *(int(rng.integers(0, row)) for row in range(1, rows))]
    return TokenTree(rng.integers(0, VOCAB, rows), np.array(parents, dtype=np.int32), np.zeros(rows, dtype=np.float32))


@given(seed=st.integers(0, 10**6))
def test_prompts_and_trees_agree_with_a_dense_network(made: Made, seed: int) -> None:
    rng = np.random.default_rng(seed)
    session = made.session
    session.rewind(0)
    prompt = rng.integers(0, VOCAB, rng.integers(1, 75)).tolist()
    output = prefill(session, prompt, logits=True)
    np.testing.assert_allclose(output.logits[0], dense(made.model, prompt)[-1], atol=2e-4)
    for _ in range(2):
        tree = random_tree(rng, int(rng.integers(1, min(17, session.capacity - session.length + 1))))
        output = session.run(tree_rows(tree, session.length), logits=True)
        for row in range(len(tree)):
            path = prompt + tree.tokens[tree.path(row)].tolist()
            expected = dense(made.model, path)[-1]
            np.testing.assert_allclose(output.logits[row], expected, atol=2e-4)
            assert output.next_ids[row] == expected.argmax()
        kept = tree.path(int(rng.integers(0, len(tree))))
        session.commit(kept)
        prompt = prompt + tree.tokens[kept].tolist()
        if rng.random() < 0.5 and session.length + session.num_streams <= session.capacity:
            session.draft(int(output.next_ids[kept[-1]]))  # carries the commit out, and leaves rubbish behind it
    assert session.length == len(prompt)
    left = made.cached()
    session.rewind(0)
    prefill(session, prompt)
    np.testing.assert_allclose(left, made.cached(), atol=2e-4)


@pytest.mark.parametrize("streams", ["delayed", "fused", "none"])
def test_speculation_is_plain_decoding(streams: str, patch: pytest.MonkeyPatch) -> None:
    made = Made(streams, patch)
    session = made.session
    for seed in range(6):
        rng = np.random.default_rng(seed)
        prompt = rng.integers(0, VOCAB, rng.integers(1, 20)).tolist()
        session.rewind(0)
        plain = [t for block in speculate(session, prompt, NoDrafter(), max_new_tokens=30) for t in block.tokens]
        plain_cache = made.cached()
        for drafter, policy in ((StreamDrafter((0.8, 1.0, 1.2)), every_row), (Randomly([*prompt, *plain], seed=seed), likeliest_last(2))):
            session.rewind(0)
            blocks = list(speculate(session, prompt, drafter, policy=policy, budget=40, max_new_tokens=30))
            assert [t for block in blocks for t in block.tokens] == plain
            assert max(block.rows for block in blocks) <= session.max_tree_rows
            np.testing.assert_allclose(made.cached(), plain_cache, atol=3e-4)


def test_delayed_streams_are_those_of_the_network(made: Made) -> None:
    prompt, token = [5, 9, 11, 3, 60, 7, 8], 17
    made.session.rewind(0)
    prefill(made.session, prompt)
    output = made.session.draft(token)
    with torch.inference_mode():
        main = made.model.main_pass(torch.tensor([prompt]))
        states = made.model.stream_pass(main, torch.tensor([[len(prompt) - 1]]), torch.tensor([[token]]))
        best = torch.log_softmax(made.model.draft_head(states[0, 0]), dim=-1).topk(made.sizes.top_k, dim=-1)
    np.testing.assert_allclose(output.stream_logprobs, best.values, atol=3e-3)  # the entry state went through 16 bits
    np.testing.assert_array_equal(output.stream_ids, best.indices)
    assert output.stream_pairs.shape == (3, 4, 4)


@pytest.mark.parametrize(("rows", "name"), [(1, "decode_1"), (2, "tree_4"), (4, "tree_4"), (5, "tree_16"), (16, "tree_16")])
def test_the_smallest_function_that_fits(made: Made, rows: int, name: str) -> None:
    made.session.rewind(0)
    made.session._function(name)
    before = len(made.functions[name].calls)
    made.session.run(tree_rows(chain(1, [2] * (rows - 1)), 0))
    assert len(made.functions[name].calls) == before + 1
    call = made.functions[name].calls[-1]
    assert call[contract.INPUT_IDS].shape[1] == int(name.rpartition("_")[2])
    assert {array.dtype for array in call.values()} <= {np.dtype(np.int32), np.dtype(np.float16)}


def test_prompts_come_in_chunks(made: Made) -> None:
    session = made.session
    session.rewind(0)
    session.warm_up()
    for function in made.functions.values():
        function.calls.clear()
    prefill(session, list(range(70)))
    assert (session.prompt_chunk, session.length) == (64, 70)
    calls = {name: len(function.calls) for name, function in made.functions.items()}
    assert calls == {"decode_1": 0, "tree_4": 0, "tree_16": 1, "prefill_64": 1, "draft": 0}
    session.rewind(0)
    prefill(session, list(range(9)), chunk=4)
    assert session.length == 9


def test_a_commit_is_carried_out_by_the_next_call(made: Made) -> None:
    session = made.session
    session.rewind(0)
    prefill(session, [1, 2, 3])
    session.run(tree_rows(TokenTree(np.array([4, 5, 6, 7]), np.array([-1, 0, 0, 2]), np.zeros(4)), 3))
    session.commit([0, 2, 3])
    session.run(tree_rows(root_only(8), session.length))
    call = made.functions["decode_1"].calls[-1]
    assert (call[contract.PAST_LENGTH][0], call[COMMIT_START][0]) == (6, 4)
    assert call[COMMIT_ROWS][:4].tolist() == [5, 6, 6, 7]
    session.commit([0])
    session.run(tree_rows(root_only(8), session.length))
    call = made.functions["decode_1"].calls[-1]
    assert call[COMMIT_ROWS].tolist() == list(range(call[COMMIT_START][0], call[COMMIT_START][0] + 16))


def test_a_rewind_keeps_what_was_committed_before_it(made: Made) -> None:
    session = made.session
    texts = []
    for stop in (False, True):
        session.rewind(0)
        prefill(session, [1, 2, 3])
        session.run(tree_rows(TokenTree(np.array([4, 5, 6, 7]), np.array([-1, 0, 0, 2]), np.zeros(4)), 3))
        session.commit([0, 2, 3])
        if stop:
            session.run(tree_rows(root_only(9), 6))  # the move happens here in one case, behind the rewind in the other
        session.rewind(5)
        texts.append(session.run(tree_rows(root_only(8), 5), logits=True).logits)
    np.testing.assert_array_equal(*texts)
    np.testing.assert_allclose(texts[0][0], dense(made.model, [1, 2, 3, 4, 6, 8])[-1], atol=2e-4)


def test_to_the_last_row(made: Made) -> None:
    session = made.session
    session.rewind(0)
    tokens = [int(t) for t in np.random.default_rng(0).integers(0, VOCAB, CAPACITY)]
    prefill(session, tokens[:-5])
    output = session.run(tree_rows(chain(tokens[-5], tokens[-4:]), session.length), logits=True)
    np.testing.assert_allclose(output.logits, dense(made.model, tokens)[-5:], atol=2e-4)
    session.commit(range(5))
    assert session.length == session.capacity
    with pytest.raises(ValueError, match=f"{CAPACITY + 1} rows of cache needed, the capacity is {CAPACITY}"):
        session.run(tree_rows(root_only(1), session.length))
    with pytest.raises(ValueError, match="rows of cache needed"):
        session.draft(1)


def test_calls_that_no_function_holds(made: Made) -> None:
    session = made.session
    session.rewind(0)
    with pytest.raises(ValueError, match=r"17 rows, 17 scored, 0 with streams: this package takes 64 rows of a prompt, 16 of a tree"):
        session.run(tree_rows(chain(1, [2] * 16), 0))
    with pytest.raises(ValueError, match="without streams beside its rows"):
        session.run(prompt_rows([1], 0, streams=True))
    session.run(prompt_rows(list(range(40)), 0))
    with pytest.raises(ValueError, match="39 rows that move; the package moves 16 at most"):
        session.commit(range(1, 40))


@pytest.mark.parametrize("rows", [[-1], [3], [1, 0], [0, 0]])
def test_commits_that_make_no_sense(made: Made, rows: list[int]) -> None:
    made.session.rewind(0)
    made.session.run(prompt_rows([1, 2, 3], 0))
    with pytest.raises(ValueError, match="ascending row numbers"):
        made.session.commit(rows)


def test_drafts_that_make_no_sense(made: Made, patch: pytest.MonkeyPatch) -> None:
    made.session.rewind(0)
    with pytest.raises(ValueError, match="without a row committed"):
        made.session.draft(1)
    with pytest.raises(ValueError, match="no pass of their own"):
        Made("none", patch).session.draft(1)
    with pytest.raises(ValueError, match="rewind to 3"):
        made.session.rewind(3)


def test_arguments_that_make_no_sense(patch: pytest.MonkeyPatch) -> None:
    for capacity in (0, CAPACITY + 1):
        with pytest.raises(UserError, match=f"capacity: {capacity} given, 1 to {CAPACITY}"):
            Made("none", patch, capacity=capacity)
    with pytest.raises(UserError, match="compute units: 'gpu' given, one of all, cpu, cpu-gpu, cpu-ne"):
        Made("none", patch, compute_units="gpu")
    assert Made("none", patch, capacity=10).session.capacity == 10


def test_warm_up_loads_every_function(patch: pytest.MonkeyPatch) -> None:
    made = Made("delayed", patch)
    assert len(made.functions) == 1
    made.session.warm_up()
    assert list(made.functions) == ["decode_1", "tree_4", "tree_16", "prefill_64", "draft"]


def test_a_package_without_a_function_that_its_manifest_names(patch: pytest.MonkeyPatch) -> None:
    made = Made("delayed", patch)
    patch.setattr(coreml_session, "_list_functions", lambda package: ["decode_1", "prefill_64"])
    with pytest.raises(UserError, match="has no function tree_4, tree_16, draft, which its manifest names; export it again"):
        CoreMLSession(PACKAGE, made.sizes)


def test_core_ml_is_asked_for_the_function_on_its_own_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """What macOS would be given; coremltools' own loader is not here to be called."""
    asked: list[tuple[Any, ...]] = []

    def load(path: str, *, function_name: str, compute_units: str) -> Any:
        asked.append((path, function_name, compute_units))
        if function_name == "broken":
            raise RuntimeError("no such function\nmore")
        return object()

    units = types.SimpleNamespace(ALL="all", CPU_ONLY="cpu", CPU_AND_GPU="gpu", CPU_AND_NE="ne")
    fake = types.SimpleNamespace(models=types.SimpleNamespace(MLModel=load), ComputeUnit=units)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr("specstream.runtimes.coreml_import.import_coremltools", lambda: fake)
    LOAD_FUNCTION(PACKAGE, "tree_8", "cpu-ne")
    assert asked == [("model.mlpackage", "tree_8", "ne")]
    with pytest.raises(UserError, match=r"Core ML cannot load its function broken: no such function$"):
        LOAD_FUNCTION(PACKAGE, "broken", "all")
