"""The command ``specstream``: finds a command's module when it is asked for, and turns every error into one line and an exit code.

Exit codes: 0 done, 1 a check failed (or a bug), 2 wrong use or bad input, 130 interrupted.
"""

from __future__ import annotations

import errno
import importlib
import sys
import traceback
from collections.abc import Sequence
from typing import Final

import click

from specstream.models.errors import CheckFailed, UserError
from specstream.toolchain.extras import EXTRA_OF

# Command -> module and attribute. A module imports what is heavy inside its function, so `generate` never loads torch.
COMMANDS: Final[dict[str, tuple[str, str]]] = {
    "fetch": ("specstream.toolchain.fetch_command", "fetch"),
    "train": ("specstream.toolchain.train_command", "train"),
    "export": ("specstream.toolchain.export_command", "export"),
    "quantize": ("specstream.toolchain.quantize_command", "quantize"),
    "tune": ("specstream.toolchain.tune_command", "tune"),
    "bench": ("specstream.toolchain.bench_command", "bench"),
    "generate": ("specstream.toolchain.generate_command", "generate"),
    "chat": ("specstream.toolchain.chat_command", "chat"),
    "verify": ("specstream.toolchain.verify_command", "verify"),
    "package": ("specstream.toolchain.package_command", "package"),
    "info": ("specstream.toolchain.info_command", "info"),
}


# Commands whose process runs bundles and makes no other sessions of ONNX Runtime.
SHARING: Final = frozenset({"generate", "chat", "verify", "bench", "tune"})


class LazyGroup(click.Group):
    """A group whose commands are imported one by one."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute = COMMANDS[cmd_name]
        return _with_debug(getattr(importlib.import_module(module), attribute))


def _with_debug(command: click.Command) -> click.Command:
    """Give a command the option ``--debug``, which :func:`run` looks for."""
    if not any(parameter.name == "debug" for parameter in command.params):
        option = click.Option(["--debug"], is_flag=True, expose_value=False, help="Show where an error came from.")
        command.params.append(option)
    return command


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="specstream-toolchain", prog_name="specstream")
def cli() -> None:
    """Make a language model speculate for itself, and run it on ONNX Runtime.

    \b
    Example:
      specstream export smollm2-135m sql-bundle --adapter smollm2-135m-sql
      specstream generate sql-bundle "How many singers are there? ..."
    """


def run(arguments: Sequence[str], command: click.Command = cli, name: str = "specstream") -> int:
    """Run one command line; every error becomes a line on standard error and the exit code that is returned."""
    debug = "--debug" in arguments
    try:
        code = _with_debug(command).main(args=list(arguments), prog_name=name, standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return 2
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        hint = f" (see '{context.command_path} --help')" if context is not None else ""
        return _say("error", error.format_message() + hint, 2, debug)
    except click.Abort:
        return _say("interrupted", "", 130, debug)
    except UserError as error:
        return _say("error", str(error), 2, debug)
    except CheckFailed as error:
        return _say("failed", str(error), 1, debug)
    except ImportError as error:
        module = (error.name or "").partition(".")[0]
        if module not in EXTRA_OF:
            return _say_bug(error, debug)
        extra = EXTRA_OF[module]
        message = f"this needs the {extra} extra ({module} is missing): pip install 'specstream-toolchain[{extra}]'"
        return _say("error", message, 2, debug)
    except BrokenPipeError:  # the reader of our output has gone, as in `specstream info bundle | head -1`
        sys.stdout = None  # or the interpreter complains when it flushes at its end
        return 1
    except OSError as error:
        if error.errno != errno.ENOSPC:
            return _say_bug(error, debug)
        return _say("error", f"no space left on the disk{_where(error)}; free some and give the command again", 2, debug)
    except Exception as error:
        return _say_bug(error, debug)


def _where(error: OSError) -> str:
    return f" (writing {error.filename})" if error.filename else ""


def _say_bug(error: Exception, debug: bool) -> int:
    first = str(error).strip().partition("\n")[0]
    hint = "" if debug else " (--debug shows where)"
    return _say("error", f"{type(error).__name__}{': ' if first else ''}{first}{hint}", 1, debug)


def _say(kind: str, message: str, code: int, debug: bool) -> int:
    """One line on standard error, after the traceback where that was asked for."""
    if debug and kind != "interrupted":
        click.echo(traceback.format_exc(), err=True, nl=False)
    label = click.style(kind, fg="red", bold=True)
    click.echo(f"{label}: {' '.join(message.split())}" if message else label, err=True)
    return code


def main() -> None:
    """Entry point of the command."""
    if SHARING & set(sys.argv[1:2]) and not {"-h", "--help"} & set(sys.argv):
        from specstream.runtimes.threads import share_threads

        share_threads()
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
