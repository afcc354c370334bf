"""OpenVINO GenAI. MODEL is a folder from optimum-intel's export; drafts: none, lookup (its prompt lookup)."""

from __future__ import annotations

import argparse
import time
from collections.abc import Collection
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
import protocol

LOOKUP = {"num_assistant_tokens": 5, "max_ngram_size": 3}


class FirstToken(genai.StreamerBase):  # type: ignore[misc]
    """Notes when the first token came."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: float | None = None

    def write(self, _tokens: Any) -> genai.StreamingStatus:
        if self.seconds is None:
            self.seconds = time.perf_counter()
        return genai.StreamingStatus.RUNNING

    def end(self) -> None: ...


def load_worker(given: argparse.Namespace) -> protocol.Generate:
    properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": given.threads}
    # Without it, the beginning that prompts share would be kept from the text before.
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    properties["scheduler_config"] = scheduler
    if given.draft == "lookup":
        properties["prompt_lookup"] = True
    elif given.draft != "none":
        raise ValueError(f"drafts: {given.draft} is unknown")
    pipeline = genai.LLMPipeline(str(given.model), "CPU", **properties)

    def generate(prompt_ids: list[int], max_new_tokens: int, stop_ids: Collection[int]) -> protocol.Answer:
        config = genai.GenerationConfig()
        config.do_sample = False
        config.max_new_tokens = max_new_tokens
        config.stop_token_ids = set(stop_ids)
        config.eos_token_id = min(stop_ids)
        if given.draft == "lookup":
            config.num_assistant_tokens = LOOKUP["num_assistant_tokens"]
            config.max_ngram_size = LOOKUP["max_ngram_size"]
        inputs = ov.Tensor(np.array([prompt_ids], dtype=np.int64))
        streamer = FirstToken()
        start = time.perf_counter()
        result = pipeline.generate(inputs, config, streamer)
        end = time.perf_counter()
        first = streamer.seconds or end
        return protocol.Answer(protocol.cut(result.tokens[0], max_new_tokens, stop_ids), first - start, end - first)

    return generate


if __name__ == "__main__":
    protocol.serve(load_worker, ["openvino", "openvino-genai", "optimum-intel", "nncf"])
