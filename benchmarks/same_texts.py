"""Do two bundles of the same model say the same? Tokens of one with each kind of draft, against the other's plain text.

    python benchmarks/same_texts.py sql-coreml sql-onnx --data benchmarks/data/sql.jsonl --prompts 10 --json same.json

What differs is shown with the two best logits of a plain call of the first bundle at that place. It is a near-tie when the two tokens
are those two, closer than the bundle's rounding (``parity.near_tie`` in its manifest). No times: a Core ML bundle is computed by the
reference evaluator where there is no Core ML.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specstream.runtimes import load
from specstream.runtimes.language_model import LanguageModel
from specstream.runtimes.session import prefill, tree_rows
from specstream.runtimes.tree import FloatArray, root_only


def plain_logits(lm: LanguageModel, prompt: Sequence[int], text: Sequence[int]) -> FloatArray:
    """Logits [V] after the prompt and a beginning of a text, one token a call."""
    lm.session.rewind(0)
    logits = prefill(lm.session, prompt, logits=True).logits
    for token in text:
        logits = lm.session.run(tree_rows(root_only(token), lm.session.length), logits=True).logits
        lm.session.commit([0])
    assert logits is not None
    return logits[0]


def examine(lm: LanguageModel, prompt: Sequence[int], one: Sequence[int], other: Sequence[int]) -> dict[str, Any]:
    """The first place where two texts differ."""
    place = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    logits = plain_logits(lm, prompt, one[:place])
    best = [int(i) for i in np.argsort(-logits, kind="stable")[:2]]
    pair = [int(text[place]) if place < len(text) else None for text in (one, other)]
    gap = float(logits[best[0]] - logits[best[1]])
    return {
        "token": place,
        "said": pair,
        "best": best,
        "logits": [float(logits[i]) for i in best],
        "near_tie": set(pair) == set(best) and gap < lm.session.near_tie,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("reference")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--drafts", nargs="+", default=["streams", "joined"])
    parser.add_argument("--budget", type=int, default=16)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = [json.loads(line) for line in given.data.read_text(encoding="utf-8").splitlines()[: given.prompts]]
    one, other = load(given.bundle, profile=False), load(given.reference, profile=False)
    found: dict[str, Any] = {
        name: {"prompts": 0, "same": 0, "tokens": 0, "calls": 0, "accepted": 0, "mismatches": []} for name in given.drafts
    }
    for number, row in enumerate(rows):
        prompt = one.prompt_ids(row["prompt"])
        expected = other.generate(prompt, given.max_new_tokens, "none").token_ids
        for name, figures in found.items():
            result = one.generate(prompt, given.max_new_tokens, name, budget=given.budget)
            figures["prompts"] += 1
            figures["tokens"] += result.tokens
            figures["calls"] += result.calls
            figures["accepted"] += result.accepted
            if result.token_ids == expected:
                figures["same"] += 1
            else:
                figures["mismatches"].append({"prompt": number, **examine(one, prompt, result.token_ids, expected)})
                print(f"{name}: {figures['mismatches'][-1]}", flush=True)
        print(number, {name: (figures["same"], figures["prompts"]) for name, figures in found.items()}, flush=True)
    for name, figures in found.items():
        decoded = figures["tokens"] - figures["prompts"]
        figures["tokens_per_call"] = decoded / figures["calls"] if figures["calls"] else None
        print(f"{name}: {figures['same']} of {figures['prompts']} texts the same, {figures['tokens_per_call']:.2f} tokens per call")
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0 if all(m["near_tie"] for figures in found.values() for m in figures["mismatches"]) else 1


if __name__ == "__main__":
    sys.exit(main())
