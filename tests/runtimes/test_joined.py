from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specstream.models.errors import UserError
from specstream.runtimes.drafters import DraftContext, StreamDrafter, Streams
from specstream.runtimes.join_fit import fit_join
from specstream.runtimes.joined import PRIOR_WEIGHTS, UNIT_WEIGHTS, JoinedDrafter, JoinWeights, lookup_drafter, ngram_drafter
from specstream.runtimes.lookup import SuffixIndex
from specstream.runtimes.ngrams import NgramTable, build_ngrams
from specstream.runtimes.replay import Recording, replay

from .test_tree import check, paths

VOCAB = 12
TABLE = build_ngrams([[1, 2, 3, 4, 5, 6], [1, 2, 7, 8, 5, 9]] * 4, VOCAB, order=3)


def made_streams(seed: int, position: int, pairs: bool = False) -> Streams:
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(VOCAB)[:4] for _ in range(3)])
    p = -np.sort(-rng.dirichlet(np.ones(5), size=3)[:, :4], axis=1)
    scores = rng.normal(size=(3, 4, 4)).astype(np.float32) if pairs else None
    return Streams(ids, np.log(p).astype(np.float32), position, scores)


@settings(deadline=None)
@given(
    text=st.lists(st.integers(0, VOCAB - 1), min_size=2, max_size=30),
    seed=st.integers(0, 10**6),
    sources=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    shift=st.integers(0, 3),
    pairs=st.booleans(),
    budget=st.integers(1, 20),
    max_depth=st.integers(0, 6),
)
def test_any_sources_make_a_tree(
    text: list[int], seed: int, sources: tuple[bool, bool, bool], shift: int, pairs: bool, budget: int, max_depth: int
) -> None:
    use_streams, use_lookup, use_ngrams = sources
    drafter = JoinedDrafter(use_streams, SuffixIndex() if use_lookup else None, TABLE if use_ngrams else None, temperatures=(1.2, 0.8, 1.0))
    assert drafter.uses_streams == use_streams
    position = len(text) - 2 - shift
    context = DraftContext(text, made_streams(seed, position, pairs) if position >= 0 else None, budget, max_depth)
    tree = drafter.propose(context)
    check(tree)
    assert tree.tokens[0] == text[-1]
    assert len(tree) <= budget
    assert tree.depth.max() <= max_depth
    # Children of a node are exclusive outcomes.
    probability = np.exp(tree.logprob.astype(np.float64))
    for row in range(len(tree)):
        assert probability[tree.children(row)].sum() <= probability[row] * (1 + 1e-5)
    if not any(sources):
        assert len(tree) == 1


@given(st.integers(0, 10**6), st.booleans(), st.integers(0, 1))
def test_streams_alone_are_the_stream_drafter(seed: int, pairs: bool, shift: int) -> None:
    """With unit weights the joined probabilities are the streams' own, calibrated and conditioned."""
    text = [1, 2, 3, 4]
    streams = made_streams(seed, len(text) - 2 - shift, pairs)
    # The odds of sure streams are bounded; these are not sure.
    streams = dataclasses.replace(streams, logprobs=streams.logprobs + np.float32(np.log(0.9)))
    context = DraftContext(text, streams, 8, 9)
    temperatures = (1.3, 0.7, 1.0)
    alone = StreamDrafter(temperatures).propose(context)
    joined = JoinedDrafter(weights=UNIT_WEIGHTS, temperatures=temperatures).propose(context)
    np.testing.assert_allclose(sorted(joined.logprob), sorted(alone.logprob), atol=2e-3)


def test_lookup_goes_on_where_the_streams_end() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 0, 1]
    ids = np.array([[2], [3]])
    streams = Streams(ids, np.log(np.array([[0.9], [0.9]])).astype(np.float32), len(text) - 2)
    tree = JoinedDrafter(lookup=SuffixIndex()).propose(DraftContext(text, streams, 7, 20))
    assert tree.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_lookup_and_ngrams_alone() -> None:
    assert lookup_drafter().propose(DraftContext([5, 6, 7, 0, 5], None, 3, 9)).tokens.tolist() == [5, 6, 7]
    assert not lookup_drafter().uses_streams
    tree = ngram_drafter(TABLE).propose(DraftContext([11, 7], None, 3, 9))
    assert tree.tokens.tolist() == [7, 8, 5]
    assert lookup_drafter().propose(DraftContext([5], None, 8, 9)).tokens.tolist() == [5]
    assert ngram_drafter(TABLE).propose(DraftContext([11], None, 8, 9)).tokens.tolist() == [11]


def test_sources_that_agree_are_surer_than_one() -> None:
    text = [1, 2, 3, 0, 1, 2]
    streams = Streams(np.array([[3, 8]]), np.log(np.array([[0.4, 0.4]])).astype(np.float32), len(text) - 2)
    context = DraftContext(text, streams, 3, 1)

    def probability(drafter: JoinedDrafter) -> float:
        return math.exp(paths(drafter.propose(context))[(2, 3)])

    assert probability(JoinedDrafter(lookup=SuffixIndex(), ngrams=TABLE)) > probability(JoinedDrafter(lookup=SuffixIndex()))
    assert probability(JoinedDrafter(lookup=SuffixIndex())) > probability(JoinedDrafter())


def test_an_impossible_candidate_is_never_drafted() -> None:
    streams = Streams(np.array([[3, 4]]), np.array([[0.0, -np.inf]], dtype=np.float32), 0)
    assert JoinedDrafter().propose(DraftContext([1, 2], streams, 8, 9)).tokens.tolist() == [2, 3]
    broken = Streams(np.array([[3, 4]]), np.array([[np.nan, np.nan]], dtype=np.float32), 0)
    assert JoinedDrafter().propose(DraftContext([1, 2], broken, 8, 9)).tokens.tolist() == [2]


def test_a_new_text_does_not_see_the_old_one() -> None:
    drafter = lookup_drafter()
    drafter.propose(DraftContext([5, 6, 7, 5], None, 4, 9))
    assert drafter.propose(DraftContext([1, 5], None, 4, 9)).tokens.tolist() == [5]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"streams": ()}, "streams has no entry"),
        ({"lookup": (1.0,)}, "lookup has 1 entries"),
        ({"bias": ()}, "bias has 0 entries"),
        ({"share": math.nan}, "numbers outside"),
        ({"no_ngram": 1e9}, "numbers outside"),
    ],
)
def test_weights_that_make_no_sense(change: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        dataclasses.replace(PRIOR_WEIGHTS, **change)  # type: ignore[arg-type]


# Fitting


def texts(count: int, seed: int) -> list[Recording]:
    """Texts over 12 tokens that follow the table half of the time; streams that are right 6 times of 10 and say so."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        tokens = [1]
        while len(tokens) < 30:
            following = TABLE.following(tuple(tokens[-3:]))
            sure = following is not None and rng.random() < 0.5
            tokens.append(following.tokens[0] if following is not None and sure else int(rng.integers(VOCAB)))
        streams: list[Streams] = []
        for i in range(len(tokens) - 1):
            ids = np.stack([rng.permutation(VOCAB)[:3] for _ in range(2)])
            for j in range(2):
                if i + j + 1 < len(tokens) and rng.random() < 0.6:
                    right = tokens[i + j + 1]
                    ids[j] = [right, *[t for t in ids[j].tolist() if t != right][:2]] if right not in ids[j] else ids[j]
                    ids[j] = [right, *[t for t in ids[j].tolist() if t != right]]
            streams.append(Streams(ids, np.log(np.full((2, 3), [0.6, 0.1, 0.1])).astype(np.float32), 4 + i))
        made.append(Recording((0, 0, 0, 0, 0), tuple(tokens), tuple(streams), 30, VOCAB))
    return made


def mean_loss(recordings: list[Recording], drafter: JoinedDrafter) -> float:
    """-log p of what followed each root, by the drafter's own tree."""
    losses = []
    for recording in recordings:
        text = list(recording.prompt_ids)
        for i, streams in enumerate(recording.streams):
            text.append(recording.tokens[i])
            tree = drafter.propose(DraftContext(text, streams, 40, 1))
            probability = dict(zip(tree.tokens[1:].tolist(), np.exp(tree.logprob[1:].astype(float)).tolist(), strict=True))
            losses.append(-math.log(probability.get(recording.tokens[i + 1], 1 - sum(probability.values()))))
    return float(np.mean(losses))


def test_a_fit_predicts_better_and_is_calibrated_on_other_texts() -> None:
    fit = fit_join(texts(30, 0), ngrams=TABLE)
    assert fit.loss < fit.loss_before
    assert fit.nodes > 500
    other = texts(30, 1)

    def joined(weights: JoinWeights) -> JoinedDrafter:
        return JoinedDrafter(lookup=SuffixIndex(), ngrams=TABLE, weights=weights)

    assert mean_loss(other, joined(fit.weights)) < mean_loss(other, joined(PRIOR_WEIGHTS)) - 0.02
    replays = [replay(recording, joined(fit.weights), 8) for recording in other]
    emitted, expected = (sum(sum(getattr(r, name)) for r in replays) for name in ("emitted", "expected"))
    assert expected == pytest.approx(emitted, rel=0.12)


def test_a_source_of_which_nothing_was_seen_keeps_its_weights() -> None:
    fit = fit_join(texts(4, 0), use_lookup=False)
    assert fit.weights.lookup == PRIOR_WEIGHTS.lookup
    assert fit.weights.ngrams == PRIOR_WEIGHTS.ngrams
    assert len(fit.weights.streams) == 2


def test_nothing_to_fit() -> None:
    with pytest.raises(UserError, match="no recorded tokens"):
        fit_join([])
    with pytest.raises(UserError, match="no recorded tokens"):
        fit_join([Recording((1,), (2,), (), 4, VOCAB)])


def test_the_table_is_what_the_tests_think() -> None:
    assert isinstance(TABLE, NgramTable)
    found = TABLE.following((1, 2))
    assert found is not None
    assert set(found.tokens) == {3, 7}
