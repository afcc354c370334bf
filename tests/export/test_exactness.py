"""A graph computes what the dense network computes, in both profiles: insertions, chunks, trees, the cache in place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specstream.export import contract

from .conftest import CAPACITY, Export, Exported
from .tiny import ARCHITECTURES, DRAFT_VOCAB, VOCAB, WINDOW

MAIN = ("Llama", "Qwen2", "Qwen3", "Gemma3")
PROFILES = ("ort", "portable")


def ids(count: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCAB, count)]


def ancestors(parents: list[int]) -> np.ndarray:
    mask = np.eye(len(parents), dtype=bool)
    for row, parent in enumerate(parents[1:], 1):
        mask[row] |= mask[parent]
    return mask


@pytest.fixture(params=[(a, p) for a in MAIN for p in PROFILES], ids="-".join)
def exported(request: pytest.FixtureRequest, export: Export) -> Exported:
    return export(*request.param)


def test_full_partial_and_no_insertion(exported: Exported) -> None:
    exported.call(ids(20), scored=[19], streams=[19])
    exported.commit(list(range(20)))
    parents = [-1, 0, 1, 2, 0, 1, 4, 4]
    mask = ancestors(parents)
    depths = [int(d) for d in mask.sum(axis=1) - 1]
    full = exported.call(ids(8, 1), depths, mask, streams=list(range(8)))
    partial = exported.call(ids(8, 1), depths, mask, streams=[5, 0])
    none = exported.call(ids(8, 1), depths, mask, streams=[])
    assert full["stream_max_abs_diff"] is not None
    assert partial["stream_max_abs_diff"] is not None
    assert none["stream_max_abs_diff"] is None


def test_streams_do_not_change_main_rows(exported: Exported) -> None:
    exported.call(ids(9), scored=[8])
    exported.commit(list(range(9)))
    logits = []
    for streams in ([], [1], [0, 1, 2]):
        inputs = _chunk_inputs(ids(3, 2), exported.graph.length, streams)
        logits.append(exported.graph.run(inputs)[contract.LOGITS])
    np.testing.assert_allclose(logits[1], logits[0], atol=1e-4)
    np.testing.assert_allclose(logits[2], logits[0], atol=1e-4)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunked_prompt(exported: Exported, chunk: int) -> None:
    prompt = ids(70 if chunk > 1 else 3 * WINDOW)
    for start in range(0, len(prompt), chunk):
        piece = prompt[start : start + chunk]
        last = start + chunk >= len(prompt)
        exported.call(piece, scored=[len(piece) - 1], streams=[len(piece) - 1] if last else [])
        exported.commit(list(range(len(piece))))
    exported.assert_same_cache()


def test_chunks_agree_with_the_whole_prompt(exported: Exported) -> None:
    prompt = ids(30)
    whole = exported.graph.run(_chunk_inputs(prompt, 0, [29], scored=[29]))
    for start in range(0, 30, 7):
        piece = prompt[start : start + 7]
        exported.graph.length = start
        chunked = exported.graph.run(_chunk_inputs(piece, start, [len(piece) - 1], scored=[len(piece) - 1]))
    for name in (contract.LOGITS, contract.STREAM_LOGPROBS):
        np.testing.assert_allclose(chunked[name], whole[name], atol=1e-3)


@st.composite
def sessions(draw: st.DrawFn) -> dict[str, Any]:
    """A prompt and a few trees, each with any rows carrying streams and any root path accepted."""
    trees = []
    for _ in range(draw(st.integers(1, 3))):
        rows = draw(st.integers(1, 10))
        parents = [-1] + [draw(st.integers(0, row - 1)) for row in range(1, rows)]
        carriers = draw(st.lists(st.integers(0, rows - 1), unique=True, max_size=rows))
        trees.append((parents, carriers, draw(st.integers(0, rows - 1))))
    return {"prompt": draw(st.integers(1, 40)), "trees": trees, "seed": draw(st.integers(0, 99))}


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])  # it is reset by hand
@given(session=sessions())
def test_random_trees(exported: Exported, session: dict[str, Any]) -> None:
    exported.reset()
    exported.call(ids(session["prompt"], session["seed"]), scored=[session["prompt"] - 1], streams=[session["prompt"] - 1])
    exported.commit(list(range(session["prompt"])))
    for number, (parents, carriers, accepted) in enumerate(session["trees"]):
        mask = ancestors(parents)
        depths = [int(depth) for depth in mask.sum(axis=1) - 1]
        exported.call(ids(len(parents), session["seed"] + number + 1), depths, mask, streams=carriers)
        exported.commit([int(row) for row in np.flatnonzero(mask[accepted])])
    exported.assert_same_cache()


def test_tree_on_an_empty_cache(exported: Exported) -> None:
    parents = [-1, 0, 0, 1, 2]
    mask = ancestors(parents)
    exported.call(ids(5), [0, 1, 1, 2, 2], mask, streams=[3, 4])


def test_cache_is_written_in_place_and_only_behind_the_past(exported: Exported) -> None:
    exported.call(ids(10), scored=[9], streams=[9])
    exported.commit(list(range(10)))
    gamma = exported.model.config.num_streams if exported.model.config else 0
    exported.graph.cache[..., 10:, :] = 777.0
    before = exported.graph.cache.copy()
    exported.call(ids(4, 3), streams=[1, 2])
    after = exported.graph.cache
    np.testing.assert_array_equal(after[..., :10, :], before[..., :10, :])
    assert (after[..., 10:14, :] != 777.0).any(axis=(-1, -2)).all()
    np.testing.assert_array_equal(after[..., 14 + 2 * gamma :, :], 777.0)


@pytest.mark.parametrize("profile", PROFILES)
def test_rows_to_the_last_slot(export: Export, profile: contract.Profile) -> None:
    exported = export("Llama", profile)
    length = CAPACITY - 4 - 2 * 3
    exported.call(ids(length), scored=[length - 1])
    exported.commit(list(range(length)))
    exported.call(ids(4, 5), streams=[0, 3])


def test_plain_graph_has_no_streams(export: Export) -> None:
    exported = export("Llama", "ort", streams=False)
    assert contract.STREAM_ROWS not in exported.graph.shapes
    assert contract.STREAM_IDS not in exported.graph.output_names
    exported.call(ids(12), scored=[3, 11])
    exported.commit(list(range(12)))
    exported.call(ids(3, 1), [0, 1, 1], ancestors([-1, 0, 0]))


@pytest.mark.parametrize("profile", PROFILES)
def test_draft_vocabulary(export: Export, profile: contract.Profile) -> None:
    exported = export("Qwen3", profile)
    found = exported.graph.run(_chunk_inputs(ids(12), 0, [11]))[contract.STREAM_IDS]
    assert set(found.reshape(-1).tolist()) <= set(exported.model.draft_vocab.tolist())
    assert len(exported.model.draft_vocab) == DRAFT_VOCAB


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name not in MAIN])
def test_other_architectures(export: Export, architecture: str) -> None:
    exported = export(architecture, "ort")
    exported.call(ids(20), scored=[19], streams=[19])
    exported.commit(list(range(20)))
    parents = [-1, 0, 1, 0, 3]
    mask = ancestors(parents)
    exported.call(ids(5, 1), [0, 1, 2, 1, 2], mask, streams=[2, 4])
    exported.commit([0, 3, 4])
    exported.call(ids(1, 2))
    exported.assert_same_cache()


def _chunk_inputs(tokens: list[int], past: int, streams: list[int], scored: list[int] | None = None) -> dict[str, np.ndarray]:
    rows = len(tokens)
    return {
        contract.INPUT_IDS: np.array([tokens], dtype=np.int64),
        contract.POSITION_IDS: past + np.arange(rows, dtype=np.int64)[None],
        contract.TREE_MASK: np.tril(np.ones((rows, rows), dtype=bool)),
        contract.PAST_LENGTH: np.array([past], dtype=np.int32),
        contract.LOGIT_ROWS: np.array(range(rows) if scored is None else scored, dtype=np.int64),
        contract.STREAM_ROWS: np.array(streams, dtype=np.int64),
    }
