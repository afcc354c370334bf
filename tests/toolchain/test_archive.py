"""Zip files that are the same bytes each time."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

from specstream.toolchain.archive import pack


def write(folder: Path, names: list[str], when: int, mode: int) -> None:
    for name in names:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(name.encode() * 100)
        file.chmod(mode)
        os.utime(file, (when, when))


def test_only_names_and_contents_count(tmp_path: Path) -> None:
    names = ["b.txt", "a/c.bin", "a/B.bin", "é.json"]
    write(tmp_path / "one", names, 1_000_000_000, 0o644)
    write(tmp_path / "two", names[::-1], 1_700_000_000, 0o600)
    pack(tmp_path / "one", tmp_path / "one.zip")
    pack(tmp_path / "two", tmp_path / "two.zip")
    assert (tmp_path / "one.zip").read_bytes() == (tmp_path / "two.zip").read_bytes()
    with zipfile.ZipFile(tmp_path / "one.zip") as archive:
        assert archive.testzip() is None
        assert archive.namelist() == ["a/B.bin", "a/c.bin", "b.txt", "é.json"]
        assert {entry.date_time for entry in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        assert {entry.external_attr >> 16 for entry in archive.infolist()} == {0o100644}
        assert archive.read("a/c.bin") == b"a/c.bin" * 100
    (tmp_path / "two" / "b.txt").write_bytes(b"other")
    pack(tmp_path / "two", tmp_path / "two.zip")
    assert (tmp_path / "one.zip").read_bytes() != (tmp_path / "two.zip").read_bytes()
