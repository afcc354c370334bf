"""A worker for tests: continues a prompt with its last token + 1, + 2, ...; drafts `slow`, `broken`, `silent` misbehave."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Collection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "peers"))
import protocol


def load(given: argparse.Namespace) -> protocol.Generate:
    if given.draft == "unknown":
        raise ValueError("no such draft\nand more")

    def generate(prompt_ids: list[int], max_new_tokens: int, stop_ids: Collection[int]) -> protocol.Answer:
        print("libraries may print")
        if given.draft == "broken" and prompt_ids[0] == 13:
            raise RuntimeError("cannot")
        if given.draft == "silent":
            sys.exit(3)
        step = 2 if given.draft == "other" else 1
        pause = 0.004 if given.draft == "slow" else 0.001

        def tokens() -> object:
            for i in range(1, 1000):
                time.sleep(pause)
                yield prompt_ids[-1] + step * i

        return protocol.timed(tokens(), max_new_tokens, stop_ids)  # type: ignore[arg-type]

    return generate


if __name__ == "__main__":
    protocol.serve(load, ["numpy"])
