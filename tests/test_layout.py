"""What keeps the five folders apart: imports go one way, a device loads nothing heavy, the package is laid out as the project says."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("models", "export", "quantize", "runtimes", "toolchain")

# What each folder may import of the others.
ALLOWED = {
    "models": {"models"},
    "export": {"models", "export"},
    "quantize": {"models", "export", "quantize"},
    "toolchain": set(FOLDERS),
}
# `runtimes` goes to devices: only modules that import nothing heavy.
LIGHT = {
    "specstream.models.errors",
    "specstream.models.folders",
    "specstream.models.config",
    "specstream.export.contract",
    "specstream.export.coreml_contract",
    "specstream.export.weight_blob",
}

HEAVY = ("torch", "transformers", "onnx", "onnxscript", "optimum", "accelerate", "gguf", "safetensors", "coremltools", "sklearn")

SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def imported_modules(path: Path) -> list[str]:
    """Full names of what a file imports anywhere in it, functions included; of `from a import b` both `a` and `a.b`."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            found += [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    folder = path.relative_to(ROOT).parts[0]
    for module in imported_modules(path):
        parts = module.split(".")
        assert parts[0] not in FOLDERS, f"imports {module}: its name is specstream.{module}"
        if parts[0] != "specstream" or len(parts) < 2:
            continue
        if folder == "runtimes" and parts[1] != "runtimes":
            assert len(parts) < 3 or ".".join(parts[:3]) in LIGHT, f"imports {module}, and may import {', '.join(sorted(LIGHT))}"
        elif folder != "runtimes":
            assert parts[1] in ALLOWED[folder], f"imports {module}: imports go models <- export <- quantize <- toolchain"


def test_the_rule_is_seen_to_be_broken(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text("def f():\n    from specstream.models import base\n    import specstream.export.trace\n")
    assert {"specstream.models.base", "specstream.export.trace"} <= set(imported_modules(file))


@pytest.mark.parametrize(
    "module",
    [
        "specstream.runtimes",
        "specstream.models.config",
        "specstream.models.fetch",
        "specstream.export.contract",
        "specstream.toolchain.cli",
        "specstream.toolchain.generate_command",
        "specstream.toolchain.chat_command",
        "specstream.toolchain.verify_command",
        "specstream.toolchain.info_command",
        "specstream.toolchain.export_command",
        "specstream.toolchain.train_command",
    ],
)
def test_nothing_heavy_is_loaded_by(module: str) -> None:
    program = f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not set(json.loads(done.stdout)) & set(HEAVY)


def test_folders_are_packages_of_one_namespace() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    mapping = project["tool"]["setuptools"]["package-dir"]
    for folder in FOLDERS:
        assert mapping[f"specstream.{folder}"] == folder
        assert f"specstream.{folder}" in project["tool"]["setuptools"]["packages"]
        assert (ROOT / folder / "__init__.py").is_file()
        assert (ROOT / folder / "py.typed").is_file()
        assert (ROOT / ".typing" / "specstream" / folder).resolve() == ROOT / folder
    assert not list((ROOT / ".typing" / "specstream").glob("*.py"))


def test_folders_below_packages_are_packaged() -> None:
    """A subpackage that pyproject does not list would be missing from the wheel."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {settings["package-dir"].get(name, name.removeprefix("specstream.").replace(".", "/")) for name in settings["packages"]}
    assert {str(path.parent.relative_to(ROOT)) for path in SOURCES} <= folders


def test_no_module_hides_a_library() -> None:
    assert not {path.stem for path in SOURCES} & {"onnx", "torch", "coremltools"}


def test_adapters_of_another_licence_stay_out_of_the_wheel() -> None:
    """What is under Apache-2.0 is distributed without them."""
    excluded = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["exclude-package-data"]["specstream.models"]
    licensed = sorted(f"zoo/{file.parent.name}/*" for file in (ROOT / "models" / "zoo").glob("*/LICENSE"))
    assert licensed == sorted(excluded)
    assert licensed
