"""Which extra of the distribution brings which library. Imports none of them."""

from __future__ import annotations

import importlib.util
from typing import Final

# Top-level module -> the smallest extra that brings it.
EXTRA_OF: Final[dict[str, str]] = {
    **dict.fromkeys(("torch", "transformers", "onnx", "onnx_ir", "onnxscript", "optimum", "accelerate", "gguf", "safetensors"), "export"),
    "matplotlib": "train",
    "coremltools": "coreml",
    "sklearn": "coreml",
}


def require(extra: str) -> None:
    """Look whether what ``extra`` brings is installed, before work that would only fail later (a download, say).

    Raises:
        ModuleNotFoundError: naming the first library that is missing; the command line says which extra to install.
    """
    wanted = [module for module, found in EXTRA_OF.items() if found == extra or (extra == "train" and found == "export")]
    for module in wanted:
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)
