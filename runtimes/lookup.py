"""Prompt lookup: what followed earlier occurrences of the last tokens, in the prompt or in what was emitted.

Token ids only; says how long a match is and what follows it, not how likely that is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from tokenizers import Tokenizer

LONGEST_MATCH: Final = 8  # longer matches count as this long
_WEIGHTS: Final = tuple(4.0**length for length in range(LONGEST_MATCH + 1))
_OCCURRENCES: Final = 16  # the latest ones of an n-gram; older ones are not looked at, so a call's time does not grow with the text

# Places in the text that end with the same tokens as a path, each with how many are the same: (position, length), longest first.
Matches = list[tuple[int, int]]


class Continuation(NamedTuple):
    """What may follow a path.

    Attributes:
        token: its id.
        length: of the longest match that it followed, 1 to ``LONGEST_MATCH``.
        share: of all matches, longer ones weighing more; the shares of a path's continuations sum to 1.
    """

    token: int
    length: int
    share: float


class SuffixIndex:
    """Occurrences of single tokens and of pairs in a growing text, found without reading the text again.

    Args:
        fold: a class for every token id: tokens of one class match each other (see :func:`fold_tokens`). Left out, only equal
            tokens do.
    """

    def __init__(self, fold: Sequence[int] | None = None) -> None:
        self._fold = fold
        self._source: Sequence[int] = ()
        self._start_anew()

    def update(self, tokens: Sequence[int]) -> None:
        """Take in what the text has grown by; another text (not an extension of the last one) starts the index anew."""
        known = len(self._tokens)
        # The loop hands over one growing list for one text; a copy of it is compared.
        grown = len(tokens) >= known and (tokens is self._source or list(tokens[:known]) == self._tokens)
        if not grown:
            self._start_anew()
            known = 0
        self._source = tokens
        fold, kinds, single, pairs = self._fold, self._kinds, self._single, self._pairs
        new = tokens[known:]
        before = kinds[-1] if kinds else None
        for place, kind in enumerate(new if fold is None else [fold[token] for token in new], known):
            if (places := single.get(kind)) is None:
                single[kind] = [place]
            else:
                places.append(place)
            if before is not None:
                pair = before, kind
                if (places := pairs.get(pair)) is None:
                    pairs[pair] = [place]
                else:
                    places.append(place)
            kinds.append(kind)
            before = kind
        self._tokens += new

    def root_matches(self) -> Matches:
        """Matches of the text's own last tokens."""
        return self._find([], len(self._kinds))

    def child_matches(self, matches: Matches, path: Sequence[int]) -> Matches:
        """Matches of a path one token longer than the one that ``matches`` are of.

        Args:
            path: tokens below the root, the new one last.
        """
        return self.longer_matches(matches, path[-1]) or self.path_matches(path)

    def longer_matches(self, matches: Matches, token: int) -> Matches:
        """Those of a path's matches that go on with a token."""
        kinds = self._kinds
        kind = token if self._fold is None else self._fold[token]
        end = len(kinds) - 1
        return [(place + 1, min(length + 1, LONGEST_MATCH)) for place, length in matches if place < end and kinds[place + 1] == kind]

    def path_matches(self, path: Sequence[int]) -> Matches:
        """Matches of a path below the root, found without those of its parent."""
        return self._find(list(path) if self._fold is None else [self._fold[token] for token in path], len(self._kinds))

    def continuations(self, matches: Matches) -> list[Continuation]:
        """Tokens that followed, each once."""
        tokens = self._tokens
        end = len(tokens) - 1
        found: dict[int, tuple[int, float]] = {}
        total = 0.0
        for place, length in matches:
            if place < end:
                token, weight = tokens[place + 1], _WEIGHTS[length]
                total += weight
                known = found.get(token)
                found[token] = (length, weight) if known is None else (max(length, known[0]), known[1] + weight)
        return [Continuation(token, length, weight / total) for token, (length, weight) in found.items()]

    def _start_anew(self) -> None:
        self._tokens: list[int] = []
        self._kinds: list[int] = []
        self._single: dict[int, list[int]] = {}
        self._pairs: dict[tuple[int, int], list[int]] = {}

    def _find(self, path: list[int], end: int) -> Matches:
        """The latest occurrences of the last two kinds of text + path, or else of the last one, with their lengths."""
        kinds = self._kinds
        tail = path[-LONGEST_MATCH:] if len(path) >= 2 else kinds[max(end - 2, 0) :] + path
        if not tail:
            return []
        places = self._pairs.get((tail[-2], tail[-1])) if len(tail) > 1 else None
        # The text's own end is no earlier occurrence.
        if places is None or (len(places) == 1 and places[0] >= end - 1):
            # Nowhere else are the last two the same, so nowhere are more.
            return [(place, 1) for place in self._single.get(tail[-1], ())[-_OCCURRENCES:] if place < end - 1]
        tail = (kinds[max(0, end - LONGEST_MATCH) :] + path)[-LONGEST_MATCH:]
        matches = []
        for place in places[-_OCCURRENCES:]:
            if place >= end - 1:
                continue
            length = 2
            while length < len(tail) and length <= place and kinds[place - length] == tail[-1 - length]:
                length += 1
            matches.append((place, length))
        return matches


def fold_tokens(pieces: Sequence[str]) -> list[int]:
    """A class for every token: those that differ only in case or in white space around them fall together.

    A copied word often has another neighbour than in the prompt, and byte-pair tokens include the space before a word.

    Args:
        pieces: the text of each token, by id.
    """
    classes: dict[str, int] = {}
    folded = []
    for token, piece in enumerate(pieces):
        name = piece.strip().casefold()
        # White space, and bytes that are no whole character, are classes of their own.
        alone = not name or "\N{REPLACEMENT CHARACTER}" in piece
        folded.append(token if alone else classes.setdefault(name, token))
    return folded


def fold_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """:func:`fold_tokens` for a tokenizer; ids that it does not know are classes of their own."""
    return fold_tokens(tokenizer.decode_batch([[token] for token in range(vocab_size)], skip_special_tokens=False))
