"""How the runner and its workers talk: one JSON object a line, over a worker's standard input and output.

A worker says ``{"ready": true, "versions": {...}}`` once it has loaded, then answers each request ``{"prompt_ids", "max_new_tokens",
"stop_ids"}`` with ``{"token_ids", "first_token_seconds", "decode_seconds"}``, or with ``{"error"}``. It knows nothing of the other
workers, needs nothing but Python's own library here, and waits for its next line without using a core.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Answer:
    """One text.

    Attributes:
        token_ids: all emitted tokens, a stop token included.
        first_token_seconds: from the request to the first token.
        decode_seconds: from the first token to the last.
        calls: of the model after the prefill, where the worker can tell.
    """

    token_ids: list[int]
    first_token_seconds: float
    decode_seconds: float
    calls: int | None = None


Generate = Callable[[list[int], int, Collection[int]], Answer]


def timed(tokens: Iterable[int], max_new_tokens: int, stop_ids: Collection[int]) -> Answer:
    """Take tokens until one ends the text, with the clock running. The work of the first begins when it is asked for."""
    start = time.perf_counter()
    first = start
    found: list[int] = []
    for token in tokens:
        if not found:
            first = time.perf_counter()
        found.append(int(token))
        if found[-1] in stop_ids or len(found) >= max_new_tokens:
            break
    return Answer(found, first - start, time.perf_counter() - first)


def cut(token_ids: Sequence[int], max_new_tokens: int, stop_ids: Collection[int]) -> list[int]:
    """Tokens up to the first that ends the text."""
    kept: list[int] = []
    for token in token_ids[:max_new_tokens]:
        kept.append(int(token))
        if kept[-1] in stop_ids:
            break
    return kept


def arguments() -> argparse.Namespace:
    """What every worker is given: MODEL, --threads and --draft."""
    parser = argparse.ArgumentParser(description="A worker of benchmarks/peers/run.py.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--draft", default="none", help="none, or a way of drafting that the worker knows")
    return parser.parse_args()


def serve(load: Callable[[argparse.Namespace], Generate], packages: Sequence[str]) -> None:
    """Load, then answer requests until standard input ends. What libraries print goes to standard error."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # C++ code prints to descriptor 1 whatever sys.stdout is

    def reply(message: dict[str, object]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    try:
        generate = load(arguments())
    except Exception as error:
        reply({"error": describe(error)})
        raise
    reply({"ready": True, "versions": {name: importlib.metadata.version(name) for name in packages}})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = generate(request["prompt_ids"], request["max_new_tokens"], frozenset(request["stop_ids"]))
        except Exception as error:
            reply({"error": describe(error)})
            raise
        reply(asdict(answer))


def describe(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
