"""Threads that all sessions of a process share. Each test has processes of its own, since ONNX Runtime has one such pool in each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from specstream.runtimes.bundle import Bundle
from specstream.runtimes.drafters import StreamDrafter
from specstream.runtimes.ort_session import OrtSession
from specstream.runtimes.speculate import speculate

from .tiny_bundle import write_bundle

HEAD = """
import os
import sys
from pathlib import Path

from specstream.models.errors import UserError
from specstream.runtimes import Bundle, share_threads
from specstream.runtimes.drafters import StreamDrafter
from specstream.runtimes.ort_session import OrtSession
from specstream.runtimes.speculate import speculate

bundle = Bundle.load(Path(sys.argv[1]))


def said(session):
    blocks = speculate(session, [1, 2, 3], StreamDrafter(), budget=4, max_new_tokens=12)
    return [token for block in blocks for token in block.tokens]


"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return write_bundle(tmp_path_factory.mktemp("tiny") / "bundle")


def run(bundle: Bundle, tmp_path: Path, program: str) -> list[str]:
    file = tmp_path / "program.py"
    file.write_text(HEAD + program, encoding="utf-8")
    done = subprocess.run([sys.executable, "-P", str(file), str(bundle.folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_sessions_share_a_pool(bundle: Bundle, tmp_path: Path) -> None:
    """One more thread for all of them, the same text, and nothing of ONNX Runtime's own warnings."""
    found = run(
        bundle,
        tmp_path,
        """
share_threads()
before = len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 0
sessions = [OrtSession(bundle, threads=2), OrtSession(bundle, threads=2)]
print(len(os.listdir("/proc/self/task")) - before if sys.platform == "linux" else 1)
print(*said(sessions[0]))
print(*said(sessions[1]))
""",
    )
    alone = OrtSession(bundle, threads=1)
    blocks = speculate(alone, [1, 2, 3], StreamDrafter(), budget=4, max_new_tokens=12)
    expected = " ".join(str(token) for block in blocks for token in block.tokens)
    assert found == ["1", expected, expected]


def test_a_pool_has_one_size(bundle: Bundle, tmp_path: Path) -> None:
    found = run(
        bundle,
        tmp_path,
        """
share_threads()
OrtSession(bundle, threads=1)  # needs no pool
OrtSession(bundle, threads=2)
for threads in (3, 1):
    try:
        OrtSession(bundle, threads=threads)
    except UserError as error:
        print(error)
""",
    )
    assert [line.partition(",")[0] for line in found] == ["threads: 3 given", "threads: 1 given"]
    assert all("share 2" in line for line in found)


def test_nothing_is_shared_unless_asked_for(bundle: Bundle, tmp_path: Path) -> None:
    """A program may go on making sessions of its own as it likes, and bundles may have different numbers of threads."""
    found = run(
        bundle,
        tmp_path,
        """
import onnxruntime

one, two, three = (OrtSession(bundle, threads=threads) for threads in (1, 2, 3))
onnxruntime.InferenceSession(bundle.path(bundle.manifest.graph), providers=["CPUExecutionProvider"])
print(said(one) == said(two) == said(three))
""",
    )
    assert found == ["True"]


def test_numbers_of_threads_are_tried_in_processes_of_their_own(bundle: Bundle, tmp_path: Path) -> None:
    """`tune` measures calls as they will be made: on a shared pool, which cannot change its size."""
    found = run(
        bundle,
        tmp_path,
        """
from specstream.toolchain.tune_pipeline import TuneOptions, tune

if __name__ == "__main__":
    share_threads()
    options = TuneOptions(threads=(1, 2, 3), contexts=(8,), rounds=1, max_new_tokens=4)
    profile, _ = tune(bundle.folder, ["ab", "cd"], options, lambda text: None)
    print(sorted({call.threads for call in profile.call_cost}), profile.prompts)
""",
    )
    assert found == ["[1, 2, 3] 2"]
