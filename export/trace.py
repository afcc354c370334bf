"""From a :class:`StreamModel` to an ONNX graph of contract v1, weights in ``model.onnx.data``.

``torch.onnx.export`` traces the network over a tracing cache (``ort_cache.py``, ``portable_cache.py``); the graph passes of
``passes/`` clean the result; weights are written one after the other from the model's own memory. Nothing of files beside the
two it writes, of tokenizers or bundles.
"""

from __future__ import annotations

import contextlib
import copyreg
import logging
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.export import Dim

from specstream.export import contract
from specstream.export.ort_cache import OrtCache
from specstream.export.passes import run_passes
from specstream.export.portable_cache import PortableCache
from specstream.models.attention import Cache
from specstream.models.stream_model import StreamModel

OPSET = 24  # the first with TensorScatter
GRAPH_FILE = "model.onnx"
DATA_FILE = "model.onnx.data"
STREAMS_FILE = "streams.onnx"  # the streams' own pass (delayed placement)
STREAMS_DATA_FILE = "streams.onnx.data"


@dataclass(frozen=True)
class GraphInfo:
    """What was written.

    Attributes:
        opset: version of the standard operators.
        weight_bytes: bytes of all initializers, a shared one once.
        operators: how many nodes of each type, contrib operators as ``com.microsoft::Name``.
        passes: how often each graph pass applied, in order.
    """

    opset: int
    weight_bytes: int
    operators: dict[str, int]
    passes: dict[str, int]


class _ContractModule(nn.Module):
    """The network with the contract's inputs and outputs as arguments and results."""

    def __init__(self, model: StreamModel, profile: contract.Profile) -> None:
        super().__init__()
        self.model = model
        self.cache_type = OrtCache if profile == "ort" else PortableCache

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        tree_mask: Tensor,
        past_length: Tensor,
        logit_rows: Tensor,
        *,
        stream_rows: Tensor | None = None,
        past: list[Tensor],
    ) -> list[Tensor]:
        cache = self.cache_type(past_length, past[::2], past[1::2])
        step = self.model(input_ids, position_ids, tree_mask, logit_rows, stream_rows, cache)
        outputs = [step.next_ids, step.logits]
        if step.stream_ids is not None:
            outputs += [step.stream_ids, step.stream_logprobs]
        if step.entry is not None:
            outputs.append(step.entry)
        for key, value in zip(cache.keys, cache.values, strict=True):
            outputs += [key, value]
        return outputs


class _DraftModule(nn.Module):
    """The streams' own pass with the contract's inputs and outputs as arguments and results."""

    def __init__(self, model: StreamModel, profile: contract.Profile) -> None:
        super().__init__()
        self.model = model
        self.cache_type = OrtCache if profile == "ort" else PortableCache

    def forward(self, entry_state: Tensor, root_id: Tensor, past_length: Tensor, *, past: list[Tensor]) -> list[Tensor]:
        cache = self.cache_type(past_length, past[::2], past[1::2])
        step = self.model.draft(entry_state, root_id, past_length, _TopLayers(cache, self.model.entry_layer))
        outputs = [step.stream_ids, step.stream_logprobs]
        if step.stream_pairs is not None:
            outputs.append(step.stream_pairs)
        for key, value in zip(cache.keys, cache.values, strict=True):
            outputs += [key, value]
        return outputs


class _TopLayers:
    """A cache of the top layers alone, asked for by the layers' own numbers."""

    def __init__(self, cache: Cache, first: int) -> None:
        self._cache, self._first = cache, first

    def set_rows(self, positions: Tensor, visible: Tensor) -> None:
        self._cache.set_rows(positions, visible)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        return self._cache.attend(layer - self._first, query, key, value, scale=scale, window=window, softcap=softcap)


def export_graph(model: StreamModel, out_dir: Path, profile: contract.Profile) -> GraphInfo:
    """Write ``model.onnx`` and ``model.onnx.data``.

    Args:
        model: fp32, on the CPU, its fine-tune merged; streams when it has a config.
        out_dir: an existing folder.
        profile: ``ort`` (contrib operators) or ``portable`` (standard operators of opset 24 only).
    """
    program = _trace(model, profile)
    return _write(program, range(model.num_layers), *_value_names(model), profile, out_dir / GRAPH_FILE)


def export_streams(model: StreamModel, out_dir: Path, profile: contract.Profile) -> GraphInfo:
    """Write ``streams.onnx`` and its weights: the pass of delayed streams, their LoRA merged into the top layers.

    Args:
        model: as for :func:`export_graph`, its streams delayed. Its main rows are wrong afterwards.
        out_dir: an existing folder.
        profile: operators of the graph.
    """
    model.merge_streams()
    program = _trace_streams(model, profile)
    inputs, outputs = [contract.ENTRY_STATE, contract.ROOT_ID, contract.PAST_LENGTH], [contract.STREAM_IDS, contract.STREAM_LOGPROBS]
    assert model.config is not None
    if model.config.pair_rank:
        outputs.append(contract.STREAM_PAIRS)
    return _write(program, range(model.entry_layer, model.num_layers), inputs, outputs, profile, out_dir / STREAMS_FILE)


def _write(program: ir.Model, layers: range, inputs: list[str], outputs: list[str], profile: contract.Profile, file: Path) -> GraphInfo:
    graph = program.graph
    _name_values(graph, layers, inputs, outputs)
    counts = run_passes(program, profile)
    operators = Counter(f"{node.domain}::{node.op_type}" if node.domain else node.op_type for node in graph.all_nodes())
    weight_bytes = sum(value.const_value.nbytes for value in graph.initializers.values() if value.const_value is not None)
    ir.save(program, file, external_data=DATA_FILE if file.name == GRAPH_FILE else STREAMS_DATA_FILE, size_threshold_bytes=1024)
    return GraphInfo(OPSET, weight_bytes, dict(operators.most_common()), counts)


def _trace(model: StreamModel, profile: contract.Profile) -> ir.Model:
    # Sizes of the example: all different and above one, so that no two dimensions are taken for the same.
    rows, scored, carriers = 5, 3, 2
    past = _example_cache(model, model.num_layers)
    arguments = {
        contract.INPUT_IDS: torch.zeros(1, rows, dtype=torch.int64),
        contract.POSITION_IDS: torch.arange(rows)[None],
        contract.TREE_MASK: torch.ones(rows, rows, dtype=torch.bool).tril(),
        contract.PAST_LENGTH: torch.tensor([7], dtype=torch.int32),
        contract.LOGIT_ROWS: torch.arange(scored),
        contract.STREAM_ROWS: torch.arange(carriers),
        "past": past,
    }
    length, capacity_dim = Dim("T", min=1), Dim("C", min=1)
    shapes = {
        contract.INPUT_IDS: {1: length},
        contract.POSITION_IDS: {1: length},
        contract.TREE_MASK: {0: length, 1: length},
        contract.PAST_LENGTH: None,
        contract.LOGIT_ROWS: {0: Dim("L", min=1)},
        contract.STREAM_ROWS: {0: Dim("S", min=0)},
        "past": [{2: capacity_dim}] * len(past),
    }
    if (
        model.config is None or model.config.placement == "delayed"
    ):  # an argument of None would count as an input that the graph does not have
        del arguments[contract.STREAM_ROWS], shapes[contract.STREAM_ROWS]
    return _export(_ContractModule(model, profile), arguments, shapes)


def _trace_streams(model: StreamModel, profile: contract.Profile) -> ir.Model:
    past = _example_cache(model, model.num_layers - model.entry_layer)
    arguments = {
        contract.ENTRY_STATE: torch.zeros(1, model.base.config.hidden_size),
        contract.ROOT_ID: torch.zeros(1, dtype=torch.int64),
        contract.PAST_LENGTH: torch.tensor([7], dtype=torch.int32),
        "past": past,
    }
    shapes = dict.fromkeys(arguments, None) | {"past": [{2: Dim("C", min=1)}] * len(past)}
    return _export(_DraftModule(model, profile), arguments, shapes)


def _example_cache(model: StreamModel, layers: int) -> list[Tensor]:
    config = model.base.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return [torch.zeros(1, config.num_key_value_heads, 64, head_dim) for _ in range(2 * layers)]


def _export(module: nn.Module, arguments: dict[str, Any], shapes: dict[str, Any]) -> ir.Model:
    with _quiet(), torch.no_grad():
        program = torch.onnx.export(
            module.eval(), (), kwargs=arguments, dynamo=True, opset_version=OPSET, dynamic_shapes=shapes, optimize=False, verbose=False
        )
    assert program is not None
    return program.model


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Exporter chatter that says nothing about our graph: absent torchvision, axis names, a deprecation inside torch."""
    registration = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = registration.level
    registration.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="# The axis name", category=UserWarning)
            warnings.filterwarnings("ignore", message=r".*LeafSpec.*", category=FutureWarning, module=copyreg.__name__)
            yield
    finally:
        registration.setLevel(level)


def _value_names(model: StreamModel) -> tuple[list[str], list[str]]:
    """Inputs and outputs of the main graph, the cache left out."""
    inputs = [contract.INPUT_IDS, contract.POSITION_IDS, contract.TREE_MASK, contract.PAST_LENGTH, contract.LOGIT_ROWS]
    outputs = [contract.NEXT_IDS, contract.LOGITS]
    if model.config is not None and model.config.placement == "delayed":
        outputs.append(contract.ENTRY_STATES)
    elif model.config is not None:
        inputs.append(contract.STREAM_ROWS)
        outputs += [contract.STREAM_IDS, contract.STREAM_LOGPROBS]
    return inputs, outputs


def _name_values(graph: ir.Graph, layers: range, inputs: list[str], outputs: list[str]) -> None:
    """Contract names for inputs and outputs, Hugging Face's for weights."""
    inputs, outputs = list(inputs), list(outputs)
    for layer in layers:
        inputs += [contract.past_key(layer), contract.past_value(layer)]
        outputs += [contract.present_key(layer), contract.present_value(layer)]
    for values, names in ((graph.inputs, inputs), (graph.outputs, outputs)):
        for value, name in zip(values, names, strict=True):
            value.name = name
    for value in list(graph.initializers.values()):
        assert value.name is not None
        name = value.name.replace("model.decoder.", "model.").replace("model.base.", "").replace("model.model.", "model.")
        value.name = name.replace(".base.", ".")  # the layer inside a LoRA wrapper
