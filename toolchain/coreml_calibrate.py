"""Runs texts through a Core ML bundle by the reference evaluator and gathers what its products are given.

    python -m specstream.toolchain.coreml_calibrate BUNDLE TEXTS OUT.npz

in a process of its own: its memory is gone when weights are rounded. Knows sessions and token ids; nothing of schemes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specstream.quantize.coreml_moments import Moments
from specstream.runtimes.bundle import Bundle
from specstream.runtimes.coreml_session import CoreMLSession
from specstream.runtimes.mil_evaluator import MilModel
from specstream.runtimes.mil_program import Constant, Operation, open_package
from specstream.runtimes.session import tree_rows
from specstream.runtimes.tree import chain
from specstream.toolchain.quantize_quality import read_texts


def collect_moments(bundle: Bundle, texts: Sequence[tuple[list[int], list[int]]]) -> Moments:
    """Of all products whose factor is in the package's file of weights.

    Args:
        bundle: a Core ML bundle of fp16 weights.
        texts: token ids of prompts and of what follows them. They run as trees do, so that every row is scored and the head has its
            input too; delayed streams run behind each call. What does not fill a call is left out: padding sees itself only, and such rows
            have outliers that no text has.
    """
    sizes = bundle.manifest.contract.coreml
    assert sizes is not None
    package = bundle.path(bundle.manifest.graph)
    opened = open_package(package)
    moments = Moments()

    def load(name: str) -> MilModel:
        constants = opened.function(name).constants
        offsets: dict[str, int] = {}
        for key, constant in constants.items():
            if isinstance(constant, Constant) and not isinstance(constant.data, bytes):
                offsets[key] = constant.data[1]

        def observe(operation: Operation, values: Mapping[str, Any]) -> None:
            if operation.type == "linear":
                factor = operation.inputs["weight"][0]
                if isinstance(factor, str) and factor in offsets:
                    moments.add(offsets[factor], values["x"])

        model = MilModel(package, name)
        model.observer = observe
        return model

    session = CoreMLSession(package, sizes, load_function=load)
    for prompt, continuation in texts:
        session.rewind(0)
        tokens = (prompt + continuation)[: session.capacity - session.num_streams]
        step = session.max_tree_rows
        for start in range(0, len(tokens) - step + 1, step):
            part = tokens[start : start + step]
            session.run(tree_rows(chain(part[0], part[1:]), session.length))
            session.commit(range(len(part)))
            if session.delayed and start + step < len(tokens):
                session.draft(tokens[start + step])
    return moments


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m specstream.toolchain.coreml_calibrate", description="Gather inputs of products.")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("texts", type=Path, help="folder with texts, as quantize_quality writes them")
    parser.add_argument("out", type=Path, help=".npz to write")
    given = parser.parse_args(arguments)
    collect_moments(Bundle.load(given.bundle, check=False), read_texts(given.texts)).save(given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
