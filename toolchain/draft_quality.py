"""Tokens per call that streams would give on held-out rows: the runtime's own trees, verified against a text that is known already.

No graph is needed, and no decoding: what the model says along its text, and what streams guess at every place of it, is computed in whole
batches (``specstream.models.calibrate``).
"""

from __future__ import annotations

from collections.abc import Sequence

from specstream.models.calibrate import RowDrafts
from specstream.models.data import TokenRow
from specstream.runtimes.drafters import DraftContext, StreamDrafter, Streams
from specstream.runtimes.speculate import accept

BUDGETS = (8, 12, 16)  # main rows of a call


def tokens_per_call(rows: Sequence[TokenRow], drafts: Sequence[RowDrafts], temperatures: Sequence[float], budget: int) -> float:
    """Tokens per call of the streams alone at a fixed budget, pooled over rows; the prefill and its token are not counted.

    Where a row's text is the model's own, this is what the runtime gives in the same precision. Elsewhere the text is taken as it is:
    a call ends where the model would say something else.

    Args:
        rows: the texts.
        drafts: of each row.
        temperatures: of each stream.
        budget: rows of a call at most, the root included.
    """
    drafter = StreamDrafter(tuple(temperatures))
    tokens = calls = 0
    for row, drafted in zip(rows, drafts, strict=True):
        ids, logprobs = drafted.ids.numpy(), drafted.logprobs.numpy()
        pairs = None if drafted.pairs is None else drafted.pairs.numpy()
        chosen: list[int] = drafted.chosen.tolist()
        root, last = row.start, len(row.ids) - 1  # places in the text: anchor a stands at row.start - 1 + a
        while root < last:
            anchor = root - row.start
            streams = Streams(ids[anchor], logprobs[anchor], root - 1, None if pairs is None else pairs[anchor])
            tree = drafter.propose(DraftContext(row.ids[: root + 1], streams, budget, ids.shape[1]))
            # The model's own token after every row of the right path; after others, and once the text goes another way, nothing is right.
            following = [-1] * len(tree)
            for number, depth in enumerate(tree.depth.tolist()):
                path = tree.tokens[tree.path(number)].tolist()
                if root + depth < last and tuple(path) == row.ids[root : root + depth + 1]:
                    following[number] = chosen[anchor + depth + 1]
            emitted = min(len(accept(tree, following)), last - root)
            tokens, calls, root = tokens + emitted, calls + 1, root + emitted
    return tokens / max(calls, 1)


def text_loss(drafts: Sequence[RowDrafts]) -> float:
    """Cross-entropy of the rows' own completions by the model itself, in nats a token."""
    sums = [(float(drafted.text_logprobs.sum()), len(drafted.text_logprobs)) for drafted in drafts]
    return round(-sum(total for total, _ in sums) / sum(count for _, count in sums), 4)
