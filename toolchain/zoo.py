"""Trained adapters that come with the package, by name: the folders of ``models/zoo``."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import specstream.models
from specstream.models.errors import UserError
from specstream.models.fetch import sha256_of

# What a bundle says of the licence of its adapter and of the adapter's data: file of the adapter -> its name in the bundle.
ADAPTER_FILES: Final = {"README.md": "ADAPTER.md", "LICENSE": "ADAPTER_LICENSE"}


def zoo_folder() -> Path:
    """Where the adapters are: in a checkout as in an installed package."""
    return Path(specstream.models.__path__[0]) / "zoo"


def adapter_names() -> list[str]:
    return sorted(folder.name for folder in zoo_folder().glob("*") if (folder / "adapter.safetensors").is_file())


def resolve_adapter(adapter: str) -> Path:
    """The folder of an adapter that is given as a folder or by its name in the zoo; a folder wins.

    Raises:
        UserError: it is neither.
    """
    folder = Path(adapter).expanduser()
    if folder.is_dir():
        return folder
    if adapter in adapter_names():
        return zoo_folder() / adapter
    raise UserError(
        f"no adapter {adapter!r}: expected the OUT folder of 'specstream train' or one of: {', '.join(adapter_names()) or 'none'}"
    )


def adapter_with(sha256: str) -> Path | None:
    """The zoo's adapter whose weights have this sha256, if there is one."""
    return next((zoo_folder() / name for name in adapter_names() if sha256_of(zoo_folder() / name / "adapter.safetensors") == sha256), None)
