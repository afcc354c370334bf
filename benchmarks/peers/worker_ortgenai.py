"""onnxruntime-genai. MODEL is a folder from its model builder; drafts: none, lookup (its n-gram speculation)."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Iterator
from typing import Any

import onnxruntime_genai as og
import protocol

# As in the project's own example of all its means: chained lookups, a width that follows acceptance, pauses where nothing is accepted.
SPECULATION = {"ngram_size": 3, "max_draft_tokens": 8, "ngram_chained_lookup": True, "min_adaptive_k": 2, "cooldown": True}


def load_worker(given: argparse.Namespace) -> protocol.Generate:
    config = og.Config(str(given.model))
    config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": given.threads}}}}))
    model = og.Model(config)

    def tokens(generator: Any, prompt_ids: list[int]) -> Iterator[int]:
        generator.append_tokens(prompt_ids)
        while not generator.is_done():
            generator.generate_next_token()
            yield generator.get_next_tokens()[0]

    def generate(prompt_ids: list[int], max_new_tokens: int, stop_ids: Collection[int]) -> protocol.Answer:
        params = og.GeneratorParams(model)
        params.set_search_options(do_sample=False, max_length=len(prompt_ids) + max_new_tokens)
        if given.draft == "lookup":
            params.set_speculative_options(**SPECULATION)
        elif given.draft != "none":
            raise ValueError(f"drafts: {given.draft} is unknown")
        generator = og.Generator(model, params)
        return protocol.timed(tokens(generator, prompt_ids), max_new_tokens, stop_ids)

    return generate


if __name__ == "__main__":
    protocol.serve(load_worker, ["onnxruntime-genai", "onnxruntime"])
