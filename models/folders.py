"""Where specstream keeps what it fetched and measured. Imports nothing heavy: devices use it too."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """``$SPECSTREAM_CACHE``, or the platform's cache folder for specstream."""
    if chosen := os.environ.get("SPECSTREAM_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "specstream"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "specstream" / "Cache"
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "specstream"
