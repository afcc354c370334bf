"""A Core ML package on disk in one canonical form: the same model is the same bytes, whoever wrote it and when.

coremltools names a package's items by random identifiers, adds the date and leaves the order of maps open. Knows files and the
specification's metadata; nothing of programs.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

MODEL: Final = "Data/com.apple.CoreML/model.mlmodel"
WEIGHTS: Final = "Data/com.apple.CoreML/weights/weight.bin"
MANIFEST: Final = "Manifest.json"

TOKENIZER_KEY: Final = "co.huggingface.exporters.name"  # where swift-transformers looks for the tokenizer's id
CONTRACT_KEY: Final = "specstream.contract"  # JSON of :class:`specstream.export.coreml_contract.CoreMLContract`

_NAMESPACE: Final = uuid.UUID("5c0ad0c4-93a4-5e5c-9d7f-0d6a4a5f1c11")
_RANDOM_METADATA: Final = ("com.github.apple.coremltools.conversion_date",)


@dataclass(frozen=True)
class PackageMetadata:
    """What a package says about itself; shown by Xcode, read by ``MLModel.modelDescription.metadata``."""

    short_description: str
    author: str
    license: str
    version: str
    user_defined: dict[str, str]


def canonicalise(package: Path, metadata: PackageMetadata | None = None) -> None:
    """Rewrite the package's specification and manifest in place.

    Args:
        package: an ``.mlpackage`` folder.
        metadata: replaces what is there; None keeps it, less what is random.
    """
    from coremltools.proto import Model_pb2

    file = package / MODEL
    spec = Model_pb2.Model()
    spec.ParseFromString(file.read_bytes())
    found = spec.description.metadata
    if metadata is not None:
        found.Clear()
        found.shortDescription, found.author = metadata.short_description, metadata.author
        found.license, found.versionString = metadata.license, metadata.version
        for key, value in sorted(metadata.user_defined.items()):
            found.userDefined[key] = value
    for key in _RANDOM_METADATA:
        if key in found.userDefined:
            del found.userDefined[key]
    file.write_bytes(spec.SerializeToString(deterministic=True))
    _write_manifest(package)
    for part in package.rglob("*"):
        part.chmod(0o755 if part.is_dir() else 0o644)  # coremltools leaves some for their owner alone


def _write_manifest(package: Path) -> None:
    """Identifiers from the content of what they name, entries in the order of identifiers."""
    manifest: dict[str, Any] = json.loads((package / MANIFEST).read_text(encoding="utf-8"))
    renamed = {}
    for old, entry in manifest["itemInfoEntries"].items():
        item = package / "Data" / entry["path"]
        digest = hashlib.sha256(entry["path"].encode())
        for part in [item] if item.is_file() else sorted(path for path in item.rglob("*") if path.is_file()):
            with open(part, "rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        renamed[old] = str(uuid.uuid5(_NAMESPACE, digest.hexdigest())).upper()
    manifest["itemInfoEntries"] = {renamed[old]: entry for old, entry in manifest["itemInfoEntries"].items()}
    manifest["rootModelIdentifier"] = renamed[manifest["rootModelIdentifier"]]
    (package / MANIFEST).write_text(json.dumps(manifest, indent=4, sort_keys=True) + "\n", encoding="utf-8")
