from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import load_model, save

from specstream.models.errors import UserError
from specstream.runtimes import ort_session
from specstream.runtimes.bundle import Bundle, BundleWriter
from specstream.runtimes.drafters import NoDrafter, StreamDrafter
from specstream.runtimes.ort_session import FIRST_ALLOCATION, OrtSession, usable_cores
from specstream.runtimes.session import prefill, prompt_rows, tree_rows
from specstream.runtimes.speculate import speculate
from specstream.runtimes.tree import TokenTree, chain, every_row, likeliest_last, only_root, root_only

from .drafters import Randomly
from .tiny_bundle import CONTEXT, STREAMS, TOP_K, dense_logits, graph, manifest, write_bundle


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return write_bundle(tmp_path_factory.mktemp("tiny") / "bundle")


@pytest.fixture(scope="module")
def session(bundle: Bundle) -> OrtSession:
    return OrtSession(bundle, threads=1)


def cached(session: OrtSession) -> np.ndarray:
    return session.cache[:, :, :, :, : session.length].copy()


def random_tree(rng: np.random.Generator, rows: int, vocab_size: int) -> TokenTree:
    parents = [-1, *(int(rng.integers(0, row)) for row in range(1, rows))]
    return TokenTree(rng.integers(0, vocab_size, rows), np.array(parents, dtype=np.int32), np.zeros(rows, dtype=np.float32))


@given(seed=st.integers(0, 10**6), chunk=st.sampled_from([1, 7, 64]))
def test_prompts_and_trees_agree_with_a_dense_network(session: OrtSession, seed: int, chunk: int) -> None:
    rng = np.random.default_rng(seed)
    session.rewind(0)
    prompt = rng.integers(0, session.vocab_size, rng.integers(1, 30)).tolist()
    output = prefill(session, prompt, chunk=chunk, logits=True, streams=True)
    expected = dense_logits(prompt, session.vocab_size)
    np.testing.assert_allclose(output.logits[0], expected[-1], atol=1e-4)
    assert output.next_ids[0] == expected[-1].argmax()
    tree = random_tree(rng, int(rng.integers(1, 12)), session.vocab_size)
    stream_rows = np.flatnonzero(rng.random(len(tree)) < 0.5)
    output = session.run(tree_rows(tree, session.length, stream_rows), logits=True)
    for row in range(len(tree)):
        path = prompt + tree.tokens[tree.path(row)].tolist()
        expected = dense_logits(path, session.vocab_size)[-1]
        np.testing.assert_allclose(output.logits[row], expected, atol=1e-4)
        assert output.next_ids[row] == expected.argmax()
    if len(stream_rows):
        assert output.stream_ids.shape == output.stream_logprobs.shape == (len(stream_rows), STREAMS, TOP_K)
        assert (np.diff(output.stream_logprobs, axis=-1) <= 0).all()
    else:
        assert output.stream_ids is output.stream_logprobs is None
    # Committing a path leaves what plain decoding of that path would have cached.
    kept = tree.path(int(rng.integers(0, len(tree))))
    session.commit(kept)
    after_tree = cached(session)
    session.rewind(0)
    prefill(session, prompt)
    for token in tree.tokens[kept].tolist():
        session.run(tree_rows(root_only(token), session.length))
        session.commit([0])
    np.testing.assert_allclose(after_tree, cached(session), atol=1e-4)


def test_a_padded_row_is_computed_as_one_of_two(bundle: Bundle) -> None:
    """Same kernels, so the same bits, as beside any other row; nothing of the second row stays."""
    padded, other = OrtSession(bundle, threads=1, capacity=24), OrtSession(bundle, threads=1, capacity=24)
    padded.pad_single = True
    prompt = [3, 1, 4, 1, 5]
    for session in (padded, other):
        prefill(session, prompt)
    for token in range(5, 5 + 24 - len(prompt)):
        got = padded.run(tree_rows(root_only(token), padded.length), logits=True)
        if padded.length + 2 <= other.capacity:
            beside = other.run(tree_rows(chain(token, [7]), other.length), logits=True)
        else:  # there is no room for a second row
            beside = other.run(tree_rows(root_only(token), other.length), logits=True)
        assert got.next_ids.shape == (1,)
        np.testing.assert_array_equal(got.logits[0], beside.logits[0])
        assert got.next_ids[0] == beside.next_ids[0]
        with pytest.raises(ValueError, match="after a call of 1"):
            padded.commit([1])
        got = padded.run(tree_rows(root_only(token), padded.length))
        padded.commit([0])
        other.commit([0])
        np.testing.assert_array_equal(cached(padded), cached(other))
    assert padded.length == 24


def test_the_graph_writes_into_our_array(bundle: Bundle) -> None:
    session = OrtSession(bundle, threads=1, capacity=CONTEXT)
    memory = session.cache
    prefill(session, [1, 2, 3])
    assert session.cache is memory
    assert np.abs(memory[:, :, :, :, :3]).min(axis=(1, 3, 5)).all()
    assert not memory[:, :, :, :, 3:].any()
    address = memory.ctypes.data
    for token in range(20):
        session.run(tree_rows(root_only(token), session.length))
        session.commit([0])
    assert session.cache.ctypes.data == address
    assert session.allocated == CONTEXT


def test_contiguous_rows_are_committed_without_a_copy(session: OrtSession) -> None:
    session.rewind(0)
    prefill(session, [1, 2, 3])
    session.run(tree_rows(chain(4, [5, 6]), 3))
    session.cache.flags.writeable = False  # a copy would fail
    try:
        session.commit([0, 1])
    finally:
        session.cache.flags.writeable = True
    assert session.length == 5


def test_the_cache_grows_by_doubling_and_keeps_its_rows(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specstream.runtimes.ort_session.FIRST_ALLOCATION", 4)
    growing, fixed = OrtSession(bundle, threads=1), OrtSession(bundle, threads=1, capacity=CONTEXT)
    assert growing.allocated == 4
    sizes = set()
    for token in range(40):
        outputs = []
        for session in (growing, fixed):
            outputs.append(session.run(tree_rows(root_only(token), session.length, np.array([0])), logits=True))
            session.commit([0])
        sizes.add(growing.allocated)
        np.testing.assert_allclose(outputs[0].logits, outputs[1].logits, atol=1e-5)
    assert sizes == {4, 8, 16, 32, 64}
    np.testing.assert_allclose(cached(growing), cached(fixed), atol=1e-5)
    assert FIRST_ALLOCATION > 4


def test_capacity_is_a_limit(bundle: Bundle) -> None:
    session = OrtSession(bundle, threads=1, capacity=10)
    assert (session.allocated, session.capacity) == (10, 10)
    prefill(session, list(range(9)))
    session.run(tree_rows(root_only(1), 9))
    with pytest.raises(ValueError, match="11 rows of cache needed, the capacity is 10"):
        session.run(tree_rows(chain(1, [2]), 9))
    with pytest.raises(ValueError, match="13 rows"):
        session.run(tree_rows(root_only(1), 9, np.array([0])))


def test_a_prompt_takes_fewer_rows_a_call_where_scores_would_take_much_memory(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = [*range(1, 31), *range(1, 31)]
    whole = OrtSession(bundle, threads=1, capacity=CONTEXT)
    expected = prefill(whole, prompt, logits=True).logits
    assert whole.prompt_chunk == 256
    monkeypatch.setattr(ort_session, "_SCORE_BYTES", 40 * 4 * bundle.manifest.model.num_heads * CONTEXT)
    pieces = OrtSession(bundle, threads=1, capacity=CONTEXT)
    assert pieces.prompt_chunk == 40
    run, sizes = pieces.run, []
    monkeypatch.setattr(pieces, "run", lambda rows, logits=False: sizes.append(len(rows.input_ids)) or run(rows, logits))
    np.testing.assert_allclose(prefill(pieces, prompt, logits=True).logits, expected, atol=1e-5)
    assert sizes == [40, 20]
    monkeypatch.setattr(ort_session, "_SCORE_BYTES", 1)
    assert pieces.prompt_chunk == 32


@pytest.mark.parametrize("users", [None, "0", "1"])
def test_attention_is_not_tiled_unless_the_user_says_so(bundle: Bundle, users: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ONNX Runtime finds in the environment while it makes a session, and what is left of it there."""
    name, make, found = ort_session.TILED_ATTENTION_OFF, ort.InferenceSession, []
    monkeypatch.delenv(name, raising=False)
    if users is not None:
        monkeypatch.setenv(name, users)
    monkeypatch.setattr(ort, "InferenceSession", lambda *args, **kwargs: found.append(os.environ.get(name)) or make(*args, **kwargs))
    OrtSession(bundle, threads=1)
    assert set(found) == {users or "1"}
    assert os.environ.get(name) == users


def test_rewind_forgets(session: OrtSession) -> None:
    session.rewind(0)
    first = prefill(session, [1, 2, 3, 4], logits=True).logits.copy()
    session.rewind(2)
    prefill(session, [1, 2, 9, 9, 9])
    session.rewind(2)
    np.testing.assert_allclose(prefill(session, [1, 2, 3, 4], logits=True).logits, first, atol=1e-5)
    with pytest.raises(ValueError, match="rewind to 5"):
        session.rewind(5)


@pytest.mark.parametrize("rows", [[-1], [3], [1, 0], [0, 0]])
def test_commits_that_make_no_sense(session: OrtSession, rows: list[int]) -> None:
    session.rewind(0)
    session.run(prompt_rows([1, 2, 3], 0))
    with pytest.raises(ValueError, match="ascending row numbers"):
        session.commit(rows)


def test_a_call_is_committed_once(session: OrtSession) -> None:
    session.rewind(0)
    session.run(prompt_rows([1, 2, 3], 0))
    session.commit([0])
    with pytest.raises(ValueError, match="after a call of 0"):
        session.commit([1])


def test_logits_come_only_when_asked_for(session: OrtSession) -> None:
    session.rewind(0)
    assert session.run(prompt_rows([1, 2, 3], 0)).logits is None
    assert session.run(prompt_rows([1, 2, 3], 0), logits=True).logits.shape == (1, session.vocab_size)
    assert session.run(prompt_rows([1, 2, 3], 0)).logits is None


def test_calls_of_a_shape_are_bound_once_and_do_not_mix(bundle: Bundle) -> None:
    """What stays bound between calls changes no result: a session that has made all kinds of calls says what a fresh one does."""
    used = OrtSession(bundle, threads=1)
    trees = [chain(4, [5, 6]), root_only(7), chain(1, [2, 3, 4, 5]), root_only(9), chain(8, [5, 6])]
    prefill(used, [1, 2, 3])
    for tree in trees * 2:
        for logits, streamed in ((True, False), (False, False), (True, True), (False, True)):
            fresh = OrtSession(bundle, threads=1)
            prefill(fresh, [1, 2, 3])
            rows = tree_rows(tree, 3, every_row(tree)[: int(streamed)])
            got, expected = used.run(rows, logits), fresh.run(rows, logits)
            np.testing.assert_array_equal(got.next_ids, expected.next_ids)
            for name in ("logits", "stream_ids", "stream_logprobs"):
                assert (getattr(got, name) is None) == (getattr(expected, name) is None)
                if getattr(got, name) is not None:
                    np.testing.assert_array_equal(getattr(got, name), getattr(expected, name))
    bound = dict(used._calls)
    assert used.run(tree_rows(trees[0], 3)).next_ids is used.run(tree_rows(trees[0], 3)).next_ids
    prefill_rows = prompt_rows(list(range(40)), 3)
    used.run(prefill_rows)
    assert used._calls == bound  # prompts have too many lengths to keep


@given(seed=st.integers(0, 10**6), policy=st.sampled_from([every_row, only_root, likeliest_last(2)]))
def test_speculation_is_plain_decoding(session: OrtSession, seed: int, policy: object) -> None:
    """The loop on the real operator: the same text and the same cache for right, wrong and no drafts."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, session.vocab_size, rng.integers(1, 20)).tolist()
    session.rewind(0)
    plain = [t for block in speculate(session, prompt, NoDrafter(), max_new_tokens=30) for t in block.tokens]
    plain_cache = cached(session)
    for drafter in (StreamDrafter((0.8, 1.0, 1.2)), Randomly([*prompt, *plain], seed=seed)):
        session.rewind(0)
        blocks = list(speculate(session, prompt, drafter, policy=policy, budget=10, max_new_tokens=30))  # type: ignore[arg-type]
        assert [t for block in blocks for t in block.tokens] == plain
        np.testing.assert_allclose(cached(session), plain_cache, atol=1e-4)


def test_without_streams(tmp_path: Path) -> None:
    session = OrtSession(write_bundle(tmp_path / "plain", streams=False), threads=1)
    assert session.num_streams == 0
    with pytest.raises(ValueError, match="without streams"):
        session.run(tree_rows(root_only(1), 0, np.array([0])))
    blocks = list(speculate(session, [1, 2, 3], StreamDrafter(), max_new_tokens=9))
    assert [len(block.tokens) for block in blocks] == [1] * 9


@pytest.mark.parametrize("links", ["weights", "graph", "both", "hard links", "folder"])
def test_linked_weights_simply_work(bundle: Bundle, tmp_path: Path, links: str) -> None:
    """ONNX Runtime refuses weights behind a link that leaves the graph's folder; users keep them so (caches of blobs)."""
    elsewhere, linked = tmp_path / "blobs", tmp_path / "linked"
    shutil.copytree(bundle.folder, elsewhere)
    if links == "folder":
        linked.symlink_to(elsewhere)
    else:
        shutil.copytree(bundle.folder, linked)
        for number, name in enumerate(["model.onnx.data", "model.onnx"][: 1 if links == "weights" else 2]):
            (linked / name).unlink()
            blob = (elsewhere / name).rename(elsewhere / f"blob{number}")
            if links == "hard links":
                os.link(blob, linked / name)
            else:
                (linked / name).symlink_to(blob)
    session = OrtSession(Bundle.load(linked), threads=1)
    logits = prefill(session, [5, 6, 7], logits=True).logits
    np.testing.assert_allclose(logits[0], dense_logits([5, 6, 7], session.vocab_size)[-1], atol=1e-4)


def make(out: Path, model_name: str = "model.onnx", vocab_size: int = 40, **changes: object) -> Bundle:
    model = changes.pop("model", None) or graph(vocab_size)
    with BundleWriter(out) as writer:
        save(model, writer.path(model_name))
        return writer.finish(changes.pop("manifest", manifest(vocab_size)))  # type: ignore[arg-type]


def test_a_graph_that_breaks_the_contract(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no input stream_rows; no output stream_ids; no output stream_logprobs.*export it again"):
        OrtSession(make(tmp_path / "a", model=graph(40, streams=False)))
    with pytest.raises(UserError, match="unexpected input stream_rows"):
        OrtSession(make(tmp_path / "b", manifest=manifest(40, streams=False)))
    with pytest.raises(UserError, match=r"output logits has size 40 in dimension 1 \(41 expected\)"):
        OrtSession(make(tmp_path / "c", manifest=manifest(41)))


def test_a_graph_that_cannot_be_loaded(bundle: Bundle, tmp_path: Path) -> None:
    model = load_model(bundle.path("model.onnx"))
    model.graph.node[0].op_type = "NoSuchOperator"
    with pytest.raises(UserError, match=r"ONNX Runtime .* cannot load it: .*NoSuchOperator"):
        OrtSession(make(tmp_path / "a", model=model))


def test_arguments_that_make_no_sense(bundle: Bundle) -> None:
    with pytest.raises(UserError, match="threads: 0"):
        OrtSession(bundle, threads=0)
    for capacity in (0, CONTEXT + 1):
        with pytest.raises(UserError, match=f"capacity: {capacity} given, 1 to {CONTEXT}"):
            OrtSession(bundle, capacity=capacity)
    assert OrtSession(bundle).threads == usable_cores()
