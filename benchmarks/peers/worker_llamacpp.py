"""llama.cpp through llama-cpp-python. MODEL is a GGUF file, or a folder with one; drafts: none, lookup."""

from __future__ import annotations

import argparse
from collections.abc import Collection

import protocol
from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding


def load_worker(given: argparse.Namespace) -> protocol.Generate:
    file = next(given.model.glob("*.gguf")) if given.model.is_dir() else given.model
    lookup = LlamaPromptLookupDecoding(max_ngram_size=2, num_pred_tokens=DRAFTED)
    draft = {"none": None, "lookup": lookup}[given.draft]
    llama = Llama(str(file), n_ctx=2048, n_threads=given.threads, n_threads_batch=given.threads, draft_model=draft, verbose=False)

    def generate(prompt_ids: list[int], max_new_tokens: int, stop_ids: Collection[int]) -> protocol.Answer:
        llama.reset()  # or the beginning that prompts share would be kept from the text before
        tokens = llama.generate(prompt_ids, top_k=1, temp=0.0, repeat_penalty=1.0)
        return protocol.timed(tokens, max_new_tokens, stop_ids)

    return generate


DRAFTED = 2  # tokens of a draft: what the binding's README advises for machines without a GPU

if __name__ == "__main__":
    protocol.serve(load_worker, ["llama-cpp-python"])
