"""Texts recorded with the streams of every position, and drafters replayed over them without a model.

Greedy text does not depend on the drafter, so one recording gives the tokens per call of any drafter at any budget. Token ids only;
knows nothing of files or of how long a call takes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from specstream.runtimes.adaptive import BudgetController, FixedBudget
from specstream.runtimes.drafters import DraftContext, Drafter, Streams
from specstream.runtimes.session import Session
from specstream.runtimes.speculate import sanitise, speculate
from specstream.runtimes.tree import StreamPolicy, TokenTree, path_probabilities, root_only


@dataclass(frozen=True, eq=False)
class Recording:
    """One greedy text.

    Attributes:
        prompt_ids: of the prompt.
        tokens: emitted, a stop token included.
        streams: of every position that a draft may start from: ``streams[i]`` were there when ``tokens[i]`` was the root (one fewer
            than tokens: nothing is drafted after the last). None where there were none.
        max_new_tokens: the limit under which it was made.
        vocab_size: token ids are below it.
    """

    prompt_ids: tuple[int, ...]
    tokens: tuple[int, ...]
    streams: tuple[Streams | None, ...]
    max_new_tokens: int
    vocab_size: int


@dataclass(frozen=True)
class Replay:
    """What a drafter did on a recording.

    Attributes:
        emitted: tokens of each call, the correction included.
        rows: of each call, the root included.
        streams: whether each call's draft was meant to have streams.
        expected: what the tree's own probabilities say of each call's tokens: Σ over rows of the probability of its path.
    """

    emitted: tuple[int, ...]
    rows: tuple[int, ...]
    streams: tuple[bool, ...]
    expected: tuple[float, ...]

    @property
    def tokens(self) -> int:
        return sum(self.emitted)

    @property
    def calls(self) -> int:
        return len(self.emitted)


class _Recorder:
    """Drafts nothing and keeps the streams of every call."""

    uses_streams = True

    def __init__(self) -> None:
        self.streams: list[Streams | None] = []

    def propose(self, context: DraftContext) -> TokenTree:
        self.streams.append(context.streams if context.shift == 0 else None)
        return root_only(context.root)


def record(session: Session, prompt_ids: Sequence[int], *, max_new_tokens: int, stop_ids: Collection[int]) -> Recording:
    """Decode a prompt plainly, a token a call, with streams at each.

    Raises:
        UserError: a prompt that the session cannot hold.
    """
    recorder = _Recorder()
    session.rewind(0)
    # A budget of 1 would be plain decoding, for which no streams are computed.
    blocks = speculate(session, prompt_ids, recorder, budget=2, max_new_tokens=max_new_tokens, stop_ids=stop_ids)
    tokens = tuple(token for block in blocks for token in block.tokens)
    return Recording(tuple(prompt_ids), tokens, tuple(recorder.streams), max_new_tokens, session.vocab_size)


def replay(recording: Recording, drafter: Drafter, budget: int | BudgetController, policy: StreamPolicy | None = None) -> Replay:
    """The calls that speculation would have made.

    Args:
        budget: rows of a call at most, the root included; or what decides that before each call.
        policy: which rows of a tree carry streams; left out, streams are always those of the last accepted row, as with all rows
            carrying them or with the delayed placement.
    """
    controller: BudgetController = FixedBudget(budget) if isinstance(budget, int) else budget
    text = list(recording.prompt_ids)
    text.append(recording.tokens[0])
    done, end = 1, len(recording.prompt_ids) + recording.max_new_tokens
    streams = recording.streams[0] if recording.streams else None
    emitted, rows, streamed, expected = [], [], [], []
    while done < len(recording.tokens):
        most = controller.budget()
        wanted = drafter.uses_streams and most > 1 and controller.streams()
        context = DraftContext(text, streams if wanted else None, most, end - len(text) - 1, controller.least())
        tree = root_only(context.root)
        if most > 1:
            tree = controller.trim(sanitise(drafter.propose(context), context, recording.vocab_size)[0])
        path = right_path(tree, recording.tokens[done:])
        count = min(len(path), len(recording.tokens) - done)
        emitted.append(count)
        rows.append(len(tree))
        streamed.append(wanted)
        expected.append(sum(path_probabilities(tree)))
        controller.record(len(tree), count, expected[-1])
        if policy is None:
            carrying = count - 1
        else:
            carry = set(policy(tree).tolist()) if len(tree) > 1 else {0}
            carrying = next((level for level in reversed(range(count)) if path[level] in carry), -1)
        text += recording.tokens[done : done + count]
        if carrying >= 0 and done + carrying < len(recording.streams):
            streams = recording.streams[done + carrying]
        done += count
    return Replay(tuple(emitted), tuple(rows), tuple(streamed), tuple(expected))


def right_path(tree: TokenTree, following: Sequence[int]) -> list[int]:
    """Rows of the longest path that ``following``, the tokens after the root, goes along; the root first."""
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    path = [0]
    for row in range(1, len(tokens)):
        if parents[row] == path[-1] and len(path) <= len(following) and tokens[row] == following[len(path) - 1]:
            path.append(row)
    return path
