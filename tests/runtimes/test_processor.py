"""Processors whose 8-bit sums overflow, and bundles that need others."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from specstream.models.errors import UserError
from specstream.runtimes import ort_session
from specstream.runtimes.bundle import Bundle
from specstream.runtimes.ort_session import OrtSession
from specstream.runtimes.processor import saturates

from .tiny_bundle import write_bundle


@pytest.mark.parametrize(
    ("machine", "cpuinfo", "expected"),
    [
        ("x86_64", "processor : 0\nflags\t\t: fpu avx2 fma\n", True),
        ("x86_64", "flags\t\t: fpu avx512f avx512_vnni\n", False),
        ("AMD64", "flags : avx2 avx_vnni\n", False),
        ("aarch64", "flags : none\n", False),
        ("x86_64", "no such line\n", False),
        ("x86_64", None, False),
    ],
)
def test_flags_say_whether_sums_overflow(
    machine: str, cpuinfo: str | None, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    file = tmp_path / "cpuinfo"
    if cpuinfo is not None:
        file.write_text(cpuinfo)
    assert saturates(file) is expected


def test_a_bundle_that_would_compute_wrong_results_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = write_bundle(tmp_path / "bundle")
    monkeypatch.setattr(ort_session, "saturates", lambda: True)
    OrtSession(bundle)  # says nothing of what it needs
    quantization = dataclasses.replace(bundle.manifest.quantization, scheme="w8a8", requires="VNNI")
    needing = Bundle(bundle.folder, dataclasses.replace(bundle.manifest, quantization=quantization))
    with pytest.raises(UserError, match=r"w8a8 weights need a processor with VNNI.*int8 or int4"):
        OrtSession(needing)
    monkeypatch.setattr(ort_session, "saturates", lambda: False)
    OrtSession(needing)
