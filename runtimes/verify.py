"""Is speculation exact? Compares speculative text with plain decoding, and with a reference, token by token. Token ids and logits only."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from specstream.models.errors import UserError
from specstream.runtimes.drafters import Drafter, NoDrafter
from specstream.runtimes.sampling import History, Sampling, scale, scores, smallest_allowed
from specstream.runtimes.session import NEAR_TIE, Session, prefill, tree_rows
from specstream.runtimes.speculate import Block, speculate
from specstream.runtimes.tree import FloatArray, StreamPolicy, TokenTree, chain, every_row, root_only

# A reference's greedy continuation: (prompt ids, tokens at most) -> the emitted ids, a stop token included.
Reference = Callable[[Sequence[int], int], Sequence[int]]


@dataclass(frozen=True)
class Mismatch:
    """The first place of one prompt where two texts differ.

    Attributes:
        prompt: index of the prompt.
        position: tokens emitted before it.
        against: ``plain`` decoding of the same graph or the ``reference``.
        speculative: the speculative token; None when that text ended here.
        other: the other text's.
        best: the two best tokens of a plain call at this place.
        logits: their logits; of sampled texts, their scores (scaled logits + noise).
        near_tie: whether the difference is one that rounding may make: the two differing tokens are the two best, closer than
            the session's ``near_tie``; of sampled texts, both are among :func:`could_win`.
    """

    prompt: int
    position: int
    against: Literal["plain", "reference"]
    speculative: int | None
    other: int | None
    best: tuple[int, int]
    logits: tuple[float, float]
    near_tie: bool


@dataclass(frozen=True)
class VerifyReport:
    """What ``verify --json`` says (design: "Reports").

    Attributes:
        prompts: how many were compared.
        tokens: compared with plain decoding, up to the first mismatch of each prompt.
        differences: mismatches that are no near-ties, against plain decoding and the reference; 0 is what must hold.
        near_ties: mismatches that are.
        flip_rate: mismatches against plain decoding over ``tokens``.
        tokens_per_call: pooled over prompts; None without calls.
        one_row_flip_rate: of rounded activations, how often plain decoding with the kernels for one row says something else first than
            plain decoding with those for several, over the same tokens; None without rounding. What ``flip_rate`` may be at most.
        rows_independent: whether a chain's logits stay the same with other branches of a tree between its rows; with rounded
            activations, whether its choices do.
        rows_max_abs_diff: by how much they changed at most.
        reference: what the text was compared with: ``plain``, or the name of the reference besides it.
        mismatches: all of them, near-ties included.
    """

    prompts: int
    tokens: int
    differences: int
    near_ties: int
    flip_rate: float
    one_row_flip_rate: float | None
    tokens_per_call: float | None
    rows_independent: bool
    rows_max_abs_diff: float
    reference: str
    mismatches: tuple[Mismatch, ...]

    @property
    def passed(self) -> bool:
        right = self.differences == 0 or (self.one_row_flip_rate is not None and self.flip_rate <= self.one_row_flip_rate)
        return right and self.rows_independent

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"mismatches": [asdict(m) for m in self.mismatches]}


def verify(
    session: Session,
    prompts: Sequence[Sequence[int]],
    drafter: Drafter,
    *,
    max_new_tokens: int = 128,
    stop_ids: Collection[int] = (),
    budget: int = 16,
    policy: StreamPolicy = every_row,
    reference: Reference | None = None,
    reference_name: str = "transformers",
    on_prompt: Callable[[int], None] | None = None,
    sampling: Sampling | None = None,
    one_row: Callable[[bool], None] | None = None,
) -> VerifyReport:
    """Generate each prompt with and without drafts, and compare; with a reference, compare with its text as well.

    Args:
        prompts: token ids of each.
        reference: gives another implementation's greedy ids for the same weights.
        on_prompt: called with the number of prompts done, for a progress bar.
        sampling: how tokens are chosen, with drafts and without; greedily when left out. A reference must choose in the same way.
        one_row: of a session that rounds activations: lets it use its kernels for one row, or not.

    Raises:
        UserError: no prompts, or one that the session cannot hold.
    """
    if not prompts:
        raise UserError("there are no prompts to verify; give at least one")

    def generate(prompt: Sequence[int], with_drafter: Drafter) -> list[Block]:
        session.rewind(0)
        return list(
            speculate(
                session,
                prompt,
                with_drafter,
                policy=policy,
                budget=budget,
                max_new_tokens=max_new_tokens,
                stop_ids=stop_ids,
                sampling=sampling,
            )
        )

    tokens = calls = decoded = one_row_tokens = one_row_flips = 0
    mismatches: list[Mismatch] = []
    row_differences: list[float] = []
    rows_flipped = False
    for number, prompt in enumerate(prompts):
        blocks = generate(prompt, drafter)
        calls += sum(block.rows > 0 for block in blocks)
        decoded += sum(len(block.tokens) for block in blocks if block.rows > 0)
        speculative = _emitted(blocks)
        plain = _emitted(generate(prompt, NoDrafter()))
        if one_row is not None:
            one_row(True)
            place = _first_difference(_emitted(generate(prompt, NoDrafter())), plain)
            one_row(False)
            one_row_flips += place is not None
            one_row_tokens += len(plain) if place is None else place + 1
        texts: list[tuple[Literal["plain", "reference"], Sequence[int]]] = [("plain", plain)]
        if reference is not None:
            texts.append(("reference", reference(prompt, max_new_tokens)))
        for against, other in texts:
            place = _first_difference(speculative, other)
            if against == "plain":
                tokens += len(plain) if place is None else place + 1
            if place is not None:
                mismatches.append(_examine(session, number, prompt, place, against, speculative, other, sampling))
        if number < ROW_CHECKS:
            difference, flipped = compare_rows(session, prompt, plain[:ROW_CHECK_DEPTH])
            row_differences.append(difference)
            rows_flipped |= flipped
        if on_prompt is not None:
            on_prompt(number + 1)
    near_ties = sum(m.near_tie for m in mismatches)
    return VerifyReport(
        prompts=len(prompts),
        tokens=tokens,
        differences=len(mismatches) - near_ties,
        near_ties=near_ties,
        flip_rate=sum(m.against == "plain" for m in mismatches) / tokens,
        tokens_per_call=decoded / calls if calls else None,
        one_row_flip_rate=one_row_flips / one_row_tokens if one_row is not None else None,
        rows_independent=(one_row is not None or max(row_differences) < session.near_tie) and not rows_flipped,
        rows_max_abs_diff=max(row_differences),
        reference="plain" if reference is None else reference_name,
        mismatches=tuple(mismatches),
    )


ROW_CHECKS = 8  # prompts on which rows are compared
ROW_CHECK_DEPTH = 6


def compare_rows(session: Session, prompt: Sequence[int], continuation: Sequence[int]) -> tuple[float, bool]:
    """Logits of a chain alone against those of the same chain with decoy branches between its rows.

    Args:
        continuation: the tokens of the chain, at least one.

    Returns:
        The largest difference of a logit, and whether an argmax changed by more than a near-tie.
    """
    session.rewind(0)
    prefill(session, prompt)
    # Both trees must fit; a decoy row precedes each row of the chain but the root.
    depth = min(len(continuation), (min(session.capacity - session.length, session.max_tree_rows) + 1) // 2)
    if depth < 1:
        return 0.0, False
    alone = chain(continuation[0], continuation[1:depth])
    mixed, rows = _with_decoys(alone, session.vocab_size)
    first = _all_logits(session, alone)
    second = _all_logits(session, mixed)[rows]
    best, other = first.argmax(axis=1), second.argmax(axis=1)
    row = np.arange(len(best))
    flipped = bool((first[row, best] - first[row, other] >= session.near_tie).any())
    return float(np.abs(first - second).max()), flipped


def _with_decoys(alone: TokenTree, vocab_size: int) -> tuple[TokenTree, list[int]]:
    """The chain with a wrong sibling before each of its tokens, and the rows where the chain is now."""
    tokens, parents, rows = [int(alone.tokens[0])], [-1], [0]
    for token in alone.tokens.tolist()[1:]:
        tokens += [(token + 1) % vocab_size, token]
        parents += [rows[-1], rows[-1]]
        rows.append(len(tokens) - 1)
    logprob = np.zeros(len(tokens), dtype=np.float32)
    return TokenTree(np.array(tokens, dtype=np.int64), np.array(parents, dtype=np.int32), logprob), rows


def _all_logits(session: Session, tree: TokenTree) -> FloatArray:
    output = session.run(tree_rows(tree, session.length), logits=True)
    assert output.logits is not None
    return output.logits.copy()


def _examine(
    session: Session,
    number: int,
    prompt: Sequence[int],
    place: int,
    against: Literal["plain", "reference"],
    speculative: Sequence[int],
    other: Sequence[int],
    sampling: Sampling | None,
) -> Mismatch:
    """Look at the logits of a plain call where the texts part."""
    session.rewind(0)
    output = prefill(session, prompt, logits=True)
    logits = output.logits
    for token in speculative[:place]:
        logits = session.run(tree_rows(root_only(token), session.length), logits=True).logits
        session.commit([0])
    assert logits is not None
    values: npt.NDArray[np.floating] = logits[0]
    position, history = len(prompt) + place, History(prompt, speculative[:place])
    if sampling is not None:
        values = scores(values, position, history, sampling)
    first, second = (int(i) for i in np.argsort(-values, kind="stable")[:2])
    pair = [text[place] if place < len(text) else None for text in (speculative, other)]
    if sampling is None:
        near_tie = float(values[first] - values[second]) < session.near_tie and set(pair) == {first, second}
    else:
        near_tie = set(pair) <= could_win(logits[0], position, history, sampling, session.near_tie)
    return Mismatch(
        prompt=number,
        position=place,
        against=against,
        speculative=pair[0],
        other=pair[1],
        best=(first, second),
        logits=(float(values[first]), float(values[second])),
        near_tie=near_tie,
    )


def could_win(logits: FloatArray, position: int, history: History, sampling: Sampling, near_tie: float = NEAR_TIE) -> set[int]:
    """Tokens that sampling may choose when every logit is off by up to half of ``near_tie``. Arguments as of :func:`pick`.

    The error may also let a token through a filter or keep it out. So the winner is no worse than the best of those that pass the
    filters whatever the error is, and one of those that pass them with some error.
    """
    penalty = sampling.repetition_penalty
    error = near_tie / 2 * max(penalty, 1 / penalty) / (sampling.temperature or 1.0)
    scaled = scale(logits, history, sampling)
    if sampling.temperature == 0:
        return set(np.flatnonzero(scaled >= scaled.max() - 2 * error).tolist())
    # Each weight e^scaled is off by a factor of up to e^error, and so are sums of them.
    loose = dataclasses.replace(sampling, top_p=min(sampling.top_p * math.exp(2 * error), 1.0))
    strict = dataclasses.replace(sampling, top_p=sampling.top_p * math.exp(-2 * error))
    values = scores(logits, position, history, dataclasses.replace(sampling, top_k=0, top_p=1.0, min_p=0.0))
    surely = scaled >= min(smallest_allowed(scaled, strict) + 2 * error, float(scaled.max()))
    perhaps = scaled >= smallest_allowed(scaled, loose) - 2 * error
    return set(np.flatnonzero(perhaps & (values >= values[surely].max() - 2 * error)).tolist())


def _emitted(blocks: Sequence[Block]) -> list[int]:
    return [token for block in blocks for token in block.tokens]


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first place where two sequences differ, one ending before the other included."""
    pairs: Iterator[int] = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(pairs, None if len(one) == len(other) else min(len(one), len(other)))
