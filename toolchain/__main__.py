"""``python -m specstream.toolchain`` is the command ``specstream``."""

from specstream.toolchain.cli import main

if __name__ == "__main__":  # processes that tune starts import this, too
    main()
