"""What goes into a graph's products: rows of activations, caught while the unquantized graphs of a bundle run on token sequences.

Knows graph contract v1 and, where a bundle has them, its graph of delayed streams; nothing of text or of schemes. In a process of
its own, so that the runtime's copy of the weights is gone when quantizing begins:

    python -m specstream.quantize.calibrate FOLDER texts.json rows.npz
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from specstream.export import contract
from specstream.quantize.formats import FloatArray
from specstream.quantize.products import find_products

MAIN_GRAPH, STREAM_GRAPH = "model.onnx", "streams.onnx"
KEPT_ROWS = 192  # of each product's input: enough to see every channel, small enough for all products of a model at once
CHUNK = 64  # rows of one call
EVERY = 4  # of the continuation's rows, one in so many carries streams

Array = npt.NDArray[Any]


@dataclass
class Sample:
    """Rows that one value had.

    Attributes:
        largest: float32 [K], the largest magnitude of each channel over all rows seen.
        rows: float32 [at most ``KEPT_ROWS``, K]: some of them, drawn evenly, and those with the largest entries.
        seen: how many rows there were.
    """

    largest: FloatArray
    rows: FloatArray
    seen: int


@dataclass
class _Reservoir:
    """Keeps an even sample of a stream of rows (reservoir sampling) beside the rows with the largest entries."""

    kept: int
    rng: np.random.Generator
    seen: int = 0
    largest: FloatArray | None = None
    drawn: list[FloatArray] = field(default_factory=list)
    peaks: list[tuple[float, FloatArray]] = field(default_factory=list)

    def add(self, rows: FloatArray) -> None:
        magnitude = np.abs(rows)
        most = magnitude.max(axis=0)
        self.largest = most if self.largest is None else np.maximum(self.largest, most)
        spare = self.kept // 4
        peak = magnitude.max(axis=1)
        for index in np.argsort(-peak)[:spare]:
            self.peaks.append((float(peak[index]), rows[index].copy()))
        self.peaks = sorted(self.peaks, key=lambda pair: -pair[0])[:spare]
        for row in rows:
            self.seen += 1
            if len(self.drawn) < self.kept - spare:
                self.drawn.append(row.copy())
            elif (place := int(self.rng.integers(self.seen))) < len(self.drawn):
                self.drawn[place] = row.copy()

    def sample(self) -> Sample:
        assert self.largest is not None
        rows = np.stack([*self.drawn, *(row for _, row in self.peaks)])
        return Sample(self.largest, rows.astype(np.float32), self.seen)


class _Graph:
    """One graph of a bundle under ONNX Runtime, the inputs of its products among its outputs."""

    def __init__(self, path: Path) -> None:
        import onnxruntime as ort

        model = ir.load(path)
        self.inputs_of = {product.rows.name or "" for product in find_products(model)}
        declared = {value.name for value in model.graph.outputs}
        for product in find_products(model):
            if product.rows.name not in declared:
                model.graph.outputs.append(product.rows)
                declared.add(product.rows.name)
        options = ort.SessionOptions()
        options.enable_mem_pattern = False
        options.log_severity_level = 3
        # The graph comes as bytes, its weights from where they are; nothing is written, and nothing is packed a second time.
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
        options.add_session_config_entry("session.disable_prepacking", "1")
        self.session = ort.InferenceSession(_serialized(model), options, providers=["CPUExecutionProvider"])
        self.shapes = {value.name: value.shape for value in self.session.get_inputs()}
        self.output_shapes = {value.name: value.shape for value in self.session.get_outputs()}
        self._value = ort.OrtValue.ortvalue_from_numpy

    def run(self, inputs: Mapping[str, Array], cache: Mapping[str, Array]) -> dict[str, Array]:
        """One call, the cache in place. Returns all outputs but the cache."""
        binding = self.session.io_binding()
        for name in self.shapes:
            binding.bind_ortvalue_input(name, self._value(cache[name] if name in cache else inputs[name]))
        names = [name for name in self.output_shapes if not name.startswith("present.")]
        for name in names:
            binding.bind_output(name)
        for name in self.output_shapes:
            if name.startswith("present."):
                binding.bind_ortvalue_output(name, self._value(cache[name.replace("present", "past_key_values", 1)]))
        self.session.run_with_iobinding(binding)
        return {name: value.numpy() for name, value in zip(names, binding.get_outputs(), strict=False)}


def _serialized(model: ir.Model) -> bytes:
    data: bytes = ir.to_proto(model).SerializeToString()
    return data


def collect(
    folder: Path, texts: Sequence[tuple[Sequence[int], Sequence[int]]], kept: int = KEPT_ROWS, seed: int = 0
) -> dict[str, dict[str, Sample]]:
    """Run a bundle's graphs over prompts and their continuations.

    Args:
        folder: of the bundle: ``model.onnx``, and ``streams.onnx`` where it has one.
        texts: token ids of prompts and continuations.
        kept: rows to keep of each value.
        seed: of the draw.

    Returns:
        For each graph's file name: value that is a product's input -> its sample.
    """
    main = _Graph(folder / MAIN_GRAPH)
    streams = _Graph(folder / STREAM_GRAPH) if (folder / STREAM_GRAPH).is_file() else None
    _, kv_heads, _, head_dim = main.shapes[contract.past_key(0)]
    gamma = main.output_shapes[contract.STREAM_IDS][1] if contract.STREAM_ROWS in main.shapes else 0
    gamma = max(gamma, 0 if streams is None else streams.output_shapes[contract.STREAM_IDS][1])
    capacity = max(len(prompt) + len(continuation) for prompt, continuation in texts) + gamma * (CHUNK // EVERY + 1)
    shape = (1, kv_heads, capacity, head_dim)
    cache = {name: np.zeros(shape, dtype=np.float32) for name in main.shapes if name.startswith("past_key_values.")}
    rng = np.random.default_rng(seed)
    found: dict[str, dict[str, _Reservoir]] = {MAIN_GRAPH: {}}
    if streams is not None:
        found[STREAM_GRAPH] = {}

    def keep(graph: str, values: set[str], outputs: Mapping[str, Array]) -> None:
        for name in sorted(values):  # a set's order differs from process to process, and with it what is drawn
            rows = outputs[name].reshape(-1, outputs[name].shape[-1])
            if len(rows):
                found[graph].setdefault(name, _Reservoir(kept, rng)).add(rows)

    for prompt, continuation in texts:
        tokens = [*prompt, *continuation]
        for past in range(0, len(tokens), CHUNK):
            rows = tokens[past : past + CHUNK]
            carriers = [row for row in range(0, len(rows), EVERY) if past + row >= len(prompt) - 1]
            # Streams of the last rows fit behind them: the capacity counts with it.
            outputs = main.run(_chunk(rows, past, carriers), cache)
            keep(MAIN_GRAPH, main.inputs_of, outputs)
            if streams is None:
                continue
            for row in carriers:
                given = {
                    contract.ENTRY_STATE: outputs[contract.ENTRY_STATES][row : row + 1],
                    contract.ROOT_ID: outputs[contract.NEXT_IDS][row : row + 1],
                    contract.PAST_LENGTH: np.array([past + row + 1], dtype=np.int32),
                }
                # The streams' scratch rows overwrite rows behind this one, which are put back.
                saved = {name: cache[name].copy() for name in streams.shapes if name in cache}
                keep(STREAM_GRAPH, streams.inputs_of, streams.run(given, cache))
                for name, array in saved.items():
                    cache[name][...] = array
    return {graph: {name: part.sample() for name, part in values.items()} for graph, values in found.items()}


def _chunk(tokens: Sequence[int], past: int, carriers: Sequence[int]) -> dict[str, Array]:
    count = len(tokens)
    return {
        contract.INPUT_IDS: np.array([tokens], dtype=np.int64),
        contract.POSITION_IDS: np.arange(past, past + count, dtype=np.int64)[None],
        contract.TREE_MASK: np.tri(count, dtype=np.bool_),
        contract.PAST_LENGTH: np.array([past], dtype=np.int32),
        contract.LOGIT_ROWS: np.arange(count, dtype=np.int64),
        contract.STREAM_ROWS: np.array(carriers, dtype=np.int64),
    }


def write_samples(file: Path, samples: Mapping[str, Mapping[str, Sample]]) -> None:
    """Put what :func:`collect` found into one file."""
    arrays: dict[str, Any] = {}
    for graph, values in samples.items():
        for name, sample in values.items():
            arrays[f"{graph}\t{name}\tlargest"], arrays[f"{graph}\t{name}\trows"] = sample.largest, sample.rows
            arrays[f"{graph}\t{name}\tseen"] = np.array(sample.seen)
    # One array after the other: the archive format's own names cannot hold any value's name.
    names = list(arrays)
    np.savez(file, names=np.array(json.dumps(names)), **{f"a{i}": arrays[name] for i, name in enumerate(names)})


def read_samples(file: Path) -> dict[str, dict[str, Sample]]:
    """What :func:`write_samples` wrote."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    with np.load(file, allow_pickle=False) as stored:
        for i, key in enumerate(json.loads(str(stored["names"]))):
            graph, name, part = key.split("\t")
            found.setdefault(graph, {}).setdefault(name, {})[part] = stored[f"a{i}"]
    return {
        graph: {name: Sample(parts["largest"], parts["rows"], int(parts["seen"])) for name, parts in values.items()}
        for graph, values in found.items()
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m specstream.quantize.calibrate", description="Catch inputs of a graph's products.")
    parser.add_argument("folder", type=Path, help="bundle of fp32 graphs")
    parser.add_argument("texts", type=Path, help='JSON: a list of {"prompt": [ids], "continuation": [ids]}')
    parser.add_argument("out", type=Path, help=".npz to write")
    given = parser.parse_args(arguments)
    texts = [(text["prompt"], text["continuation"]) for text in json.loads(given.texts.read_text(encoding="utf-8"))]
    write_samples(given.out, collect(given.folder, texts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
