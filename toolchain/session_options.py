"""The options of commands that run a bundle: what its calls are computed on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

COMPUTE_UNITS: Final = ("all", "cpu", "cpu-gpu", "cpu-ne")


def session_options(function: F) -> F:
    """Add ``--threads`` and ``--compute-units`` to a command, which takes them as ``threads`` and ``compute_units``; None: not given."""
    function = click.option(
        "--compute-units",
        type=click.Choice(COMPUTE_UNITS),
        help="Where Core ML may run a Core ML bundle on a Mac; elsewhere the reference evaluator takes no notice. [default: all]",
    )(function)
    return click.option("--threads", type=click.IntRange(min=1), help="Threads of ONNX Runtime. [default: all usable cores]")(function)
