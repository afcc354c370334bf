"""Reports of ``--json FILE``: one JSON object with what was measured and what made it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from specstream.models.errors import UserError

SCHEMA: Final = 1
_PACKAGES: Final = ("specstream-toolchain", "onnxruntime", "numpy", "tokenizers", "torch", "transformers", "onnx", "onnxscript")

F = TypeVar("F", bound=Callable[..., Any])


def json_option(function: F) -> F:
    """The option ``--json FILE`` of a command that measures. That FILE can be written is checked before the work starts."""
    return click.option("--json", "json_file", type=click.Path(path_type=Path), callback=_check, metavar="FILE", help="Write a report.")(
        function
    )


def _check(_context: click.Context, _parameter: click.Parameter, value: Path | None) -> Path | None:
    if value is not None:
        if value.is_dir():
            raise UserError(f"--json {value}: is a folder; name a file")
        if not value.absolute().parent.is_dir():
            raise UserError(f"--json {value}: there is no folder {value.absolute().parent}")
        if not os.access(value if value.exists() else value.absolute().parent, os.W_OK):
            raise UserError(f"--json {value}: cannot be written")
    return value


def write_report(file: Path | None, kind: str, data: Mapping[str, Any]) -> None:
    """Write ``data`` with what made it: ``schema``, ``kind``, ``command`` and ``versions``. Does nothing when ``file`` is None."""
    if file is None:
        return
    report = {"schema": SCHEMA, "kind": kind, "command": ["specstream", *sys.argv[1:]], "versions": versions(), **data}
    partial = file.with_name(f".{file.name}.partial-{os.getpid()}")
    try:
        partial.write_text(json.dumps(report, indent=2, ensure_ascii=False, default=str) + "\n", encoding="utf-8")
        partial.replace(file)
    except OSError as error:
        raise UserError(f"--json {file}: cannot be written: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)


def versions() -> dict[str, str]:
    """Versions of Python, the machine and the packages that matter for a result, as far as they are installed; imports none."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
