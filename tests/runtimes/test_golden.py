"""Traces: exact in JSON, exact when replayed, and every kind of fault is seen."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specstream.models.errors import UserError
from specstream.runtimes.bundle import Bundle
from specstream.runtimes.drafters import DraftContext, NoDrafter, StreamDrafter
from specstream.runtimes.golden import Golden, Step, Trace, _floats, record, replay
from specstream.runtimes.joined import PRIOR_WEIGHTS, JoinedDrafter
from specstream.runtimes.lookup import SuffixIndex
from specstream.runtimes.ngrams import build_ngrams
from specstream.runtimes.ort_session import OrtSession
from specstream.runtimes.sampling import Sampling
from specstream.runtimes.speculate import speculate
from specstream.runtimes.text import TextCodec
from specstream.runtimes.tree import every_row, likeliest_last

from ..tiny_packages import write_onnx_bundle
from .tiny_bundle import write_bundle

SAMPLED = Sampling(temperature=1.5, top_p=0.9, repetition_penalty=1.2, presence_penalty=0.1, seed=7)


@dataclasses.dataclass
class Recorded:
    """A bundle, its traces and a session that replays them."""

    bundle: Bundle
    session: OrtSession
    golden: Golden


def recorded(bundle: Bundle, prompts: list[str]) -> Recorded:
    manifest = bundle.manifest
    codec = TextCodec.from_bundle(bundle)
    session = OrtSession(bundle, threads=1, capacity=64)
    streams = manifest.streams
    assert streams is not None
    texts = [codec.encode(prompt) for prompt in prompts]
    ngrams = build_ngrams(texts, manifest.model.vocab_size, min_count=1)
    joined = JoinedDrafter(True, SuffixIndex(), ngrams, PRIOR_WEIGHTS, streams.calibration)
    drafters: dict[str, Any] = {"none": NoDrafter(), "streams": StreamDrafter(streams.calibration), "joined": joined}
    traces = []
    for prompt in prompts:
        for draft, drafter in drafters.items():
            for sampling in (None, SAMPLED):
                name = f"{prompt}, {draft}, {'greedy' if sampling is None else 'sampled'}"
                about: dict[str, Any] = {"name": name, "prompt": prompt, "draft": draft, "budget": 1 if draft == "none" else 6}
                traces.append(record(session, codec, drafter, **about, max_new_tokens=12, sampling=sampling, policy=likeliest_last(2)))
    golden = Golden(
        contract=1,
        placement=streams.placement,
        num_streams=streams.num_streams,
        stream_layers=streams.stream_layers,
        top_k=streams.top_k,
        temperatures=streams.calibration,
        weights=PRIOR_WEIGHTS,
        num_layers=manifest.model.num_layers,
        num_kv_heads=manifest.model.num_kv_heads,
        head_dim=manifest.model.head_dim,
        hidden_size=manifest.model.hidden_size,
        vocab_size=manifest.model.vocab_size,
        capacity=64,
        prompt_chunk=256,
        max_tree_rows=64,
        max_stream_rows=64,
        near_tie=1e-3,
        pad_single=False,
        stop_ids=tuple(sorted(codec.stop_ids)),
        bos_id=None,
        scheme="fp32",
        recorded_on={"machine": "here"},
        traces=tuple(traces),
    )
    return Recorded(bundle, session, golden)


@pytest.fixture(scope="module", params=["fused", "delayed"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "fused":
        return recorded(write_bundle(folder / "bundle"), ["the cat", "on the mat 東"])
    return recorded(write_onnx_bundle(folder / "bundle"), ["w5 w9 w11 w30", "w60 w7 w8 w60 w7"])


def some_step(golden: Golden, draft: str = "streams") -> tuple[int, int, Step]:
    """Numbers of a trace and a step in which a draft was accepted and another was not."""
    for number, trace in enumerate(golden.traces):
        for at, step in enumerate(trace.steps):
            if trace.draft == draft and trace.sampling is None and len(step.tokens) > max(1, len(step.accepted)):
                return number, at, step
    raise AssertionError("no such step")


def changed(golden: Golden, number: int, at: int, **fields: Any) -> Trace:
    trace = golden.traces[number]
    steps = list(trace.steps)
    steps[at] = dataclasses.replace(steps[at], **fields)
    return dataclasses.replace(trace, steps=tuple(steps))


def test_json_is_exact(made: Recorded) -> None:
    text = made.golden.to_json()
    assert Golden.from_json(text) == made.golden
    assert Golden.from_json(text).to_json() == text
    assert "NaN" not in text
    assert "Infinity" not in text
    # A line for each step, so that two files can be compared by eye.
    assert max(len(trace.steps) for trace in made.golden.traces) < text.count("\n")
    assert json.loads(text)["traces"][0]["token_ids"] == list(made.golden.traces[0].token_ids)


def test_numbers_are_short_and_exact() -> None:
    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32) * 10.0 ** np.arange(-5, 5).repeat(100).astype(np.float32)
    assert (np.array(_floats(values), dtype=np.float32) == values).all()
    assert json.dumps(_floats(np.float32([0.1]))) == "[0.1]"


def test_a_replay_repeats_everything(made: Recorded) -> None:
    for trace in made.golden.traces:
        assert replay(made.session, made.golden, trace, tolerance=0.0) == []


def test_the_trace_is_that_of_the_loop(made: Recorded) -> None:
    """Recording changes nothing, and what it says adds up."""
    codec = TextCodec.from_bundle(made.bundle)
    for trace in made.golden.traces:
        made.session.rewind(0)
        blocks = list(
            speculate(
                made.session, trace.prompt_ids, NoDrafter(), max_new_tokens=12, stop_ids=codec.stop_ids, budget=1, sampling=trace.sampling
            )
        )
        assert trace.token_ids == tuple(token for block in blocks for token in block.tokens)
        assert trace.finish_reason == blocks[-1].finish_reason
        assert sum(trace.prefill.chunks) == len(trace.prompt_ids) == trace.prefill.length
        assert trace.prefill.emitted + sum((step.emitted for step in trace.steps), ()) == trace.token_ids
        assert trace.prefill.text + "".join(step.text for step in trace.steps) + trace.rest == trace.text == codec.decode(trace.token_ids)
        length = trace.prefill.length
        for step in trace.steps:
            assert step.past == length
            length += len(step.accepted)
            assert step.length == length
            assert len(step.emitted) == len(step.accepted)
            assert len(step.tokens) == len(step.next_ids) == len(step.margins) == len(step.logprob) <= step.budget
            assert all(margin >= 0 for margin in step.margins)
            assert (step.choice_margins is None) == (trace.sampling is None)
            assert (step.sources is None) == (trace.draft != "joined" or step.budget == 1)


def test_trees_of_streams_follow_from_what_is_recorded(made: Recorded) -> None:
    """A reader needs no model to check its drafting."""
    seen = 0
    for trace in made.golden.traces:
        if trace.draft != "streams":
            continue
        text = [*trace.prompt_ids, *trace.prefill.emitted]
        latest = trace.prefill.streams[-1] if trace.prefill.streams else None
        for step in trace.steps:
            context = DraftContext(text, None if latest is None else latest.streams(), step.budget, step.max_depth)
            tree = StreamDrafter(made.golden.temperatures).propose(context)
            assert tuple(tree.tokens.tolist()) == step.tokens
            assert tuple(tree.parents.tolist()) == step.parents
            np.testing.assert_array_equal(tree.logprob, np.array(step.logprob, dtype=np.float32))
            text += step.emitted
            kept = [out for out in step.streams if out.row is None or out.row in step.accepted]
            latest = kept[-1] if kept else (None if made.golden.placement == "delayed" else latest)
            seen += len(step.tokens) > 1
    assert seen > 5


def test_other_weights_are_seen(made: Recorded, tmp_path: Path) -> None:
    if made.golden.placement == "fused":
        other = OrtSession(write_bundle(tmp_path / "other", seed=1), threads=1, capacity=64)
    else:
        other = OrtSession(write_onnx_bundle(tmp_path / "other", "Mistral"), threads=1, capacity=64)
    differences = [d for trace in made.golden.traces for d in replay(other, made.golden, trace)]
    assert {"next_ids", "emitted", "stream ids", "stream log-probabilities"} <= {d.what for d in differences}


def test_another_choice_is_seen_with_its_margin(made: Recorded) -> None:
    number, at, step = some_step(made.golden)
    wrong = ((step.next_ids[0] + 1) % made.golden.vocab_size, *step.next_ids[1:])
    differences = replay(made.session, made.golden, changed(made.golden, number, at, next_ids=wrong))
    assert [(d.step, d.what, d.margin) for d in differences] == [(at, "next_ids", step.margins[0])]
    assert f"step {at}: next_ids is" in str(differences[0])


def test_a_wrong_mask_is_seen(made: Recorded) -> None:
    number, at, step = some_step(made.golden, "joined")
    parents = (-1, *[0] * (len(step.parents) - 1))
    if parents == step.parents:
        pytest.skip("the tree has one level")
    differences = replay(made.session, made.golden, changed(made.golden, number, at, parents=parents))
    assert {"positions"} <= {d.what for d in differences}


def test_a_wrong_commit_is_seen(made: Recorded) -> None:
    """Rows that were not accepted are committed in place of those that were: later calls see another past."""
    number, at, step = some_step(made.golden)
    outside = next(row for row in range(1, len(step.tokens)) if row not in step.accepted)
    rows = (0, outside)
    fields: dict[str, Any] = {"accepted": rows, "emitted": tuple(step.next_ids[row] for row in rows), "length": step.past + 2}
    differences = replay(made.session, made.golden, changed(made.golden, number, at, **fields))
    assert "accepted" in {d.what for d in differences if d.step == at}


def test_streams_that_changed_are_seen(made: Recorded) -> None:
    number, at, step = next((n, a, s) for n, t in enumerate(made.golden.traces) for a, s in enumerate(t.steps) if s.streams)
    out = step.streams[0]
    moved = dataclasses.replace(out, logprobs=((out.logprobs[0][0] - 0.01, *out.logprobs[0][1:]), *out.logprobs[1:]))
    trace = changed(made.golden, number, at, streams=(moved, *step.streams[1:]))
    assert [d.what for d in replay(made.session, made.golden, trace)] == ["stream log-probabilities"]
    assert replay(made.session, made.golden, trace, tolerance=0.02) == []
    other = dataclasses.replace(out, ids=((out.ids[0][1], out.ids[0][0], *out.ids[0][2:]), *out.ids[1:]))
    trace = changed(made.golden, number, at, streams=(other, *step.streams[1:]))
    assert [d.what for d in replay(made.session, made.golden, trace)] == ["stream ids"]


def test_a_short_cache_is_traced_to_its_end(made: Recorded) -> None:
    """Near the capacity there is no room for drafts, then none for rows: the text ends by length."""
    codec = TextCodec.from_bundle(made.bundle)
    prompt = made.golden.traces[0].prompt
    rows = len(codec.encode(prompt)) + 4
    session = OrtSession(made.bundle, threads=1, capacity=rows)
    drafter = StreamDrafter(made.golden.temperatures)
    trace = record(session, codec, drafter, name="short", prompt=prompt, draft="streams", budget=6, max_new_tokens=30, policy=every_row)
    assert trace.finish_reason in ("length", "stop")
    assert trace.finish_reason == "stop" or trace.steps[-1].length == rows
    assert replay(session, dataclasses.replace(made.golden, capacity=rows), trace, tolerance=0.0) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "not traces of format 1"),
        ('{"format": 2}', "found 2"),
        ('{"format": 1, "surprise": 1}', "unknown key surprise"),
    ],
)
def test_bad_files_are_one_line(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        Golden.from_json(text)
    assert "\n" not in str(caught.value)
