"""``optimum-cli export specstream``: the command ``specstream export`` inside Hugging Face's command line.

optimum loads the files in its namespace package ``optimum/commands/register``; the wheel puts one there, made of the folder
``optimum_register``. optimum's commands are argparse's, so the options of ours are told to it one by one.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace

import click
from optimum.commands.base import BaseOptimumCLICommand, CommandInfo

from specstream.toolchain.export_command import export


class SpecstreamExportCommand(BaseOptimumCLICommand):  # type: ignore[misc]  # optimum has no types
    """Hands what argparse read to ``specstream export``."""

    COMMAND = CommandInfo(name="specstream", help="Export a model with speculative streams to an ONNX bundle (specstream export).")

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        for parameter in export.params:
            if isinstance(parameter, click.Argument):
                parser.add_argument(parameter.name or "", metavar=(parameter.name or "").upper())
            elif isinstance(parameter, click.Option) and parameter.is_flag:
                parser.add_argument(*parameter.opts, dest=parameter.name, action="store_true", help=parameter.help)
            elif isinstance(parameter, click.Option):
                choices = parameter.type.choices if isinstance(parameter.type, click.Choice) else None
                parser.add_argument(*parameter.opts, dest=parameter.name, choices=choices, help=parameter.help)

    def run(self) -> None:
        from specstream.toolchain.cli import run

        code = run(["export", *command_line(self.args)])
        if code:
            sys.exit(code)


def command_line(given: Namespace) -> list[str]:
    """The arguments of ``specstream export`` that say what argparse read."""
    options: list[str] = []
    arguments: list[str] = []
    for parameter in export.params:
        value = getattr(given, parameter.name or "", None)
        if isinstance(parameter, click.Argument):
            arguments.append(str(value))
        elif value is True:
            options.append(parameter.opts[0])
        elif value not in (None, False):
            options += [parameter.opts[0], str(value)]
    return [*options, "--", *arguments]
