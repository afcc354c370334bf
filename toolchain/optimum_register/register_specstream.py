"""Read by optimum-cli at its start; installed as ``optimum/commands/register/register_specstream.py``."""

from optimum.commands.export.base import ExportCommand

from specstream.toolchain.optimum_plugin import SpecstreamExportCommand

REGISTER_COMMANDS = [(SpecstreamExportCommand, ExportCommand)]
