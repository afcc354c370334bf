"""Delayed placement: main graph and the streams' own graph compute what the dense network computes, on one cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from specstream.export import contract
from specstream.export.parity import Graph, check, make_calls, run_reference, write_reference
from specstream.export.trace import GRAPH_FILE, STREAMS_FILE, export_graph, export_streams
from specstream.models.attention import DenseCache
from specstream.models.stream_model import StreamModel

from .tiny import VOCAB, tiny_model

PROMPT = [5, 9, 11, 3, 60, 7, 8, 30, 2, 44, 19]


def written(architecture: str, profile: contract.Profile, folder: Path) -> tuple[Path, Path, Path]:
    model = tiny_model(architecture, delayed=True)
    write_reference(model, PROMPT, folder / "reference.npz")
    export_graph(model, folder, profile)
    export_streams(model, folder, profile)
    return folder / GRAPH_FILE, folder / STREAMS_FILE, folder / "reference.npz"


@pytest.mark.parametrize(
    ("architecture", "profile"),
    [("Llama", "ort"), ("Qwen2", "ort"), ("Qwen3", "ort"), ("Gemma3", "ort"), ("Llama", "portable"), ("Gemma3", "portable")],
)
def test_both_graphs_equal_the_network(architecture: str, profile: contract.Profile, tmp_path: Path) -> None:
    graph, streams, reference = written(architecture, profile, tmp_path)
    result = check(graph, reference, streams)
    assert result["ok"], result
    drafted = [case for case in result["cases"].values() if case["stream_max_abs_diff"] is not None]
    assert len(drafted) == 4  # after every call that commits rows


def test_another_root_changes_the_streams(tmp_path: Path) -> None:
    graph, streams, _ = written("Llama", "ort", tmp_path)
    runner = Graph(graph, 64, streams)
    call = make_calls(PROMPT, VOCAB, False)[0]
    found = runner.run(call.inputs)
    runner.commit(call.commit)
    entry = found[contract.ENTRY_STATES][-1:]
    one, other, again = (runner.draft(entry, token) for token in (4, 5, 4))
    assert np.abs(one[contract.STREAM_LOGPROBS] - other[contract.STREAM_LOGPROBS]).max() > 1e-3
    np.testing.assert_array_equal(one[contract.STREAM_LOGPROBS], again[contract.STREAM_LOGPROBS])
    assert one[contract.STREAM_PAIRS].shape == (1, 3, 4, 4)
    assert not one[contract.STREAM_PAIRS][0, 0].any()
    assert one[contract.STREAM_PAIRS][0, 1:].any()


def test_a_wrong_streams_graph_is_caught(tmp_path: Path) -> None:
    graph, _, reference = written("Llama", "ort", tmp_path)
    (tmp_path / "other").mkdir()
    model = tiny_model("Llama", delayed=True)
    with torch.no_grad():
        model.stream_vectors[0] += 0.5
    export_streams(model, tmp_path / "other", "ort")
    assert not check(graph, reference, tmp_path / "other" / STREAMS_FILE)["ok"]


def test_delayed_streams_are_those_of_training() -> None:
    """One draft after a prompt gives what the training pass gives beside the same row."""
    model: StreamModel = tiny_model("Llama", delayed=True)
    ids, token = torch.tensor([PROMPT]), torch.tensor([[17]])
    with torch.no_grad():
        main = model.main_pass(ids)
        anchors = torch.tensor([[len(PROMPT) - 1]])
        expected = torch.log_softmax(model.draft_head(model.stream_pass(main, anchors, token))[0, 0], dim=-1)
        cache = DenseCache(model.num_layers)
        rows = torch.arange(len(PROMPT))
        step = model(ids, rows[None], torch.ones(len(PROMPT), len(PROMPT), dtype=torch.bool).tril(), rows[-1:], None, cache)
        cache.commit(rows.tolist())
        assert step.entry is not None
        draft = model.draft(step.entry[-1:], token[0], torch.tensor([cache.length]), cache)
    best = expected.topk(4, dim=-1)
    torch.testing.assert_close(draft.stream_logprobs[0], best.values, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(draft.stream_ids[0], best.indices)


def test_the_reference_keeps_the_calls() -> None:
    calls, outputs = run_reference(tiny_model("Llama", delayed=True), make_calls(PROMPT, VOCAB, False))
    assert [call.root_id is not None for call in calls] == [bool(call.commit) for call in calls]
    assert all((contract.STREAM_IDS in out) == (call.root_id is not None) for call, out in zip(calls, outputs, strict=True))
