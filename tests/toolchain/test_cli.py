"""The command line as a whole: help, exit codes, and that every error is one line."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from specstream.models import base
from specstream.models.errors import CheckFailed, UserError
from specstream.toolchain import extras
from specstream.toolchain.cli import COMMANDS, cli, run

WHOLE = [sys.executable, "-m", "specstream.toolchain"]


def raising(error: BaseException) -> click.Command:
    @click.command()
    def command() -> None:
        raise error

    return command


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself_with_an_example(name: str) -> None:
    result = CliRunner().invoke(cli, [name, "--help"])
    assert result.exit_code == 0
    assert "Example:" in result.output
    assert f"specstream {name} " in result.output


def test_help_lists_the_commands() -> None:
    result = CliRunner().invoke(cli, ["--help"])
    assert result.exit_code == 0
    for name in COMMANDS:
        assert f"\n  {name} " in result.output


def test_version() -> None:
    result = CliRunner().invoke(cli, ["--version"])
    assert result.exit_code == 0
    assert result.output.startswith("specstream, version ")


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("bad input"), 2, "error: bad input"),
        (UserError("two\n  lines"), 2, "error: two lines"),
        (CheckFailed("not equal"), 1, "failed: not equal"),
        (OSError(28, "No space left on device", "x.data"), 2, "error: no space left on the disk (writing x.data); free some"),
        (OSError(5, "Input/output error"), 1, "error: OSError: [Errno 5] Input/output error"),
        (ValueError("odd\nmore"), 1, "error: ValueError: odd (--debug shows where)"),
        (ZeroDivisionError(), 1, "error: ZeroDivisionError (--debug shows where)"),
        (ModuleNotFoundError("No module named 'torch.x'", name="torch.x"), 2, "error: this needs the export extra (torch is missing): "),
        (ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib"), 2, "error: this needs the train extra (matplotlib is"),
        (ModuleNotFoundError("No module named 'other'", name="other"), 1, "error: ModuleNotFoundError: No module named 'other'"),
    ],
)
def test_an_error_is_one_line_and_a_code(error: Exception, code: int, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([], raising(error)) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(line)
    assert err.count("\n") == 1


def test_the_missing_extra_is_named_as_pip_takes_it(capsys: pytest.CaptureFixture[str]) -> None:
    run([], raising(ModuleNotFoundError(name="onnx")))
    assert "pip install 'specstream-toolchain[export]'" in capsys.readouterr().err


def test_a_missing_extra_is_said_before_anything_is_fetched(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(extras.EXTRA_OF, "no_such_library", "export")
    monkeypatch.setattr(base, "fetch", lambda _: pytest.fail("a model was fetched"))
    assert run(["export", "smollm2-135m", "out"]) == 2
    assert "the export extra (no_such_library is missing)" in capsys.readouterr().err
    with pytest.raises(ModuleNotFoundError):
        extras.require("train")


def test_an_interrupt_is_code_130(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([], raising(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err.strip() == "interrupted"


@pytest.mark.parametrize("error", [UserError("bad input"), ValueError("odd")])
def test_debug_shows_where(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    run(["--debug"], raising(error))
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "test_cli.py" in err
    assert str(error) in err.splitlines()[-1]


@pytest.mark.parametrize("arguments", [["no-such-command"], ["generate"], ["generate", "b", "p", "--no-such-option"], ["verify", "b"]])
def test_wrong_use_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert "--help" in err
    assert err.count("\n") == 1


def test_no_arguments_is_help_and_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    assert "generate" in capsys.readouterr().err


def test_the_command_as_a_process() -> None:
    done = subprocess.run([*WHOLE, "fetch", "no-such-model"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "error: no model is called 'no-such-model'; short names are: smollm2-135m\n"


def test_a_reader_that_goes_away_is_no_error() -> None:
    program = """if True:
        import click, sys
        from specstream.toolchain.cli import run

        @click.command()
        def talk():
            for _ in range(9999):
                click.echo("x" * 99)

        sys.exit(run([], talk))"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    process.wait()
