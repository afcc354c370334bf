"""Tiny models as Core ML packages, each made once in a test run, and the same functions in PyTorch, which take no conversion."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specstream.export.coreml_contract import KEY_CACHE, VALUE_CACHE, CoreMLContract
from specstream.export.coreml_module import DraftModule, RowsModule, fp16_safe, state_shape
from specstream.export.coreml_package import PackageMetadata
from specstream.export.coreml_trace import PackageInfo, export_package, output_names, plan_contract
from specstream.models.stream_model import StreamModel
from specstream.runtimes.coreml_import import import_coremltools

from .export.tiny import tiny_model

CAPACITY = 96
METADATA = PackageMetadata("a tiny model", "tests", "none", "1", {"key": "value"})


@dataclass(frozen=True)
class TinyPackage:
    """A network and its package."""

    model: StreamModel
    path: Path
    info: PackageInfo

    @property
    def sizes(self) -> CoreMLContract:
        return self.info.contract


def write_package(architecture: str, streams: str, path: Path) -> TinyPackage:
    """``streams``: delayed, fused or none. One size of tree: conversions take seconds each."""
    import_coremltools()
    model = streams_model(architecture, streams)
    return TinyPackage(model, path, export_package(model, path, plan_contract(model, CAPACITY, (8,)), METADATA))


@functools.cache
def tiny_package(architecture: str, streams: str) -> TinyPackage:
    folder = Path(_scratch().name)
    return write_package(architecture, streams, folder / f"{architecture}-{streams}.mlpackage")


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="specstream-coreml-")


def streams_model(architecture: str, streams: str) -> StreamModel:
    return tiny_model(architecture, streams=streams != "none", delayed=streams == "delayed")


class TorchFunction:
    """A function of a package that PyTorch runs in fp32; stands for what Core ML or the evaluator would load."""

    def __init__(self, model: StreamModel, sizes: CoreMLContract, name: str) -> None:
        self.model, self.sizes, self.name = model, sizes, name
        self.calls: list[dict[str, np.ndarray]] = []
        function = next((f for f in sizes.functions if f.name == name), None)
        self.module: RowsModule | DraftModule = (
            DraftModule(model, sizes.slots, sizes.commit_width)
            if function is None
            else RowsModule(model, function, sizes.slots, sizes.commit_width)
        )
        self.outputs = output_names(sizes, function)

    def make_state(self) -> dict[str, torch.Tensor]:
        return {name: torch.zeros(state_shape(self.model, self.sizes.slots)) for name in (KEY_CACHE, VALUE_CACHE)}

    def predict(self, inputs: dict[str, np.ndarray], state: Any) -> dict[str, np.ndarray]:
        self.calls.append(inputs)
        self.module.keyCache, self.module.valueCache = state[KEY_CACHE], state[VALUE_CACHE]
        given = {name: torch.from_numpy(array.astype(np.float32) if array.dtype == np.float16 else array) for name, array in inputs.items()}
        with torch.inference_mode(), fp16_safe(self.model, self.sizes.slots):
            results = self.module(**given)
        return {name: result.numpy() for name, result in zip(self.outputs, results, strict=True)}
