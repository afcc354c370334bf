"""Replays the traces of a package of any kind through specstream's own session, in a process of its own:

    python -m specstream.toolchain.golden_replay PACKAGE

Prints what differs and exits with 0 when nothing does, 1 when something does, 2 when there is no such package. A package of ONNX graphs has
a script that does so without specstream.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from specstream.models.errors import UserError
from specstream.runtimes.bundle import Bundle
from specstream.runtimes.golden import GOLDEN_FILE, Golden, replay
from specstream.runtimes.language_model import open_session
from specstream.toolchain.export_pipeline import peak_rss_bytes


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m specstream.toolchain.golden_replay", description="Replay a package's traces.")
    parser.add_argument("package", type=Path)
    parser.add_argument("--traces", type=int, help="replay the first ones only")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="between log-probabilities")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(arguments)
    try:
        bundle = Bundle.load(given.package)
        golden = Golden.from_json(bundle.path(GOLDEN_FILE).read_text(encoding="utf-8"), str(given.package / GOLDEN_FILE))
        threads = 1 if bundle.manifest.contract.coreml is None else None
        session = open_session(bundle, threads=threads, capacity=golden.capacity)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    results: list[dict[str, str]] = []
    peak = 0
    for trace in golden.traces[: given.traces]:
        differences = replay(session, golden, trace, given.tolerance)
        peak = peak or peak_rss_bytes()
        results.append({"name": trace.name, "difference": str(differences[0]) if differences else ""})
        if not given.json:
            print(f"{trace.name}: {'; '.join(map(str, differences)) or 'same'}")
    if given.json:
        print(json.dumps({"traces": results, "peak_rss_bytes": peak}))
    return 1 if any(result["difference"] for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
