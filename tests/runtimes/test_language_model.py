from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specstream.models.errors import UserError
from specstream.runtimes import GenerationResult, LanguageModel, Sampling, load
from specstream.runtimes.drafters import DraftContext, NoDrafter
from specstream.runtimes.language_model import Budget, Draft, stream_policy
from specstream.runtimes.ort_session import OrtSession
from specstream.runtimes.session import Rows, StepOutput
from specstream.runtimes.tree import TokenTree, chain

from .tiny_bundle import CONTEXT, write_bundle


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("lm") / "bundle").folder


@pytest.fixture(scope="module")
def lm(folder: Path) -> LanguageModel:
    return load(folder, threads=1)


@given(prompt=st.text(min_size=1, max_size=20), rows=st.sampled_from([1, 3, "all", "root"]), budget=st.integers(1, 12))
def test_any_draft_gives_the_same_text(lm: LanguageModel, prompt: str, rows: int | str, budget: int) -> None:
    count = min(20, CONTEXT)
    if not 0 < len(lm.codec.tokenizer.encode(f"<|user|>{prompt}\n<|assistant|>").ids) <= CONTEXT:
        return
    plain = lm.generate(prompt, count, draft="none")
    for draft in ("auto", "streams"):
        result = lm.generate(prompt, count, draft=draft, budget=budget, stream_rows=rows)
        assert (result.text, result.token_ids, result.finish_reason) == (plain.text, plain.token_ids, plain.finish_reason)
    pieces = list(lm.stream(prompt, count, budget=budget, stream_rows=rows))
    assert all(pieces)
    assert lm.last is not None
    assert "".join(pieces) == lm.last.text == plain.text


@pytest.mark.parametrize(
    ("budget", "draft", "padded"), [("adaptive", "auto", False), ("adaptive", "lookup", False), (8, "auto", True), (8, "none", False)]
)
def test_single_rows_are_padded_with_a_fixed_budget(
    folder: Path, budget: Budget, draft: Draft, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where activations are rounded. The adaptive budget comes down to plain decoding, at its speed."""
    lm = load(folder, threads=1)
    assert isinstance(lm.session, OrtSession)
    rows = []
    run = OrtSession._run

    def watched(session: OrtSession, given: Rows, logits: bool) -> StepOutput:
        rows.append(len(given.input_ids))
        return run(session, given, logits)

    monkeypatch.setattr(OrtSession, "_run", watched)
    prompt = lm.prompt_ids("hi")
    for rounded in (False, True):
        scheme = "w8a8" if rounded else "fp32"
        lm.manifest = dataclasses.replace(lm.manifest, quantization=dataclasses.replace(lm.manifest.quantization, scheme=scheme))
        rows.clear()
        nothing = NoDrafter() if draft == "none" else Right([])
        lm.generate(prompt, 8, draft=nothing, budget=budget)  # what a call is padded to when nothing is drafted
        assert set(rows[1:]) == {2 if rounded and padded else 1}
        assert lm.session.pad_single == (rounded and padded)
        lm.generate(prompt, 8, draft=draft, budget=budget)
        assert lm.session.pad_single == (rounded and padded)


class Right:
    """Knows the text."""

    uses_streams = False

    def __init__(self, truth: list[int]) -> None:
        self.truth = truth

    def propose(self, context: DraftContext) -> TokenTree:
        at = len(context.tokens)
        return chain(context.root, self.truth[at : at + min(context.budget - 1, context.max_depth)])


def test_statistics(lm: LanguageModel) -> None:
    prompt = lm.prompt_ids("hi")
    plain = lm.generate(prompt, 13, draft="none")
    assert (plain.tokens, plain.calls, plain.tokens_per_call, plain.drafted, plain.accepted) == (13, 12, 1.0, 0, 0)
    result = lm.generate(prompt, 13, draft=Right([*prompt, *plain.token_ids]), budget=4)
    assert result.token_ids == plain.token_ids
    assert (result.tokens, result.calls, result.tokens_per_call, result.drafted, result.accepted, result.dropped) == (13, 3, 4.0, 9, 9, 0)
    assert result.tokens_per_second is not None
    assert result.tokens_per_second > 0
    assert result.first_token_seconds > 0
    one = lm.generate(prompt, 1)
    assert (one.tokens, one.calls, one.tokens_per_call, one.tokens_per_second, one.finish_reason) == (1, 0, None, None, "length")


def test_json_keys_are_those_of_the_design(lm: LanguageModel) -> None:
    report = lm.generate("hi", 3).to_json()
    assert json.loads(json.dumps(report)) == report
    assert list(report) == [
        "text",
        "token_ids",
        "finish_reason",
        "tokens",
        "calls",
        "tokens_per_call",
        "tokens_per_second",
        "first_token_seconds",
        "drafted",
        "accepted",
        "dropped",
        "sampling",
    ]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(seed=1),
        Sampling(0.4, seed=2),
        Sampling(1.5, top_k=20, seed=3),
        Sampling(0.8, top_p=0.9, min_p=0.01, seed=4),
        Sampling(0.7, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2, seed=5),
        Sampling(0.0, frequency_penalty=0.7),
    ],
    ids=str,
)
def test_sampled_text_is_the_same_with_any_draft(lm: LanguageModel, sampling: Sampling) -> None:
    prompt = lm.prompt_ids("the cat")
    plain = lm.generate(prompt, 30, draft="none", sampling=sampling)
    assert plain.sampling == sampling
    assert plain.token_ids != lm.generate(prompt, 30, draft="none").token_ids
    accepted = 0
    for draft in ("auto", "streams", "lookup", Right([*prompt, *plain.token_ids])):
        for budget in (3, 9):
            result = lm.generate(prompt, 30, draft=draft, budget=budget, sampling=sampling)  # type: ignore[arg-type]
            assert (result.token_ids, result.text, result.finish_reason) == (plain.token_ids, plain.text, plain.finish_reason)
            accepted += result.accepted
    assert accepted >= 2 * (plain.tokens - 1) // 2
    pieces = list(lm.stream(prompt, 30, sampling=sampling))
    assert "".join(pieces) == plain.text


def test_seeds_make_texts_differ(lm: LanguageModel) -> None:
    texts = {lm.generate("the cat", 12, sampling=Sampling(seed=seed)).token_ids for seed in range(8)}
    assert len(texts) == 8


def test_settings_in_the_report(lm: LanguageModel) -> None:
    sampling = Sampling(0.9, top_k=7, seed=11)
    report = json.loads(json.dumps(lm.generate("hi", 3, sampling=sampling).to_json()))
    assert Sampling.from_json(report["sampling"]) == sampling
    greedy = lm.generate("hi", 3, sampling=Sampling(0.0, top_k=7))
    assert greedy.sampling is None
    assert greedy.token_ids == lm.generate("hi", 3).token_ids


def test_three_forms_of_a_prompt(lm: LanguageModel) -> None:
    text = lm.generate("hi", 5).token_ids
    assert lm.generate([{"role": "user", "content": "hi"}], 5).token_ids == text
    assert lm.generate(lm.codec.encode("hi"), 5).token_ids == text
    assert lm.generate("<|user|>hi\n<|assistant|>", 5, raw=True).token_ids == text
    assert lm.generate("hi", 5, raw=True).token_ids != text
    with pytest.raises(UserError, match="mixes"):
        lm.generate([1, {"role": "user", "content": "hi"}])  # type: ignore[list-item]


def test_a_stop_token_ends_the_text_and_is_not_in_it(lm: LanguageModel) -> None:
    prompt = lm.prompt_ids("hi")
    plain = lm.generate(prompt, 12, draft="none")
    stop = plain.token_ids[7]
    end = plain.token_ids.index(stop)
    stops, lm.codec.stop_ids = lm.codec.stop_ids, frozenset({stop})
    lm.codec._skipped |= {stop}
    try:
        for draft in ("none", "streams", Right([*prompt, *plain.token_ids])):
            result = lm.generate(prompt, 12, draft=draft)  # type: ignore[arg-type]
            assert result.token_ids == plain.token_ids[: end + 1]
            assert result.finish_reason == "stop"
            assert result.text == lm.codec.decode(plain.token_ids[:end])
    finally:
        lm.codec.stop_ids = stops
        lm.codec._skipped -= {stop}


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", {}, "prompt is empty"),
        ([], {}, "empty"),
        ([1] * (CONTEXT + 1), {}, f"the prompt has {CONTEXT + 1} tokens, the context holds {CONTEXT}"),
        ([10**6], {}, "vocabulary"),
        ("hi", {"max_new_tokens": 0}, "max_new_tokens"),
        ("hi", {"draft": "magic"}, "'magic' is unknown"),
        ("hi", {"budget": 0}, "budget"),
        ("hi", {"stream_rows": 0}, "stream_rows"),
        ("hi", {"stream_rows": "some"}, "stream_rows"),
    ],
)
def test_bad_requests_are_refused_at_once(lm: LanguageModel, prompt: object, options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        lm.stream(prompt, **options)  # type: ignore[arg-type]


def test_the_context_is_a_limit(lm: LanguageModel) -> None:
    for length, tokens in ((CONTEXT - 3, 4), (CONTEXT, 1)):
        result = lm.generate([1] * length, 100)
        assert (result.tokens, result.finish_reason) == (tokens, "length")


def test_an_abandoned_stream_does_no_harm(lm: LanguageModel) -> None:
    whole = lm.generate("hi", 10)
    stream = lm.stream("something else", 10)
    next(stream)
    stream.close()
    assert lm.last is None
    again = lm.generate("hi", 10)
    assert isinstance(again, GenerationResult)
    assert again.token_ids == whole.token_ids


def test_a_bundle_without_streams(tmp_path: Path) -> None:
    lm = load(write_bundle(tmp_path / "plain", streams=False).folder, threads=1)
    assert lm.generate("hi", 5).token_ids == lm.generate("hi", 5, draft="none").token_ids
    with pytest.raises(UserError, match="has no streams"):
        lm.generate("hi", 5, draft="streams")


def test_a_bundle_without_its_tokenizer(tmp_path: Path) -> None:
    from specstream.runtimes.bundle import BundleWriter

    bundle = write_bundle(tmp_path / "whole")
    for name, content, message in (
        ("missing", None, r"has no file 'tokenizer\.json'"),
        ("broken", "{}", r"tokenizers cannot read it"),
    ):
        with BundleWriter(tmp_path / name) as writer:
            for entry in bundle.manifest.files:
                if entry.path != "tokenizer.json":
                    writer.path(entry.path).write_bytes(bundle.path(entry.path).read_bytes())
            if content is not None:
                writer.path("tokenizer.json").write_text(content)
            writer.finish(bundle.manifest)
        with pytest.raises(UserError, match=message):
            load(tmp_path / name)


def test_policies_by_name() -> None:
    tree = chain(1, [2, 3, 4], [-0.1, -5.0, -0.1])
    assert stream_policy("all")(tree).tolist() == [0, 1, 2, 3]
    assert stream_policy("root")(tree).tolist() == [0]
    assert stream_policy(2)(tree).tolist() == [0, 1]


def test_a_device_needs_neither_torch_nor_transformers(folder: Path) -> None:
    """Importing, loading and generating in a process of its own."""
    script = """
import sys
import specstream.runtimes.verify
from specstream.runtimes import load
print(load(sys.argv[1], threads=1).generate("hi", 4).tokens)
heavy = {"torch", "transformers", "onnx", "optimum", "onnxscript", "accelerate", "safetensors"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", script, str(folder)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "4"
