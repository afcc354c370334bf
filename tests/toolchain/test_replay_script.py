"""The stand-alone script says what the library says, and needs ONNX Runtime and NumPy only."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specstream.runtimes.drafters import DraftContext, StreamDrafter, Streams
from specstream.runtimes.sampling import History, Sampling, pick
from specstream.runtimes.tree import TokenTree, likeliest_last
from specstream.toolchain import replay_script
from specstream.toolchain.replay_script import Chooser, Tree, stream_tree


def test_it_imports_nothing_else() -> None:
    found = set()
    for node in ast.walk(ast.parse(Path(replay_script.__file__).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    assert found - set(sys.stdlib_module_names) == {"numpy", "onnxruntime"}


def streams_of(seed: int, gamma: int, k: int, pairs: bool, position: int) -> Streams:
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(20)[:k] for _ in range(gamma)]).astype(np.int64)
    raw = rng.standard_normal((gamma, k + 1)) * 2
    logprobs = np.sort((raw - np.log(np.exp(raw).sum(axis=1, keepdims=True)))[:, :k])[:, ::-1].astype(np.float32)
    scores = rng.standard_normal((gamma, k, k)).astype(np.float32) if pairs else None
    return Streams(ids, np.ascontiguousarray(logprobs), position, scores)


@given(
    seed=st.integers(0, 1000),
    gamma=st.integers(1, 5),
    k=st.integers(1, 5),
    pairs=st.booleans(),
    used=st.integers(0, 5),
    budget=st.integers(1, 20),
    max_depth=st.integers(0, 6),
    warm=st.booleans(),
)
def test_trees_are_those_of_the_drafter(
    seed: int, gamma: int, k: int, pairs: bool, used: int, budget: int, max_depth: int, warm: bool
) -> None:
    text = [3, 1, 4, 1, 5, 9, 2, 6, 5, int(streams_of(seed, gamma, k, pairs, 0).ids[0, 0])]
    streams = streams_of(seed, gamma, k, pairs, len(text) - 2 - used)
    temperatures = tuple(1.0 + 0.1 * (i + 1) for i in range(gamma)) if warm else (1.0,) * gamma
    wanted = StreamDrafter(temperatures).propose(DraftContext(text, streams, budget, max_depth))
    given_streams = (streams.ids, streams.logprobs, streams.pairs, streams.position)
    found = stream_tree(text, given_streams, budget, max_depth, list(temperatures))
    assert found.tokens == wanted.tokens.tolist()
    assert found.parents == wanted.parents.tolist()
    np.testing.assert_array_equal(np.array(found.logprob, dtype=np.float32), wanted.logprob)
    np.testing.assert_array_equal(found.mask(), wanted.mask())
    assert found.depths == wanted.depth.tolist()
    row = len(found.tokens) - 1
    assert found.path(row) == [int(wanted.tokens[r]) for r in wanted.path(row)[1:]]
    assert replay_script.likeliest_last(found) == likeliest_last(1)(wanted).tolist()


def test_the_row_with_streams_is_the_policys() -> None:
    rng = np.random.default_rng(3)
    for size in range(1, 12):
        parents = [-1, *(int(rng.integers(0, row)) for row in range(1, size))]
        paths = [0.0]
        for parent in parents[1:]:
            paths.append(paths[parent] - float(rng.exponential()))
        logprob = np.array(paths, dtype=np.float32)
        tree = TokenTree(np.arange(size), np.array(parents, dtype=np.int32), logprob)
        assert replay_script.likeliest_last(Tree(list(range(size)), parents, logprob.tolist())) == likeliest_last(1)(tree).tolist()


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0, seed=3),
        Sampling(temperature=0.0, repetition_penalty=1.3),
        Sampling(temperature=0.7, top_k=5, seed=1 << 40),
        Sampling(temperature=1.3, top_p=0.8, min_p=0.02, seed=5),
        Sampling(temperature=2.0, top_k=30, top_p=0.9, repetition_penalty=0.8, presence_penalty=0.5, frequency_penalty=-0.3, seed=2),
    ],
)
def test_samples_are_those_of_the_library(sampling: Sampling) -> None:
    rng = np.random.default_rng(0)
    prompt, different = [1, 2, 3, 2], set()
    for number in range(60):
        logits = (rng.standard_normal(400) * 3).astype(np.float32)
        generated = rng.integers(0, 400, number % 7).tolist()
        choose = Chooser(sampling.to_json(), prompt)
        out: dict[str, Any] = {"logits": logits[None]}
        split = len(generated) // 2
        found = choose(out, 0, [*prompt, *generated[:split]], generated[split:])
        wanted = pick(logits, len(prompt) + len(generated), History(prompt, generated), sampling)
        assert found == wanted
        different.add(found)
    assert len(different) > 20


def test_greedy_is_the_graphs_own_argmax() -> None:
    assert Chooser(None, [1])({"next_ids": np.array([7, 8])}, 1, [1, 2], []) == 8
