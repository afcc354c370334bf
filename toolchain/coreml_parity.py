"""Whether a saved Core ML package computes what the network computes, within the error of 16 bits.

The twin of :mod:`specstream.export.parity` for packages, run in a process of its own on the file that will be shipped:

    python -m specstream.toolchain.coreml_parity model.mlpackage sizes.json reference.npz

It drives the package as a text would, through :class:`CoreMLSession`: a prompt, one token, trees, each after the commits of those
before. Prints one JSON object and exits with 1 when the package fails.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from specstream.export import contract
from specstream.export.coreml_contract import CoreMLContract
from specstream.export.parity import Array, compare, read_reference
from specstream.models.errors import UserError
from specstream.runtimes.coreml_session import CoreMLSession
from specstream.runtimes.manifest import decode
from specstream.runtimes.session import Rows, prompt_rows

# Largest difference of a logit, as a share of the largest one. 16 bits round each result by up to 2^-11 of it; through some tens of
# layers such errors add up like a random walk: SmolLM2-135M's differ by 0.004 of the largest, the tiny networks of our tests by 0.006.
LIMIT: Final = 0.015


def check(package: Path, sizes: CoreMLContract, reference: Path) -> dict[str, Any]:
    """Run the stored calls on a package.

    Returns:
        As :func:`specstream.export.parity.check`, with ``limit``, and ``near_tie``: how close two logits may be for 16 bits to decide
        between them, twice the largest difference that was found.
    """
    session = CoreMLSession(package, sizes)
    calls, outputs = read_reference(reference)
    largest = max(float(np.abs(expected[contract.LOGITS]).max()) for expected in outputs)
    # A stream's log-probability is a difference of two numbers of 16 bits; pair scores have a size of their own.
    largest_pair = max(
        (float(np.abs(expected[contract.STREAM_PAIRS]).max()) for expected in outputs if contract.STREAM_PAIRS in expected), default=0.0
    )
    cases = {}
    for call, expected in zip(calls, outputs, strict=True):
        found, committed = _run(session, call.inputs)
        session.commit([row - committed for row in call.commit if row >= committed])
        if call.root_id is not None:
            draft = session.draft(call.root_id)
            found |= {contract.STREAM_IDS: draft.stream_ids[None], contract.STREAM_LOGPROBS: draft.stream_logprobs[None]}
            if draft.stream_pairs is not None:
                found[contract.STREAM_PAIRS] = draft.stream_pairs[None]
        cases[call.name] = compare(expected, found, LIMIT * largest, 2 * LIMIT * max(largest, largest_pair))
    rows = sum(case["rows"] for case in cases.values())
    difference = max(case["max_abs_diff"] for case in cases.values())
    return {
        "top1_agreement": sum(case["agreeing"] for case in cases.values()) / rows,
        "max_abs_diff": difference,
        "limit": LIMIT * largest,
        "near_ties": sum(case["near_ties"] for case in cases.values()),
        "near_tie": max(2 * difference, 2.0**-10 * largest),
        "ok": all(case["ok"] for case in cases.values()),
        "cases": cases,
    }


def _run(session: CoreMLSession, inputs: dict[str, Array]) -> tuple[dict[str, Array], int]:
    """One call, and how many of its rows were committed by then: a prompt longer than any function goes in pieces."""
    past, committed = session.length, 0
    tokens = inputs[contract.INPUT_IDS][0].tolist()
    while len(tokens) - committed > session.prompt_chunk:
        piece = tokens[committed : committed + session.prompt_chunk]
        session.run(prompt_rows(piece, past + committed))
        session.commit(range(len(piece)))
        committed += len(piece)
    rows = Rows(
        input_ids=inputs[contract.INPUT_IDS][0, committed:],
        position_ids=inputs[contract.POSITION_IDS][0, committed:],
        tree_mask=inputs[contract.TREE_MASK][committed:, committed:],
        logit_rows=inputs[contract.LOGIT_ROWS] - committed,
        stream_rows=inputs[contract.STREAM_ROWS] - committed,
    )
    output = session.run(rows, logits=True)
    assert output.logits is not None
    found: dict[str, Array] = {contract.NEXT_IDS: output.next_ids, contract.LOGITS: output.logits}
    if output.stream_ids is not None and output.stream_logprobs is not None:
        found |= {contract.STREAM_IDS: output.stream_ids, contract.STREAM_LOGPROBS: output.stream_logprobs}
    return found, committed


def read_sizes(file: Path) -> CoreMLContract:
    """A contract from JSON.

    Raises:
        UserError: the file holds something else.
    """
    problems: list[str] = []
    sizes = decode(CoreMLContract, json.loads(file.read_text(encoding="utf-8")), "", problems)
    if problems:
        raise UserError(f"{file}: {'; '.join(problems)}")
    assert isinstance(sizes, CoreMLContract)
    return sizes


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m specstream.toolchain.coreml_parity", description="Compare a package with a reference.")
    parser.add_argument("package", type=Path)
    parser.add_argument("sizes", type=Path, help="its contract, JSON")
    parser.add_argument("reference", type=Path, help=".npz written by specstream.export.parity.write_reference")
    given = parser.parse_args(arguments)
    result = check(given.package, read_sizes(given.sizes), given.reference)
    print(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
