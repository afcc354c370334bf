"""specstream itself, as a worker beside its peers. MODEL is a bundle."""

from __future__ import annotations

import argparse
from collections.abc import Collection

import protocol

from specstream.runtimes import load, share_threads
from specstream.runtimes.language_model import Budget


def load_worker(given: argparse.Namespace) -> protocol.Generate:
    share_threads()  # the process is ours alone
    lm = load(given.model, threads=given.threads)
    draft, budget = given.draft, "adaptive" if given.draft != "none" else 1
    lm.drafter(draft)

    def generate(prompt_ids: list[int], max_new_tokens: int, stop_ids: Collection[int]) -> protocol.Answer:
        if set(stop_ids) != set(lm.codec.stop_ids):
            raise ValueError(f"the bundle ends texts at {sorted(lm.codec.stop_ids)}, {sorted(stop_ids)} was asked for")
        rows: Budget = budget  # type: ignore[assignment]
        result = lm.generate(prompt_ids, max_new_tokens, draft, budget=rows)
        seconds = (result.tokens - 1) / result.tokens_per_second if result.tokens_per_second else 0.0
        return protocol.Answer(list(result.token_ids), result.first_token_seconds, seconds, result.calls)

    return generate


if __name__ == "__main__":
    protocol.serve(load_worker, ["specstream-toolchain", "onnxruntime"])
