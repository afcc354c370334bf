from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from specstream.models.errors import UserError
from specstream.runtimes.bundle import Bundle, BundleWriter, sha256

from .tiny_bundle import manifest


def write(out: Path, force: bool = False, content: bytes = b"graph") -> Bundle:
    with BundleWriter(out, force=force) as writer:
        writer.path("model.onnx").write_bytes(content)
        writer.path("sub/weights.data").write_bytes(b"w" * 1000)
        return writer.finish(manifest(40))


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_what_is_written_can_be_loaded(tmp_path: Path) -> None:
    written = write(tmp_path / "out")
    assert names(tmp_path) == ["out"]
    read = Bundle.load(tmp_path / "out")
    assert read.manifest == written.manifest
    assert [(f.path, f.bytes) for f in read.manifest.files] == [("model.onnx", 5), ("sub/weights.data", 1000)]
    assert read.path("sub/weights.data").read_bytes() == b"w" * 1000
    assert read.has("model.onnx")
    assert not read.has("specstream.json")
    with pytest.raises(UserError, match="has no file 'other'"):
        read.path("other")


def test_a_copied_or_moved_bundle_is_still_one(tmp_path: Path) -> None:
    write(tmp_path / "out")
    shutil.move(tmp_path / "out", tmp_path / "moved")
    assert Bundle.load(str(tmp_path / "moved")).path("model.onnx").parent == tmp_path / "moved"


# Every way of damage, and what is said about it.


def flip_byte(folder: Path) -> None:
    data = bytearray((folder / "sub/weights.data").read_bytes())
    data[500] ^= 1
    (folder / "sub/weights.data").write_bytes(data)


def truncate(folder: Path) -> None:
    (folder / "sub/weights.data").write_bytes(b"w" * 999)


def edit_manifest(**changes: object) -> object:
    def edit(folder: Path) -> None:
        file = folder / "specstream.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return edit


def name_file(path: str) -> object:
    def edit(folder: Path) -> None:
        file = folder / "specstream.json"
        data = json.loads(file.read_text())
        (folder.parent / "secret").write_bytes(b"s" * 3)
        data["files"].append({"path": path.replace("PARENT", str(folder.parent)), "sha256": sha256(folder.parent / "secret"), "bytes": 3})
        file.write_text(json.dumps(data))

    return edit


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip_byte, r"sub/weights\.data is not the file that was written"),
        (truncate, r"sub/weights\.data has 999 bytes \(1000 were expected\)"),
        (lambda f: (f / "model.onnx").unlink(), r"model\.onnx is missing"),
        (lambda f: (f / "specstream.json").unlink(), r"not a bundle"),
        (lambda f: (f / "specstream.json").write_bytes(b"\xff\xfe"), "not UTF-8"),
        (lambda f: (f / "specstream.json").write_text("{"), "not JSON"),
        (edit_manifest(format=2), "made by a newer specstream"),
        (edit_manifest(surprise=2), "unknown key surprise"),
        (edit_manifest(graph="other.onnx"), r"graph 'other\.onnx' is not among the files"),
        (name_file("../secret"), r"names '\.\./secret', outside the folder"),
        (name_file("sub/../../secret"), "outside the folder"),
        (name_file("PARENT/secret"), "outside the folder"),
        (name_file("..\\secret"), "outside the folder"),
        (name_file("C:secret"), "outside the folder"),
        (name_file("\\\\host\\secret"), "outside the folder"),
        (name_file(""), "outside the folder"),
        (name_file("."), "outside the folder"),
        (name_file("a\0b"), "outside the folder"),
    ],
)
def test_damage_is_found_and_named(tmp_path: Path, damage: object, message: str) -> None:
    folder = write(tmp_path / "out").folder
    damage(folder)  # type: ignore[operator]
    with pytest.raises(UserError, match=message) as caught:
        Bundle.load(folder)
    assert "\n" not in str(caught.value)


def test_all_damaged_files_are_named_at_once(tmp_path: Path) -> None:
    folder = write(tmp_path / "out").folder
    flip_byte(folder)
    (folder / "model.onnx").unlink()
    with pytest.raises(UserError, match=r"model\.onnx is missing; sub/weights\.data is not the file"):
        Bundle.load(folder)


def test_sizes_are_checked_even_when_hashes_are_not(tmp_path: Path) -> None:
    folder = write(tmp_path / "out").folder
    flip_byte(folder)
    Bundle.load(folder, check=False)
    truncate(folder)
    with pytest.raises(UserError, match="999 bytes"):
        Bundle.load(folder, check=False)


def test_where_no_bundle_is(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such bundle"):
        Bundle.load(tmp_path / "none")
    with pytest.raises(UserError, match="not a bundle"):
        Bundle.load(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="not a bundle"):
        Bundle.load(tmp_path / "file")


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_linked_files_simply_work(tmp_path: Path, link: object) -> None:
    folder = write(tmp_path / "out").folder
    (folder / "sub/weights.data").rename(tmp_path / "blob")
    link(tmp_path / "blob", folder / "sub/weights.data")  # type: ignore[operator]
    assert Bundle.load(folder).path("sub/weights.data").read_bytes() == b"w" * 1000
    (tmp_path / "blob").write_bytes(b"v" * 1000)
    with pytest.raises(UserError, match="not the file that was written"):
        Bundle.load(folder)


def test_nothing_is_unpickled() -> None:
    import specstream.runtimes.bundle
    import specstream.runtimes.manifest

    for module in (specstream.runtimes.bundle, specstream.runtimes.manifest):
        assert module.__file__ is not None
        source = Path(module.__file__).read_text()
        assert "import pickle" not in source
        assert "np.load" not in source


# Writing.


def test_an_existing_folder_stays_unless_forced(tmp_path: Path) -> None:
    write(tmp_path / "out", content=b"first")
    with pytest.raises(UserError, match="exists already; choose another folder or replace it with --force"):
        write(tmp_path / "out", content=b"second")
    assert Bundle.load(tmp_path / "out").path("model.onnx").read_bytes() == b"first"
    write(tmp_path / "out", force=True, content=b"third")
    assert Bundle.load(tmp_path / "out").path("model.onnx").read_bytes() == b"third"
    assert names(tmp_path) == ["out"]


def test_force_replaces_nothing_but_bundles(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter").touch()
    (tmp_path / "file").touch()
    for name in ("home", "file"):
        with pytest.raises(UserError, match="is not a bundle, so --force does not replace it"):
            write(tmp_path / name, force=True)
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty", force=True)
    assert names(tmp_path) == ["empty", "file", "home"]
    assert names(tmp_path / "home") == ["letter"]


def test_force_replaces_a_link_and_not_what_it_points_to(tmp_path: Path) -> None:
    target = write(tmp_path / "target", content=b"first").folder
    (tmp_path / "out").symlink_to(target)
    write(tmp_path / "out", force=True, content=b"second")
    assert not (tmp_path / "out").is_symlink()
    assert Bundle.load(target).path("model.onnx").read_bytes() == b"first"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit, UserError])
def test_nothing_is_left_when_writing_fails(tmp_path: Path, error: type[BaseException]) -> None:
    def fail() -> None:
        with BundleWriter(tmp_path / "new" / "deep" / "out") as writer:
            writer.path("model.onnx").write_bytes(b"x")
            assert names(tmp_path / "new" / "deep") == [f".out.partial-{os.getpid()}"]
            raise error

    with pytest.raises(error):
        fail()
    assert names(tmp_path) == []


def test_leaving_without_finish_is_no_bundle(tmp_path: Path) -> None:
    with BundleWriter(tmp_path / "out") as writer:
        writer.path("model.onnx").write_bytes(b"x")
    assert names(tmp_path) == []


def test_a_failed_replacement_keeps_the_old_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "out", content=b"first")
    real = os.rename

    def rename(source: Path, target: Path) -> None:
        if ".partial-" in str(source):
            raise OSError("no")
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(OSError, match="no"):
        write(tmp_path / "out", force=True, content=b"second")
    assert names(tmp_path) == ["out"]
    assert Bundle.load(tmp_path / "out").path("model.onnx").read_bytes() == b"first"


def test_no_disk_space(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"GB needed, .* GB free"), BundleWriter(tmp_path / "out") as writer:
        writer.reserve(10**18)
    with BundleWriter(tmp_path / "out") as writer:
        writer.reserve(1000)
    with pytest.raises(UserError, match="disk is full"), BundleWriter(tmp_path / "out"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert names(tmp_path) == []


def test_where_no_folder_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(UserError, match="is not a folder"):
        write(tmp_path / "file" / "out")
    with pytest.raises(UserError, match="cannot make this folder"):
        write(tmp_path / "new" / ("x" * 300) / "out")
    assert signal.getsignal(signal.SIGTERM) == handler
    assert names(tmp_path) == ["file"]


def test_a_file_outside_the_folder_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="inside its folder"), BundleWriter(tmp_path / "out") as writer:
        writer.path("../evil")


def test_a_manifest_needs_its_graph(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"graph 'model\.onnx' was not written"), BundleWriter(tmp_path / "out") as writer:
        writer.finish(manifest(40))
    assert names(tmp_path) == []


def test_one_process_does_not_write_the_same_bundle_twice(tmp_path: Path) -> None:
    with BundleWriter(tmp_path / "out"), pytest.raises(UserError, match="already being written"), BundleWriter(tmp_path / "out"):
        pass


def test_leftovers_of_dead_processes_go_and_others_stay(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    stay = [f".out.partial-{os.getppid()}", f".other.partial-{dead.pid}", ".out.partial-x", "out.partial-1"]
    go = [f".out.partial-{dead.pid}", f".out.replaced-{dead.pid}", f".out.partial-{os.getpid()}"]
    for name in stay + go:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    write(tmp_path / "out")
    assert names(tmp_path) == sorted([*stay, "out"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL], ids=lambda n: n.name)
def test_a_killed_export_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    script = textwrap.dedent("""
        import sys, time
        from specstream.runtimes.bundle import BundleWriter
        with BundleWriter(sys.argv[1]) as writer:
            writer.path("model.onnx").write_bytes(b"x")
            print("writing", flush=True)
            time.sleep(60)
    """)
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "out")], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "writing\n"
        assert names(tmp_path) == [f".out.partial-{process.pid}"]
        start = time.monotonic()
        process.send_signal(number)
        process.wait(timeout=30)
    assert process.returncode != 0
    assert time.monotonic() - start < 30
    if number == signal.SIGKILL:  # nothing can be done then; the next write does it
        assert names(tmp_path) == [f".out.partial-{process.pid}"]
        write(tmp_path / "out")
        assert names(tmp_path) == ["out"]
    else:
        assert names(tmp_path) == []


def test_signal_handlers_are_given_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with BundleWriter(tmp_path / "out"):
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


def _write_on_after(number: signal.Signals, out: Path) -> None:
    with BundleWriter(out) as writer:
        with contextlib.suppress(BaseException):  # as Python does around __del__
            signal.raise_signal(number)
        writer.path("model.onnx")


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_that_a_library_swallows_still_stops_the_write(
    number: signal.Signals, raised: type[BaseException], tmp_path: Path
) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    try:
        with pytest.raises(raised):
            _write_on_after(number, tmp_path / "bundle")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert not list(tmp_path.iterdir())
