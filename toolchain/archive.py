"""A folder packed into a zip file that is the same bytes each time: names sorted, no dates, no owners, nothing compressed."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path
from typing import Final

DATE: Final = (1980, 1, 1, 0, 0, 0)  # the first one that the format knows
MODE: Final = 0o100644  # a plain file, readable by all


def pack(folder: Path, file: Path) -> None:
    """Write all files below ``folder`` to the zip ``file``.

    Stored as they are: weights do not shrink, an app can map them without unpacking, and no version of a compressor plays a part.
    """
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, strict_timestamps=True) as archive:
        for path in sorted((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.relative_to(folder).as_posix()):
            entry = zipfile.ZipInfo(path.relative_to(folder).as_posix(), DATE)
            entry.create_system = 3  # else it is the system of who packs
            entry.external_attr = MODE << 16
            entry.file_size = path.stat().st_size
            with path.open("rb") as source, archive.open(entry, "w", force_zip64=entry.file_size >= 1 << 31) as target:
                shutil.copyfileobj(source, target, 1 << 20)
