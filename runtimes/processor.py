"""What this machine's processor can do, as far as a bundle's quantization depends on it. Knows nothing of bundles."""

from __future__ import annotations

import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
VNNI_FLAGS = frozenset({"avx512_vnni", "avx_vnni"})


def saturates(cpuinfo: Path = CPUINFO) -> bool:
    """Whether sums of 8-bit products overflow here: an x86 processor without VNNI adds pairs of them in 16 bits.

    Only where the system tells (Linux); False where it does not, and on other processors.
    """
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    try:
        text = cpuinfo.read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    flags = next((line.partition(":")[2].split() for line in text.splitlines() if line.startswith("flags")), None)
    return flags is not None and not VNNI_FLAGS & set(flags)
