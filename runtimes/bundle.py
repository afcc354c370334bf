"""The bundle: a folder that holds a model for a device, checks itself when it is loaded and appears at once or not at all.

Knows files, sizes and hashes; nothing of graphs, tokens or tensors. Nothing here ever unpickles.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import FrameType, TracebackType
from typing import Any, ClassVar, Self

from specstream.models.errors import UserError
from specstream.runtimes.manifest import MANIFEST_NAME, FileEntry, Manifest


class Bundle:
    """A bundle on disk, whose files are those that its manifest lists."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest

    @classmethod
    def load(cls, path: str | os.PathLike[str], check: bool = True) -> Bundle:
        """Open the bundle in the folder ``path``.

        Args:
            check: compare the sha256 of every file (about a second for each GB); sizes are always compared.

        Raises:
            UserError: no bundle there, made by a newer specstream, or files that are missing, changed or outside the folder.
        """
        folder = Path(path)
        if not folder.exists():
            raise UserError(f"{folder}: no such bundle; make one with 'specstream export MODEL {folder}'")
        if not (folder / MANIFEST_NAME).is_file():
            raise UserError(f"{folder}: not a bundle (a folder with {MANIFEST_NAME} was expected)")
        source = folder / MANIFEST_NAME
        try:
            manifest = Manifest.from_json(source.read_text(encoding="utf-8"), source)
        except UnicodeDecodeError as error:
            raise UserError(f"{source}: not UTF-8 text ({error.reason}); the bundle is damaged, export it again") from None
        bundle = cls(folder, manifest)
        problems = [p for entry in manifest.files if (p := bundle._problem_with(entry, check)) is not None]
        if not bundle.has(manifest.graph):
            problems.append(f"graph {manifest.graph!r} is not among the files it lists")
        if problems:
            raise UserError(f"{folder}: {'; '.join(problems)}; the bundle is damaged, copy or export it again")
        return bundle

    def path(self, name: str) -> Path:
        """Path of the listed file ``name``, or of a folder of listed files.

        Raises:
            UserError: the manifest lists no such file.
        """
        if not self.has(name):
            raise UserError(f"{self.folder}: has no file {name!r} (it lists {', '.join(sorted(self._listed()))})")
        return self.folder / name

    def has(self, name: str) -> bool:
        """Whether the manifest lists the file ``name``, or files below a folder of that name."""
        return any(path == name or path.startswith(f"{name}/") for path in self._listed())

    def _listed(self) -> set[str]:
        return {entry.path for entry in self.manifest.files}

    def _problem_with(self, entry: FileEntry, check: bool) -> str | None:
        if not _stays_inside(entry.path):
            return f"its manifest names {entry.path!r}, outside the folder"
        # A link at a path inside the folder is fine (shared weights): what it holds is checked like any file.
        file = self.folder / entry.path
        if not file.is_file():
            return f"{entry.path} is missing"
        size = file.stat().st_size
        if size != entry.bytes:
            return f"{entry.path} has {size} bytes ({entry.bytes} were expected)"
        if check and sha256(file) != entry.sha256:
            return f"{entry.path} is not the file that was written (another sha256)"
        return None


class BundleWriter:
    """Writes a bundle into a temporary folder beside ``out`` and renames it at the end.

    Use as a context manager: write files at :meth:`path`, then call :meth:`finish`. Leaving without it (an exception, Ctrl-C,
    SIGTERM) removes everything. A folder left by a process that was killed outright is removed by the next write to ``out``.

        with BundleWriter("out") as writer:
            writer.path("model.onnx").write_bytes(graph)
            writer.finish(manifest)

    Args:
        out: the folder to make.
        force: replace ``out`` when it is a bundle (or an empty folder) already.
        archive: packs a folder into a file, which appears as ``out``.zip beside the bundle, just before it.
    """

    _active: ClassVar[set[Path]] = set()  # temporary folders of this process that are being written

    def __init__(self, out: str | os.PathLike[str], force: bool = False, archive: Callable[[Path, Path], None] | None = None) -> None:
        self.out = Path(os.path.abspath(out))
        self.force = force
        self.folder = self.out.with_name(f".{self.out.name}.partial-{os.getpid()}")
        self.archive = self.out.with_name(f"{self.out.name}.zip")
        self._partial_archive = self.folder.with_name(f"{self.folder.name}.zip")
        self._pack = archive
        self._made_parents: list[Path] = []
        self._signals: dict[int, Any] = {}
        self._told_to_stop: BaseException | None = None
        self._finished = False

    def __enter__(self) -> Self:
        self._check_out()
        if self.folder in self._active:
            raise UserError(f"{self.out}: is already being written by this process")
        self._catch_signals()
        try:
            for parent in reversed([p for p in self.out.parents if not p.exists()]):
                _make_folder(parent)
                self._made_parents.append(parent)
            if not self.out.parent.is_dir():
                raise UserError(f"{self.out.parent}: is not a folder; choose another place for the bundle")
            self._remove_stale()
            _make_folder(self.folder)
        except BaseException:
            self._clean_up()
            raise
        self._active.add(self.folder)
        return self

    def path(self, name: str) -> Path:
        """Where to write the file ``name`` (a relative POSIX path); its folder exists."""
        if not _stays_inside(name):
            raise ValueError(f"a bundle's file must stay inside its folder: {name!r}")
        self._go_on()
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        return file

    def reserve(self, needed: int) -> None:
        """Check that ``needed`` bytes are free where the bundle goes.

        Raises:
            UserError: fewer are.
        """
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise UserError(
                f"{self.out}: {needed / 1e9:.2f} GB needed, {free / 1e9:.2f} GB free on that disk; free some space or write elsewhere"
            )

    def seal(self, manifest: Manifest) -> Bundle:
        """Hash the files and write the manifest with them: the temporary folder is a bundle, until something in it changes.

        Args:
            manifest: its ``files`` are replaced by those found.
        """
        found = sorted(p for p in self.folder.rglob("*") if p.is_file())
        entries = [FileEntry(p.relative_to(self.folder).as_posix(), sha256(p), p.stat().st_size) for p in found]
        manifest = dataclasses.replace(manifest, files=tuple(e for e in entries if e.path != MANIFEST_NAME))
        if not Bundle(self.folder, manifest).has(manifest.graph):
            raise ValueError(f"the manifest's graph {manifest.graph!r} was not written")
        (self.folder / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
        return Bundle(self.folder, manifest)

    def finish(self, manifest: Manifest) -> Bundle:
        """Hash the files, write the manifest with them and rename the folder to ``out``.

        Args:
            manifest: as for :meth:`seal`.
        """
        self._go_on()
        manifest = self.seal(manifest).manifest
        if self._pack is not None:
            self._pack(self.folder, self._partial_archive)
        self._check_out()
        if self._pack is not None:
            os.replace(self._partial_archive, self.archive)
        if os.path.lexists(self.out):
            old = self.out.with_name(f".{self.out.name}.replaced-{os.getpid()}")
            os.rename(self.out, old)
            try:
                os.rename(self.folder, self.out)
            except BaseException:
                os.rename(old, self.out)
                raise
            _remove(old)
        else:
            os.rename(self.folder, self.out)
        self._finished = True
        return Bundle(self.out, manifest)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._clean_up()
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise UserError(f"{self.out}: the disk is full; free some space or write elsewhere") from error

    def _check_out(self) -> None:
        if self._pack is not None and not self.force and os.path.lexists(self.archive):
            raise UserError(f"{self.archive}: exists already; choose another place or replace it with --force")
        if self._pack is not None and self.archive.is_dir():
            raise UserError(f"{self.archive}: is a folder, and the archive goes there; choose another place")
        if not os.path.lexists(self.out):
            return
        if not self.force:
            raise UserError(f"{self.out}: exists already; choose another folder or replace it with --force")
        is_bundle = (self.out / MANIFEST_NAME).is_file()
        is_empty_folder = self.out.is_dir() and not any(self.out.iterdir())
        if not (is_bundle or is_empty_folder):
            raise UserError(f"{self.out}: exists and is not a bundle, so --force does not replace it; choose another folder")

    def _remove_stale(self) -> None:
        """Remove what killed processes left of earlier writes to the same ``out``."""
        pattern = re.compile(re.escape(f".{self.out.name}.") + r"(?:partial|replaced)-(\d+)(?:\.zip)?")
        for folder in self.out.parent.iterdir():
            match = pattern.fullmatch(folder.name)
            # In a container a new process often has the old one's number: a folder with ours that we do not write is stale.
            if match and folder not in self._active and (int(match[1]) == os.getpid() or not _is_alive(int(match[1]))):
                _remove(folder)

    def _catch_signals(self) -> None:
        """Let SIGTERM and SIGHUP end the process through an exception, as SIGINT does, so that ``__exit__`` runs.

        An exception that reaches Python inside a library's ``__del__`` is lost, so it is kept and raised again by :meth:`path` and
        :meth:`finish`.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for name, usual in (("SIGINT", signal.default_int_handler), ("SIGTERM", signal.SIG_DFL), ("SIGHUP", signal.SIG_DFL)):
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is usual:
                self._signals[number] = signal.signal(number, self._stop)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._told_to_stop = KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)
        raise self._told_to_stop

    def _go_on(self) -> None:
        if self._told_to_stop is not None:
            raise self._told_to_stop

    def _clean_up(self) -> None:
        self._active.discard(self.folder)
        try:
            if not self._finished:
                _remove(self.folder)
                _remove(self._partial_archive)
                for parent in reversed(self._made_parents):
                    with contextlib.suppress(OSError):  # something else was put there meanwhile
                        parent.rmdir()
        finally:
            for number, handler in self._signals.items():
                signal.signal(number, handler)
            self._signals.clear()


def sha256(file: Path) -> str:
    """sha256 of a file's content in hex, read in pieces."""
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _stays_inside(name: str) -> bool:
    """Whether a manifest's path names something below the bundle's folder, on any system."""
    windows = PureWindowsPath(name)
    parts = PurePosixPath(name).parts + windows.parts
    return bool(name) and name != "." and not (name.startswith("/") or windows.drive or windows.root or ".." in parts or "\0" in name)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OSError):
        return True  # another user's, or not known: leave it
    return True


def _make_folder(path: Path) -> None:
    try:
        path.mkdir()
    except OSError as error:
        raise UserError(f"{path}: cannot make this folder ({error.strerror})") from error


def _remove(path: Path) -> None:
    if os.path.isdir(path) and not os.path.islink(path):  # these, unlike pathlib's, are false for a name that cannot be
        shutil.rmtree(path, ignore_errors=True)
    elif os.path.lexists(path):
        path.unlink()
