"""The runner of benchmarks/peers with workers that invent their tokens: turns, figures, and what happens to one that fails."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from specstream.toolchain.bench_pipeline import Task

HERE = Path(__file__).parent


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"peers_{name}", HERE.parents[1] / "benchmarks" / "peers" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def runner() -> ModuleType:
    return script("run")


@pytest.fixture(autouse=True)
def no_pauses(runner: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(runner, "IDLE_SECONDS", 0.1)


def test_everyone_gets_every_prompt_and_a_failing_worker_keeps_its_line(runner: ModuleType, tmp_path: Path) -> None:
    def variant(draft: str, ours: bool = False) -> object:
        command = [sys.executable, str(HERE / "fake_worker.py"), "model", "--threads", "1", "--draft", draft]
        return runner.Variant("fake", "fp32", draft, ours, command)

    drafts = ("none", "slow", "other", "broken", "silent", "unknown")
    variants = [variant(draft, ours=draft == "none") for draft in drafts]
    missing = runner.Variant("missing", "int4", "none", False, reason="not installed: no such thing")
    prompts = [[1, 5], [1, 7], [13, 2]]
    try:
        for i, each in enumerate(variants):
            each.start(tmp_path / f"{i}.log")
        runner.race([*variants, missing], [("task", prompts)], [[1, 2, 3]], 6, [9], lambda _text: None)
    finally:
        for each in variants:
            each.stop()
    assert all(each.process.returncode is not None for each in variants)
    decode = lambda ids: " ".join(map(str, ids))  # noqa: E731
    task = Task("task", ("a", "b", "c"), ("6 7 8 9", "8 9", None))
    lines = {line.draft: line for line in runner.summarise(task, variants, variants[0], decode)}
    plain, slow, other = lines["none"], lines["slow"], lines["other"]
    assert (plain.prompts, plain.tokens, plain.reason) == (3, 4 + 2 + 6, None)
    assert plain.same_text == slow.same_text == 1.0
    assert (plain.exact_match, other.exact_match) == (1.0, 0.0)
    assert other.same_text == 0.0
    assert plain.ours_over_this == 1.0
    assert slow.ours_over_this == pytest.approx(plain.tokens_per_second / slow.tokens_per_second)
    assert plain.long_prompt_first_token_seconds > 0
    assert plain.versions == {"numpy": np.__version__}
    assert "RuntimeError: cannot" in lines["broken"].reason
    assert "the worker ended" in lines["silent"].reason
    assert "ValueError: no such draft (" in lines["unknown"].reason
    lines["missing"] = runner.summarise(task, [variants[0], missing], variants[0], decode)[1]
    text = runner.markdown(list(lines.values()), 1, "ours", 512)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({row.count("|") for row in rows}) == 1
    assert len(rows) == 2 + 7
    assert "not installed: no such thing" in text


def test_what_cannot_be_made_says_why_and_is_made_once(runner: ModuleType, tmp_path: Path) -> None:
    said: list[str] = []
    place = runner.Workplace(tmp_path, None, said.append)
    peer = runner.PEERS[0]
    weights = tmp_path / "weights"
    good = runner.Build("good", ("{python}", "-c", "import sys; open(sys.argv[1] + '/x', 'w')", "{out}"))
    out = place.build(peer, good, weights, tmp_path)
    assert [path.name for path in out.iterdir()] == ["x"]
    assert place.build(peer, good, weights, tmp_path) == out
    assert len(said) == 1
    bad = runner.Build("bad", ("{python}", "-c", "raise SystemExit('no memory for this')"))
    with pytest.raises(runner.NotThere, match="no memory for this"):
        place.build(peer, bad, weights, tmp_path)
    with pytest.raises(runner.NotThere, match="no-such-program"):
        place.build(peer, runner.Build("absent", ("no-such-program",)), weights, tmp_path)


def test_long_prompts_share_no_beginning(runner: ModuleType) -> None:
    made = runner._long_prompts([[1, 2, 3], [4, 5]], 7)
    assert [len(ids) for ids in made] == [7] * runner.LONG_PROMPTS
    assert made[0] == [1, 2, 3, 4, 5, 1, 2]
    assert made[1][:3] == [3, 4, 5]
    assert runner._long_prompts([[1]], 0) == []


def test_queries_and_keys_are_laid_out_for_the_other_rotary_embedding() -> None:
    """A rotation of pairs (2i, 2i + 1) after `interleave` is the rotation of pairs (i, i + d/2) before it."""
    interleave = script("gguf_export").interleave
    rng = np.random.default_rng(0)
    heads, size = 3, 8
    x, y = rng.standard_normal(5), rng.standard_normal(5)
    q, k = (rng.standard_normal((heads * size, 5)).astype(np.float32) for _ in range(2))
    angles = 7 * 0.3 ** np.arange(size // 2)

    def halves(states: np.ndarray) -> np.ndarray:
        a, b = states.reshape(heads, 2, -1).swapaxes(0, 1)
        return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], axis=1)

    def pairs(states: np.ndarray) -> np.ndarray:
        a, b = np.moveaxis(states.reshape(heads, -1, 2), 2, 0)
        return np.stack([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], axis=2).reshape(heads, -1)

    expected = (halves(q @ x) * (k @ y).reshape(heads, -1)).sum(axis=1)
    found = (pairs(interleave(q, heads) @ x) * (interleave(k, heads) @ y).reshape(heads, -1)).sum(axis=1)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
