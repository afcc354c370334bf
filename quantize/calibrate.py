"""What goes into a graph's products, caught while the unquantized graphs of a bundle run on token sequences: rows of activations, or
their second moments; and how large keys and values of the cache become.

Knows graph contract v1 and, where a bundle has them, its graph of delayed streams; nothing of text or of schemes. In a process of
its own, so that the runtime's copy of the weights is gone when quantizing begins:

    python -m specstream.quantize.calibrate FOLDER texts.json rows.npz
    python -m specstream.quantize.calibrate FOLDER texts.json moments --moments 500000000
    python -m specstream.quantize.calibrate FOLDER texts.json cache.npy --cache
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
MOMENT_NAMES = "names.json"
ADDED_ROWS = 512  # that are added to moments at once: each addition reads and writes the whole matrix
EVERY = 4  # of the continuation's rows, one in so many carries streams

Array = npt.NDArray[Any]
Texts = Sequence[tuple[Sequence[int], Sequence[int]]]  # token ids of prompts and their continuations


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
        self.widths = {product.rows.name or "": product.shape[0] for product in find_products(model)}
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


class _Runner:
    """A bundle's graphs, run over texts as often as one likes."""

    def __init__(self, folder: Path) -> None:
        self.main = _Graph(folder / MAIN_GRAPH)
        self.streams = _Graph(folder / STREAM_GRAPH) if (folder / STREAM_GRAPH).is_file() else None
        self.graphs = {MAIN_GRAPH: self.main} | ({} if self.streams is None else {STREAM_GRAPH: self.streams})
        self.cache: dict[str, Array] = {}  # as the call that was just seen left it, rows of streams behind the main rows among it

    def width(self, graph: str, name: str) -> int:
        """K of a value that products of a graph read."""
        return self.graphs[graph].widths[name]

    def run(self, texts: Texts, seen: Callable[[str, Mapping[str, Array]], None]) -> None:
        """Run the graphs over prompts and their continuations.

        Args:
            texts: token ids of both.
            seen: called with a graph's file name and its outputs, inputs of its products among them, after each of its calls.
        """
        main, streams = self.main, self.streams
        _, kv_heads, _, head_dim = main.shapes[contract.past_key(0)]
        gamma = main.output_shapes[contract.STREAM_IDS][1] if contract.STREAM_ROWS in main.shapes else 0
        gamma = max(gamma, 0 if streams is None else streams.output_shapes[contract.STREAM_IDS][1])
        capacity = max(len(prompt) + len(continuation) for prompt, continuation in texts) + gamma * (CHUNK // EVERY + 1)
        shape = (1, kv_heads, capacity, head_dim)
        cache = {name: np.zeros(shape, dtype=np.float32) for name in main.shapes if name.startswith("past_key_values.")}
        self.cache = cache
        for prompt, continuation in texts:
            tokens = [*prompt, *continuation]
            for past in range(0, len(tokens), CHUNK):
                rows = tokens[past : past + CHUNK]
                carriers = [row for row in range(0, len(rows), EVERY) if past + row >= len(prompt) - 1]
                # Streams of the last rows fit behind them: the capacity counts with it.
                outputs = main.run(_chunk(rows, past, carriers), cache)
                seen(MAIN_GRAPH, outputs)
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
                    seen(STREAM_GRAPH, streams.run(given, cache))
                    for name, array in saved.items():
                        cache[name][...] = array


def collect(folder: Path, texts: Texts, kept: int = KEPT_ROWS, seed: int = 0) -> dict[str, dict[str, Sample]]:
    """Sample rows of the inputs of a bundle's products.

    Args:
        folder: of the bundle: ``model.onnx``, and ``streams.onnx`` where it has one.
        texts: token ids of prompts and continuations.
        kept: rows to keep of each value.
        seed: of the draw.

    Returns:
        For each graph's file name: value that is a product's input -> its sample.
    """
    runner = _Runner(folder)
    rng = np.random.default_rng(seed)
    found: dict[str, dict[str, _Reservoir]] = {graph: {} for graph in runner.graphs}

    def keep(graph: str, outputs: Mapping[str, Array]) -> None:
        for name in sorted(runner.graphs[graph].widths):  # a set's order differs from process to process, and with it what is drawn
            if len(rows := _as_rows(outputs[name])):
                found[graph].setdefault(name, _Reservoir(kept, rng)).add(rows)

    runner.run(texts, keep)
    return {graph: {name: part.sample() for name, part in values.items()} for graph, values in found.items()}


def collect_moments(folder: Path, texts: Texts, most_bytes: int) -> Iterator[tuple[str, str, FloatArray]]:
    """Second moments of the inputs of a bundle's products: the mean of x xᵀ, float32 [K, K].

    Args:
        folder, texts: as for :func:`collect`.
        most_bytes: of moments at a time (one value's at least). The texts are run anew for each such portion.

    Yields:
        A graph's file name, the value's name, its moments; nothing of values that no text reached.
    """
    runner = _Runner(folder)
    wanted = [(graph, name) for graph, part in runner.graphs.items() for name in sorted(part.widths)]
    while wanted:
        portion: dict[tuple[str, str], FloatArray] = {}
        free = most_bytes
        while wanted and (not portion or 4 * runner.width(*wanted[0]) ** 2 <= free):
            value, width = wanted[0], runner.width(*wanted.pop(0))
            portion[value] = np.zeros((width, width), dtype=np.float32)
            free -= portion[value].nbytes
        counts = _add_moments(runner, texts, portion)
        for value in list(portion):
            sums = portion.pop(value)
            if counts[value]:
                yield *value, sums / np.float32(counts[value])


def _add_moments(runner: _Runner, texts: Texts, sums: Mapping[tuple[str, str], FloatArray]) -> Counter[tuple[str, str]]:
    """Add x xᵀ over the texts to the sums of some values; returns how many rows x each had."""
    counts: Counter[tuple[str, str]] = Counter()
    waiting: dict[tuple[str, str], list[FloatArray]] = {value: [] for value in sums}

    def add(value: tuple[str, str]) -> None:
        rows = np.concatenate(waiting[value]) if waiting[value] else np.empty((0, len(sums[value])), dtype=np.float32)
        sums[value][...] += rows.T @ rows
        counts[value] += len(rows)
        waiting[value].clear()

    def seen(graph: str, outputs: Mapping[str, Array]) -> None:
        for value in sums:
            if value[0] == graph:
                waiting[value].append(_as_rows(outputs[value[1]]))
                if sum(map(len, waiting[value])) >= ADDED_ROWS:
                    add(value)

    runner.run(texts, seen)
    for value in sums:
        add(value)
    return counts


def collect_cache(folder: Path, texts: Texts) -> FloatArray:
    """Largest magnitude of each channel of keys and values, over the texts' rows and their streams'.

    Args:
        folder, texts: as for :func:`collect`.

    Returns:
        float32 [layers, 2, kv_heads, head_dim], keys before values.
    """
    runner = _Runner(folder)
    _, kv_heads, _, head_dim = runner.main.shapes[contract.past_key(0)]
    count = sum(name.startswith("past_key_values.") for name in runner.main.shapes) // 2
    largest = np.zeros((count, 2, kv_heads, head_dim), dtype=np.float32)

    def seen(graph: str, _outputs: Mapping[str, Array]) -> None:
        for layer in range(count):
            for which, name in enumerate((contract.past_key(layer), contract.past_value(layer))):
                if name in runner.graphs[graph].shapes:
                    magnitude = np.abs(runner.cache[name][0]).max(axis=1)
                    np.maximum(largest[layer, which], magnitude, out=largest[layer, which])

    runner.run(texts, seen)
    return largest


def _as_rows(array: Array) -> FloatArray:
    rows: FloatArray = array.reshape(-1, array.shape[-1])
    return rows


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


def write_moments(folder: Path, moments: Iterable[tuple[str, str, FloatArray]]) -> None:
    """Put what :func:`collect_moments` yields into a new folder, one file each."""
    folder.mkdir()
    names: list[tuple[str, str]] = []
    for graph, name, array in moments:
        np.save(folder / f"{len(names)}.npy", array)
        names.append((graph, name))
    (folder / MOMENT_NAMES).write_text(json.dumps(names), encoding="utf-8")


class _Stored(Mapping[str, FloatArray]):
    """Moments of one graph's values, each read when it is asked for."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = files

    def __getitem__(self, name: str) -> FloatArray:
        array: FloatArray = np.load(self._files[name], allow_pickle=False)
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def read_moments(folder: Path) -> dict[str, Mapping[str, FloatArray]]:
    """What :func:`write_moments` wrote: by graph, then by value. The folder must stay."""
    files: dict[str, dict[str, Path]] = {}
    for number, (graph, name) in enumerate(json.loads((folder / MOMENT_NAMES).read_text(encoding="utf-8"))):
        files.setdefault(graph, {})[name] = folder / f"{number}.npy"
    return {graph: _Stored(of_graph) for graph, of_graph in files.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m specstream.quantize.calibrate", description="Catch inputs of a graph's products.")
    parser.add_argument("folder", type=Path, help="bundle of fp32 graphs")
    parser.add_argument("texts", type=Path, help='JSON: a list of {"prompt": [ids], "continuation": [ids]}')
    parser.add_argument("out", type=Path, help=".npz to write; with --moments a folder, with --cache an .npy")
    parser.add_argument("--moments", type=int, metavar="BYTES", help="second moments in place of rows, as many bytes of them at a time")
    parser.add_argument("--cache", action="store_true", help="how large the cache's channels become, in place of rows")
    given = parser.parse_args(arguments)
    texts = [(text["prompt"], text["continuation"]) for text in json.loads(given.texts.read_text(encoding="utf-8"))]
    if given.cache:
        np.save(given.out, collect_cache(given.folder, texts))
    elif given.moments is None:
        write_samples(given.out, collect(given.folder, texts))
    else:
        write_moments(given.out, collect_moments(given.folder, texts, given.moments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
