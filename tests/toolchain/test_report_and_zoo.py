"""Reports of --json, and adapters by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specstream.models.errors import UserError
from specstream.models.fetch import sha256_of
from specstream.toolchain import zoo
from specstream.toolchain.report import write_report


def test_a_report_says_what_made_it(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    write_report(file, "bench", {"tokens": 3, "text": "é"})
    report = json.loads(file.read_text(encoding="utf-8"))
    assert list(report) == ["schema", "kind", "command", "versions", "tokens", "text"]
    assert report["command"][0] == "specstream"
    assert {"python", "platform", "specstream-toolchain", "onnxruntime"} <= set(report["versions"])
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_no_file_no_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_report(None, "bench", {})
    assert not list(tmp_path.iterdir())


def test_a_report_that_cannot_be_written_keeps_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "report.json"
    file.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(UserError, match="No space left"):
        write_report(file, "bench", {})
    assert file.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A zoo with one adapter and a folder that is none."""
    folder = tmp_path / "zoo"
    (folder / "one").mkdir(parents=True)
    (folder / "one" / "adapter.safetensors").write_bytes(b"weights")
    (folder / "empty").mkdir()
    monkeypatch.setattr(zoo, "zoo_folder", lambda: folder)
    return folder


def test_adapters_by_name_folder_or_checksum(shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert zoo.adapter_names() == ["one"]
    assert zoo.resolve_adapter("one") == shelf / "one"
    assert zoo.resolve_adapter(str(shelf / "empty")) == shelf / "empty"
    (tmp_path / "one").mkdir()
    monkeypatch.chdir(tmp_path)
    assert zoo.resolve_adapter("one") == Path("one")
    assert zoo.adapter_with(sha256_of(shelf / "one" / "adapter.safetensors")) == shelf / "one"
    assert zoo.adapter_with("0" * 64) is None


@pytest.mark.parametrize("name", ["two", "empty", "../zoo/one/x"])
def test_an_unknown_adapter_lists_the_known(shelf: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(shelf.parent.parent)
    with pytest.raises(UserError, match="one of: one"):
        zoo.resolve_adapter(name)
