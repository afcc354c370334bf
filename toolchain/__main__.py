"""``python -m specstream.toolchain`` is the command ``specstream``."""

from specstream.toolchain.cli import main

main()
