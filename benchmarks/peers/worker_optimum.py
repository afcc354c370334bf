"""optimum's ORTModelForCausalLM. MODEL is a folder from `optimum-cli export onnx`; no drafts."""

from __future__ import annotations

import argparse
import time
from collections.abc import Collection
from typing import Any

import onnxruntime
import protocol
import torch
from optimum.onnxruntime import ORTModelForCausalLM
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer


class FirstToken(BaseStreamer):  # type: ignore[misc]
    """Notes when the first token came; what is put before it is the prompt."""

    def __init__(self) -> None:
        self.puts = 0
        self.seconds = 0.0

    def put(self, _value: Any) -> None:
        self.puts += 1
        if self.puts == 2:
            self.seconds = time.perf_counter()

    def end(self) -> None: ...


def load_worker(given: argparse.Namespace) -> protocol.Generate:
    if given.draft != "none":
        raise ValueError(f"drafts: {given.draft} is unknown")
    torch.set_num_threads(given.threads)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = given.threads
    model = ORTModelForCausalLM.from_pretrained(given.model, session_options=options)

    def generate(prompt_ids: list[int], max_new_tokens: int, stop_ids: Collection[int]) -> protocol.Answer:
        config = GenerationConfig(do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=sorted(stop_ids), pad_token_id=min(stop_ids))
        ids, streamer = torch.tensor([prompt_ids]), FirstToken()
        start = time.perf_counter()
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config, streamer=streamer)
        end = time.perf_counter()
        token_ids = [int(token) for token in out[0, len(prompt_ids) :]]
        return protocol.Answer(token_ids, streamer.seconds - start, end - streamer.seconds)

    return generate


if __name__ == "__main__":
    protocol.serve(load_worker, ["optimum", "optimum-onnx", "onnxruntime", "transformers"])
