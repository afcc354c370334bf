"""How a quantized bundle differs from the one it was made of, on the texts that the latter writes.

Each side runs in a process of its own, so neither the weights of the other nor what was in memory while quantizing can hide a fault:

    python -m specstream.toolchain.quantize_quality reference BUNDLE FOLDER    FOLDER/prompts.json -> texts, their log-probabilities
    python -m specstream.toolchain.quantize_quality compare BUNDLE FOLDER      prints figures as one JSON object

Knows sessions and token ids; nothing of schemes or graphs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specstream.runtimes import load
from specstream.runtimes.language_model import LanguageModel
from specstream.runtimes.session import Session, prefill, tree_rows
from specstream.runtimes.tree import TokenTree, chain

PROMPTS, TEXTS, LOGPROBS = "prompts.json", "texts.json", "logprobs.npy"
ROW_PROMPTS = 8  # prompts on which rows are compared with other rows beside them
ROWS_OF_A_CALL = 12  # at most, while tokens per call are counted
ROW_DEPTH = 8  # rows of a chain in these comparisons

FloatArray = npt.NDArray[np.float32]


def write_prompts(folder: Path, prompts: Sequence[str], completions: Sequence[str | None], max_new_tokens: int) -> None:
    """What :func:`reference` reads: user texts, a right answer to each where one is known, and how long answers may be."""
    stored = {"prompts": list(prompts), "completions": list(completions), "max_new_tokens": max_new_tokens}
    (folder / PROMPTS).write_text(json.dumps(stored), encoding="utf-8")


def read_texts(folder: Path) -> list[tuple[list[int], list[int]]]:
    """Token ids of each prompt and of its continuation, as :func:`reference` wrote them."""
    stored = json.loads((folder / TEXTS).read_text(encoding="utf-8"))
    return [(text["prompt"], text["continuation"]) for text in stored]


def reference(bundle: Path, folder: Path, threads: int | None = None) -> dict[str, Any]:
    """Let a bundle answer the prompts in ``folder``; keep token ids and, for each token, log-probabilities float32 [V].

    Returns:
        ``tokens``, ``tokens_per_call`` (of ``ROWS_OF_A_CALL`` rows), ``exact_match``, ``perplexity``.
    """
    lm = load(bundle, threads=threads, check=False)  # who calls has just read or written it
    asked = json.loads((folder / PROMPTS).read_text(encoding="utf-8"))
    answers = _answers(lm, asked)
    texts = [{"prompt": ids, "continuation": list(result.token_ids)} for ids, result in answers]
    (folder / TEXTS).write_text(json.dumps(texts), encoding="utf-8")
    tokens = sum(len(text["continuation"]) for text in texts)
    # On disk, not in memory: a row for each token is as wide as the vocabulary.
    stored = np.lib.format.open_memmap(folder / LOGPROBS, mode="w+", dtype=np.float32, shape=(tokens, lm.session.vocab_size))
    place, said = 0, 0.0
    for text in texts:
        scores = forced_logprobs(lm.session, text["prompt"], text["continuation"])
        stored[place : place + len(scores)] = scores
        said += float(scores[np.arange(len(scores)), text["continuation"]].sum(dtype=np.float64))
        place += len(scores)
    stored.flush()
    return {"tokens": tokens, "perplexity": float(np.exp(-said / tokens)), **_generated(answers, asked["completions"], lm)}


def compare(
    bundle: Path, folder: Path, threads: int | None = None, generate: bool = True, row_prompts: int = ROW_PROMPTS
) -> dict[str, Any]:
    """Figures of a bundle on the texts of :func:`reference`, teacher-forced: every token is predicted from the reference's text.

    Args:
        generate: whether to let it write texts of its own as well, for ``tokens_per_call`` and ``exact_match``.
        row_prompts: on how many prompts rows are compared with other rows beside them.

    Returns:
        ``tokens``, ``kl`` (mean of KL(reference || bundle) in nats), ``kl_max``, ``top1_agreement``, ``perplexity``;
        ``flip_rate`` (argmax of a row that changes with siblings' rows beside it), ``flip_rate_plain`` (that changes between calls of
        one row and of two), both None where no comparison fitted the context or the session runs single rows only;
        ``rows_independent`` (bit-equal whatever the siblings' tokens are), ``rows_max_abs_diff``, ``rows_compared``;
        ``tokens_per_call``, ``exact_match``.
    """
    lm = load(bundle, threads=threads, check=False)  # who calls has just read or written it
    texts = read_texts(folder)
    stored = np.load(folder / LOGPROBS, mmap_mode="r")
    place, said, agreeing = 0, 0.0, 0
    divergences: list[FloatArray] = []
    for prompt, continuation in texts:
        expected = np.asarray(stored[place : place + len(continuation)])
        place += len(continuation)
        found = forced_logprobs(lm.session, prompt, continuation)
        divergences.append((np.exp(expected) * (expected - found)).sum(axis=1))
        agreeing += int((expected.argmax(axis=1) == found.argmax(axis=1)).sum())
        said += float(found[np.arange(len(found)), continuation].sum(dtype=np.float64))
    kl = np.concatenate(divergences)
    result: dict[str, Any] = {
        "tokens": place,
        "kl": float(kl.mean()),
        "kl_max": float(kl.max()),
        "top1_agreement": agreeing / place,
        "perplexity": float(np.exp(-said / place)),
        **compare_rows(lm.session, texts[:row_prompts]),
    }
    if generate:
        asked = json.loads((folder / PROMPTS).read_text(encoding="utf-8"))
        result |= _generated(_answers(lm, asked), asked["completions"], lm)
    return result


def forced_logprobs(session: Session, prompt: Sequence[int], continuation: Sequence[int]) -> FloatArray:
    """Log-probabilities float32 [n, V] of each of the n tokens of a continuation, predicted from all before it."""
    session.rewind(0)
    first = prefill(session, prompt, logits=True).logits
    assert first is not None
    scores = [first.copy()]
    # The last token predicts nothing that is asked for; a call takes as many rows as the session allows.
    rest, step = continuation[:-1], session.max_tree_rows
    for tokens in (rest[start : start + step] for start in range(0, len(rest), step)):
        scores.append(_run(session, chain(tokens[0], tokens[1:])))
        session.commit(range(len(tokens)))
    logits = np.concatenate(scores)
    logits -= logits.max(axis=1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return logits


def compare_rows(session: Session, texts: Sequence[tuple[list[int], list[int]]]) -> dict[str, Any]:
    """Whether a row depends on which rows are beside it; see :func:`compare` for the keys."""
    rows = flips = plain_flips = 0
    independent, largest = True, 0.0
    if session.max_tree_rows < 2:
        texts = ()  # rows are never beside others
    for prompt, continuation in texts:
        session.rewind(0)
        prefill(session, prompt)
        depth = min(ROW_DEPTH, (session.max_tree_rows + 1) // 2)
        for start in range(0, len(continuation), depth):
            tokens = continuation[start : start + depth]
            if session.length + 2 * len(tokens) > session.capacity:
                break  # the chain with its siblings does not fit any more
            alone = _run(session, chain(tokens[0], tokens[1:]))
            places, first, second = _with_siblings(tokens, session.vocab_size)
            beside, beside_others = _run(session, first)[places], _run(session, second)[places]
            independent &= bool((beside == beside_others).all())
            largest = max(largest, float(np.abs(alone - beside).max()))
            flips += int((alone.argmax(axis=1) != beside.argmax(axis=1)).sum())
            for token in tokens:
                pair = _run(session, chain(token, [(token + 1) % session.vocab_size]))[0]
                single = _run(session, chain(token, []))[0]
                plain_flips += int(pair.argmax() != single.argmax())
                session.commit([0])
            rows += len(tokens)
    return {
        "flip_rate": flips / rows if rows else None,
        "flip_rate_plain": plain_flips / rows if rows else None,
        "rows_independent": independent,
        "rows_max_abs_diff": largest,
        "rows_compared": rows,
    }


def _run(session: Session, tree: TokenTree) -> FloatArray:
    logits = session.run(tree_rows(tree, session.length), logits=True).logits
    assert logits is not None
    return logits.copy()


def _with_siblings(tokens: Sequence[int], vocab_size: int) -> tuple[list[int], TokenTree, TokenTree]:
    """A chain with a sibling before each token but the first: the chain's rows, and two trees with other tokens for siblings."""
    places, parents = [0], [-1]
    for _ in tokens[1:]:
        parents += [places[-1], places[-1]]
        places.append(len(parents) - 1)
    zeros = np.zeros(len(parents), dtype=np.float32)

    def tree(shift: int) -> TokenTree:
        made = [tokens[0]]
        for token in tokens[1:]:
            made += [(token + shift) % vocab_size, token]
        return TokenTree(np.array(made, dtype=np.int64), np.array(parents, dtype=np.int32), zeros)

    return places, tree(1), tree(vocab_size // 2)


def _answers(lm: LanguageModel, asked: dict[str, Any]) -> list[tuple[list[int], Any]]:
    prompts = [lm.prompt_ids(text) for text in asked["prompts"]]
    # As many rows for all: an adaptive budget would follow what a scheme's calls cost, and say little of its drafts.
    rows = min(ROWS_OF_A_CALL, lm.session.max_tree_rows)
    return [(ids, lm.generate(ids, asked["max_new_tokens"], budget=rows)) for ids in prompts]


def _generated(answers: Sequence[tuple[list[int], Any]], completions: Sequence[str | None], lm: LanguageModel) -> dict[str, Any]:
    calls = sum(result.calls for _, result in answers)
    tokens = sum(len(result.token_ids) - 1 for _, result in answers)
    known = [(result.text, right) for (_, result), right in zip(answers, completions, strict=True) if right is not None]
    return {
        "tokens_per_call": tokens / calls if calls else None,
        "exact_match": sum(_folded(text) == _folded(right) for text, right in known) / len(known) if known else None,
    }


def _folded(text: str) -> str:
    return " ".join(text.split()).casefold()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m specstream.toolchain.quantize_quality", description="Compare a bundle with another.")
    parser.add_argument("what", choices=["reference", "compare"])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--no-generate", action="store_true", help="compare teacher-forced only")
    parser.add_argument("--row-prompts", type=int, default=ROW_PROMPTS, help="prompts on which rows are compared with others beside them")
    given = parser.parse_args(arguments)
    if given.what == "reference":
        result = reference(given.bundle, given.folder, given.threads)
    else:
        result = compare(given.bundle, given.folder, given.threads, not given.no_generate, given.row_prompts)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
