from __future__ import annotations

import json
import math
import re
import shutil
import struct
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specstream.models.errors import UserError
from specstream.runtimes.sampling import (
    NO_HISTORY,
    History,
    Sampling,
    exponential,
    gumbel,
    gumbel_noise,
    logarithm,
    philox4x32,
    pick,
    random_bits,
    random_seed,
    scale,
    scores,
    smallest_allowed,
    uniform,
)

PAGE = (Path(__file__).parents[2] / "docs" / "sampling.md").read_text(encoding="utf-8")
SEEDS = (0, 1, 2, 2**64 - 1)


def scalar() -> SimpleNamespace:
    """The code of the documentation: one number at a time, in pure Python."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    return SimpleNamespace(**names)


SCALAR = scalar()


def table(first_heading: str) -> list[list[str]]:
    """Cells of the rows of the documentation's table that begins with this heading."""
    lines = PAGE.split("\n")
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first_heading} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().strip("`") for cell in line.strip("|").split("|")])
    assert rows
    return rows


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


# Random words and noise


def test_philox_gives_the_published_answers() -> None:
    """Random123, kat_vectors, the three lines of philox4x32 with 10 rounds."""
    known = (
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    )
    assert [tuple(row) for row in table("counter")] == list(known)
    for counter, (k0, k1), answer in ((words(c), words(k), words(a)) for c, k, a in known):
        assert philox4x32(np.array(counter, dtype=np.uint32), (k0, k1)).tolist() == answer
        assert list(SCALAR.philox(counter, (k0, k1))) == answer
    together = philox4x32(np.array([words(c) for c, k, _ in known if k == known[0][1]], dtype=np.uint32), (0, 0))
    assert together.tolist() == [words(known[0][2])]


def test_noise_of_the_documentation() -> None:
    for seed, position, token, bits, noise, double in table("seed"):
        ids = np.array([int(token)])
        assert f"{random_bits(int(seed), int(position), ids)[0]:08x}" == bits
        (found,) = gumbel_noise(int(seed), int(position), ids)
        assert struct.pack(">d", found).hex() == double
        assert repr(float(found)) == noise
        assert SCALAR.noise(int(seed), int(position), int(token)) == found


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.lists(st.integers(0, 2**20), max_size=20))
def test_noise_belongs_to_a_token_not_to_its_neighbours(seed: int, position: int, ids: list[int]) -> None:
    noise = gumbel_noise(seed, position, np.array(ids, dtype=np.int64))
    assert noise.tolist() == [SCALAR.noise(seed, position, token) for token in ids]


def test_noise_changes_with_seed_position_and_token() -> None:
    ids = np.arange(1000)
    kinds = [gumbel_noise(*key, ids) for key in ((0, 0), (1, 0), (2**32, 0), (0, 1), (1, 1))]
    for i, one in enumerate(kinds):
        assert len(set(one.tolist())) == len(ids)
        for other in kinds[:i]:
            assert abs(np.corrcoef(one, other)[0, 1]) < 0.12


def test_noise_is_a_gumbel_variable() -> None:
    noise = np.sort(gumbel_noise(3, 17, np.arange(200_000)))
    expected = np.exp(-np.exp(-noise))
    empirical = (np.arange(len(noise)) + 0.5) / len(noise)
    assert np.abs(expected - empirical).max() < 1.63 / math.sqrt(len(noise))  # Kolmogorov-Smirnov at 1%


def test_the_ends_of_noise_are_finite() -> None:
    ends = np.array([0, 2**32 - 1], dtype=np.uint32)
    assert uniform(ends).tolist() == [2**-33, 1 - 2**-33]
    assert gumbel(ends).tolist() == pytest.approx([-math.log(33 * math.log(2)), 33 * math.log(2)], rel=1e-9)


@given(st.floats(min_value=1e-300, max_value=1e300))
def test_logarithm(x: float) -> None:
    found = float(logarithm(np.array(x)))
    assert found == SCALAR.log(x)
    assert found == pytest.approx(math.log(x), rel=4e-16, abs=1e-18)


@given(st.floats(min_value=-720, max_value=0))
def test_exponential(x: float) -> None:
    found = float(exponential(np.array(x)))
    assert found == SCALAR.exp(x)
    assert found == (pytest.approx(math.exp(x), rel=2e-13) if x >= -700 else 0)
    assert float(exponential(np.array(-math.inf))) == 0


# The choice

settings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1e-4, 0.3, 0.7, 1.0, 2.5, 100.0]),
    top_k=st.integers(0, 40),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 1)),
    min_p=st.one_of(st.just(0.0), st.floats(0, 1)),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.2]),
    presence_penalty=st.sampled_from([0.0, 0.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -1.5]),
    seed=st.integers(0, 2**64 - 1),
)
tokens = st.lists(st.integers(0, 39), max_size=8)


@st.composite
def some_logits(draw: st.DrawFn) -> np.ndarray:
    """Flat, peaked, with many equal ones, with impossible ones."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    logits = rng.standard_normal(draw(st.integers(40, 300))) * draw(st.sampled_from([0.0, 1.0, 4.0, 30.0]))
    if draw(st.booleans()):
        logits = np.round(logits)
    if draw(st.booleans()):
        logits[rng.random(len(logits)) < 0.5] = -np.inf
        logits[draw(st.integers(0, 39))] = 1.0
    return logits.astype(np.float32)


@given(some_logits(), st.integers(0, 2**31), tokens, tokens, settings)
def test_the_choice_is_that_of_the_documentation(
    logits: np.ndarray, position: int, prompt: list[int], generated: list[int], sampling: Sampling
) -> None:
    history = History(prompt, generated)
    chosen = pick(logits, position, history, sampling)
    assert chosen == SCALAR.sample(logits.tolist(), position, prompt, generated, sampling)
    assert chosen == int(scores(logits, position, history, sampling).argmax())


SETTINGS_TABLE = "settings (others as by default: temperature 1, no filter, no penalty)"


def doc_cases() -> list[tuple[dict[str, float], list[int]]]:
    cases = []
    for named, answer in table(SETTINGS_TABLE):
        pairs = [] if named == "none" else [part.split(" ") for part in named.split(", ")]
        cases.append(({key: json.loads(value) for key, value in pairs}, [int(token) for token in answer.split(", ")]))
    return cases


@pytest.mark.parametrize(("options", "answers"), doc_cases(), ids=[row[0] for row in table(SETTINGS_TABLE)])
def test_tokens_of_the_documentation(options: dict[str, float], answers: list[int]) -> None:
    logits = [((7919 * i) % 1024) / 64 - 8 for i in range(1000)]
    prompt, generated = [3, 1, 4], [1, 5, 9, 2, 6, 5]
    for seed, answer in zip(SEEDS, answers, strict=True):
        sampling = Sampling(**options, seed=seed)  # type: ignore[arg-type]
        assert pick(np.array(logits, dtype=np.float32), 9, History(prompt, generated), sampling) == answer
        assert SCALAR.sample(logits, 9, prompt, generated, sampling) == answer


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
def test_javascript_agrees_bit_for_bit() -> None:
    rng = np.random.default_rng(5)
    cases: list[dict[str, Any]] = []
    expected: list[float] = []
    for _ in range(300):
        seed, position, token = int(rng.integers(2**63)) * 2 + 1, int(rng.integers(2**32)), int(rng.integers(2**20))
        cases.append({"seed": str(seed), "position": position, "token": token})
        expected.append(float(gumbel_noise(seed, position, np.array([token]))[0]))
    for i in range(60):
        sampling = Sampling(
            temperature=float(rng.choice([0.0, 0.4, 1.0, 3.0])),
            top_k=int(rng.choice([0, 20])),
            top_p=float(rng.choice([1.0, 0.8])),
            min_p=float(rng.choice([0.0, 0.05])),
            repetition_penalty=float(rng.choice([1.0, 1.3])),
            presence_penalty=float(rng.choice([0.0, 0.5])),
            frequency_penalty=float(rng.choice([0.0, 0.3])),
            seed=int(rng.integers(2**63)),
        )
        logits = (rng.standard_normal(200) * 3).astype(np.float32)
        prompt, generated = rng.integers(0, 200, 30).tolist(), rng.integers(0, 200, 20).tolist()
        request = {"logits": logits.tolist(), "position": 50 + i, "prompt": prompt, "generated": generated}
        cases.append(request | {"sampling": sampling.to_json() | {"seed": str(sampling.seed)}})
        expected.append(pick(logits, 50 + i, History(prompt, generated), sampling))
    script = Path(__file__).parent / "sampling.mjs"
    done = subprocess.run(["node", str(script)], input=json.dumps(cases), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == expected


def softmax(scaled: np.ndarray) -> np.ndarray:
    shares = np.exp(scaled - scaled.max())
    return shares / shares.sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.5, "top_p": 0.7},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 1.3, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
        {"temperature": 1.0, "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    ],
    ids=str,
)
def test_frequencies_are_those_of_the_softmax(options: dict[str, Any]) -> None:
    """Pearson's chi-square over positions and over seeds; the expected shares come from transformers' own processors."""
    import torch
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    logits = (np.random.default_rng(1).standard_normal(20) * 1.5).astype(np.float32)
    history = History([0, 3, 3], [5, 5, 7])
    base = Sampling(**options)
    processors = LogitsProcessorList()
    if base.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(base.repetition_penalty))
    processed = processors(torch.tensor([[*history.prompt, *history.generated]]), torch.from_numpy(logits.copy())[None])
    processed[0, 5] -= 2 * base.frequency_penalty + base.presence_penalty
    processed[0, 7] -= base.frequency_penalty + base.presence_penalty
    warpers = LogitsProcessorList([TemperatureLogitsWarper(base.temperature)])
    if base.top_k:
        warpers.append(TopKLogitsWarper(base.top_k))
    if base.top_p < 1:
        warpers.append(TopPLogitsWarper(base.top_p))
    if base.min_p:
        warpers.append(MinPLogitsWarper(base.min_p))
    expected = softmax(warpers(torch.zeros((1, 1), dtype=torch.int64), processed)[0].double().numpy())

    draws = 2000
    for chosen in (
        [pick(logits, position, history, base) for position in range(draws)],
        [pick(logits, 6, history, Sampling(**options, seed=seed)) for seed in range(draws)],
    ):
        counts = np.bincount(chosen, minlength=20)
        assert not counts[expected == 0].any()
        wanted = draws * expected[expected > 0]
        rare = wanted < 5
        observed = counts[expected > 0]
        observed, wanted = (np.append(a[~rare], a[rare].sum()) for a in (observed, wanted))
        statistic = float(((observed - wanted) ** 2 / np.maximum(wanted, 1e-9))[wanted > 0].sum())
        freedom = np.count_nonzero(wanted) - 1
        # Wilson and Hilferty's approximation of the 99.9% quantile.
        assert statistic < freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3


def test_a_wrong_temperature_would_be_noticed() -> None:
    """The same statistic, of draws at another temperature."""
    logits = (np.random.default_rng(1).standard_normal(20) * 1.5).astype(np.float32)
    counts = np.bincount([pick(logits, p, NO_HISTORY, Sampling(1.15)) for p in range(2000)], minlength=20)
    wanted = 2000 * softmax(logits.astype(np.float64))
    assert float(((counts - wanted) ** 2 / wanted).sum()) > 45


@given(some_logits(), settings)
def test_filters_keep_what_transformers_keeps(logits: np.ndarray, sampling: Sampling) -> None:
    import torch
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    if sampling.temperature == 0:
        return
    scaled = scale(logits, NO_HISTORY, sampling)
    least = smallest_allowed(scaled, sampling)
    kept = scaled >= least
    ids, theirs = torch.zeros((1, 1), dtype=torch.int64), torch.from_numpy(scaled)[None]
    if sampling.top_k:
        theirs = TopKLogitsWarper(sampling.top_k)(ids, theirs)
    if sampling.top_p < 1:
        theirs = TopPLogitsWarper(sampling.top_p)(ids, theirs)
    if sampling.min_p:
        theirs = MinPLogitsWarper(sampling.min_p)(ids, theirs)
    their = np.isfinite(theirs[0].numpy())
    # Ours keeps all equal ones at the end of a nucleus; impossible tokens are nobody's choice.
    ties = scaled == least
    different = ((kept & np.isfinite(scaled)) != their) & ~ties
    assert not different.any() or _at_an_edge(scaled, sampling)
    assert kept.any()


def _at_an_edge(scaled: np.ndarray, sampling: Sampling) -> bool:
    """Whether a sum of weights is so close to top_p that rounding decides."""
    descending = np.sort(scaled)[::-1]
    left = descending[descending >= descending[(sampling.top_k or len(scaled)) - 1]]
    return bool((np.abs(np.cumsum(softmax(left)) - sampling.top_p) < 1e-9).any())


def test_equal_logits_stay_together() -> None:
    scaled = np.array([3.0, 1.0, 2.0, 2.0, 0.0])
    assert smallest_allowed(scaled, Sampling(top_k=2)) == 2.0
    assert smallest_allowed(scaled, Sampling(top_p=0.7)) == 2.0
    assert smallest_allowed(scaled, Sampling(top_k=5)) == -math.inf
    assert smallest_allowed(scaled, Sampling(min_p=1.0)) == 3.0
    assert smallest_allowed(scaled, Sampling(top_p=1e-9)) == 3.0


def test_a_large_vocabulary_needs_little_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bounds leave a handful of tokens for the logarithms, and the same winner."""
    computed: list[int] = []

    def counting(bits: np.ndarray) -> np.ndarray:
        computed.append(len(bits))
        return gumbel(bits)

    monkeypatch.setattr("specstream.runtimes.sampling.gumbel", counting)
    logits = (np.random.default_rng(0).standard_normal(50_000) * 3).astype(np.float32)
    for sampling in (Sampling(), Sampling(0.7), Sampling(top_p=0.9), Sampling(1.5)):
        for position in range(10):
            computed.clear()
            chosen = pick(logits, position, NO_HISTORY, sampling)
            assert sum(computed) < 200
            assert chosen == int(scores(logits, position, NO_HISTORY, sampling).argmax())
    computed.clear()
    logits[7] = 60
    assert pick(logits, 1, NO_HISTORY, Sampling()) == 7
    assert sum(computed) <= 3


def test_penalties() -> None:
    logits = np.array([2.0, -2.0, 1.0, 1.0, 0.0], dtype=np.float32)
    history = History([0, 1, 1], [2, 2, 4])
    assert scale(logits, history, Sampling(repetition_penalty=2.0)).tolist() == [1.0, -4.0, 0.5, 1.0, 0.0]
    assert scale(logits, history, Sampling(presence_penalty=0.5)).tolist() == [2.0, -2.0, 0.5, 1.0, -0.5]
    assert scale(logits, history, Sampling(frequency_penalty=0.5)).tolist() == [2.0, -2.0, 0.0, 1.0, -0.5]
    both = Sampling(0.5, repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=-1.0)
    assert scale(logits, history, both).tolist() == [2.0, -8.0, 4.5, 2.0, 1.5]
    assert scale(logits, NO_HISTORY, both).tolist() == [4.0, -4.0, 2.0, 2.0, 0.0]
    assert logits.tolist() == [2.0, -2.0, 1.0, 1.0, 0.0]


def test_temperature_0_takes_the_first_of_the_largest() -> None:
    logits = np.array([1.0, 3.0, 3.0], dtype=np.float32)
    assert pick(logits, 5, NO_HISTORY, Sampling(0.0)) == 1
    assert pick(logits, 5, History([], [1]), Sampling(0.0, presence_penalty=0.1)) == 2
    assert Sampling(0.0, top_k=1).is_greedy
    assert not Sampling(0.0, presence_penalty=0.1).is_greedy
    assert not Sampling(0.1).is_greedy


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_broken_logits_are_not_sampled_from(bad: float) -> None:
    logits = np.full(8, bad if bad < 0 else 0.0, dtype=np.float32)
    logits[3] = bad
    for temperature in (0.0, 1.0):
        with pytest.raises(ValueError, match="largest logit"):
            pick(logits, 0, NO_HISTORY, Sampling(temperature))


# Settings


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": 1e-9}, "temperature is 1e-09"),
        ({"temperature": "1"}, "temperature is '1'"),
        ({"temperature": True}, "temperature is True"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_k": 1.5}, "top_k is 1.5"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"top_p": math.nan}, "top_p is nan"),
        ({"min_p": -0.1}, "min_p is -0.1"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"repetition_penalty": -1}, "repetition_penalty is -1"),
        ({"presence_penalty": math.nan}, "presence_penalty is nan"),
        ({"frequency_penalty": math.inf}, "frequency_penalty is inf"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**64}, f"seed is {2**64}"),
        ({"seed": 0.5}, "seed is 0.5"),
    ],
)
def test_settings_outside_their_ranges(options: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=f"^sampling: {re.escape(named)}, expected [^;]*$"):
        Sampling(**options)


def test_all_problems_at_once() -> None:
    with pytest.raises(UserError, match=r"temperature.*; top_p.*; seed"):
        Sampling(-1, top_p=2, seed=-3)


@given(settings)
def test_json_round_trip(sampling: Sampling) -> None:
    assert Sampling.from_json(json.loads(json.dumps(sampling.to_json()))) == sampling


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_q": 1}, "unknown key request.top_q"),
        ({"seed": None}, "request.seed is None"),
        ({"top_p": "1"}, "request.top_p is '1'"),
        ({"top_p": 0}, "top_p is 0.0"),
    ],
)
def test_foreign_json(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Sampling.from_json(Sampling().to_json() | change, "request")
    with pytest.raises(UserError, match=r"missing key request\.seed"):
        Sampling.from_json({k: v for k, v in Sampling().to_json().items() if k != "seed"}, "request")


def test_a_new_seed_is_exact_in_javascript() -> None:
    seeds = {random_seed() for _ in range(8)}
    assert len(seeds) > 1
    assert all(0 <= seed < 2**32 for seed in seeds)
