"""How commands show things: tables on standard output; what they do meanwhile on standard error, and only when that is a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.console import Console


def console() -> Console:
    """A rich console on standard error."""
    return Console(stderr=True)


def table_console() -> Console:
    """A rich console on standard output; in a pipe, where there is no terminal to ask, as wide as tables need."""
    found = Console()
    return found if found.is_terminal else Console(width=140)


@contextlib.contextmanager
def step_status() -> Iterator[Callable[[str], None]]:
    """Show the current step of long work beside a spinner; call what it gives with each step's name. Silent in a pipe."""
    if not sys.stderr.isatty():
        yield lambda _step: None
        return
    with console().status("starting") as status:
        yield status.update


@contextlib.contextmanager
def progress_bar(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar for ``total`` pieces of work; call what it gives with the number done so far. Silent in a pipe."""
    if not sys.stderr.isatty():
        yield lambda _done: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(), transient=True) as progress:
        task = progress.add_task(description, total=total)
        yield lambda done: progress.update(task, completed=done)
