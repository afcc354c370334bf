"""ONNX Runtime behind the `Session` protocol. Knows the graph contract and the cache's memory; nothing of text or drafting.

The cache is one NumPy array. Each layer's tensor is a slice of it, bound as input and as output, so the graph writes new rows in
place, nothing is copied between calls, and a commit is one NumPy assignment.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from specstream.export import contract
from specstream.models.errors import UserError
from specstream.runtimes.bundle import Bundle
from specstream.runtimes.processor import saturates
from specstream.runtimes.session import NEAR_TIE, PROMPT_CHUNK, DraftOutput, Rows, StepOutput
from specstream.runtimes.tree import FloatArray

Sizes = dict[str, dict[int, int]]  # of a graph's value, by name and axis

FIRST_ALLOCATION = 512  # rows of cache at the start when no capacity is asked for; it doubles from there


class OrtSession:
    """A bundle's graph with its cache (see :class:`specstream.runtimes.session.Session`).

    Args:
        bundle: what to run.
        threads: of one operator; all cores that this process may use when left out.
        capacity: rows of cache to allocate at once and never exceed. Left out, the cache starts small and grows by doubling up
            to the model's context length.

    Attributes:
        pad_single: run a call of one row with a second row beside it that nothing looks at, so that the kernels of larger calls round
            it as they would in a tree. Where activations are rounded, this makes plain decoding agree with speculation.

    Raises:
        UserError: the graph cannot be loaded or is not the one that the manifest describes; threads or capacity make no sense.
    """

    def __init__(self, bundle: Bundle, threads: int | None = None, capacity: int | None = None) -> None:
        model, streams = bundle.manifest.model, bundle.manifest.streams
        if threads is not None and threads < 1:
            raise UserError(f"threads: {threads} given, 1 or more expected")
        if capacity is not None and not 1 <= capacity <= model.context_length:
            raise UserError(f"capacity: {capacity} given, 1 to {model.context_length} (the model's context) expected")
        if bundle.manifest.contract.cache_dtype != "float32":
            raise UserError(f"{bundle.folder}: a {bundle.manifest.contract.cache_dtype} cache; this specstream runs float32")
        if bundle.manifest.quantization.requires is not None and saturates():
            raise UserError(
                f"{bundle.folder}: its {bundle.manifest.quantization.scheme} weights need a processor with VNNI, which this one lacks: "
                "results would be wrong. Quantize with --scheme int8 or int4 for it"
            )
        self.threads = threads or usable_cores()
        self.capacity = capacity or model.context_length
        self.length = 0
        self.vocab_size = model.vocab_size
        self.num_streams = streams.num_streams if streams else 0
        self.top_k = streams.top_k if streams else 0
        self.delayed = streams is not None and streams.placement == "delayed"
        self.prompt_chunk = PROMPT_CHUNK
        self.max_tree_rows = self.capacity
        self.max_stream_rows = 0 if self.delayed or not self.num_streams else self.capacity
        self.near_tie = NEAR_TIE
        self._layers = model.num_layers
        self._hidden = model.hidden_size
        self._cache_shape = (model.num_kv_heads, model.head_dim)
        self._draft_binding: ort.IOBinding | None = None
        self._session = _load_graph(bundle, bundle.manifest.graph, self.threads)
        self._draft_session: ort.InferenceSession | None = None
        self._first_draft_layer = model.num_layers - (streams.stream_layers if streams else 0)
        if streams is not None and streams.graph is not None:
            self._draft_session = _load_graph(bundle, streams.graph, self.threads)
        self._has_pairs = self._draft_session is not None and any(
            o.name == contract.STREAM_PAIRS for o in self._draft_session.get_outputs()
        )
        self._check_contract(bundle)
        self.pad_single = False
        self._committed: int | None = None  # row of the last call that was committed last
        self._last_rows = 0  # rows of the last call that a commit may name
        self._allocate(capacity or min(FIRST_ALLOCATION, model.context_length))

    @property
    def allocated(self) -> int:
        """Rows that the cache has memory for now."""
        rows: int = self.cache.shape[4]
        return rows

    def run(self, rows: Rows, logits: bool = False) -> StepOutput:
        """See :meth:`Session.run`."""
        num_rows, num_streamed = len(rows.input_ids), len(rows.stream_rows)
        if num_streamed and (self.delayed or not self.num_streams):
            raise ValueError("stream rows given to a graph without streams beside its rows")
        if self.pad_single and num_rows == 1 and not num_streamed and self.length + 2 <= self.capacity:
            output = self._run(_twice(rows), logits)
            self._last_rows = 1
            return StepOutput(output.next_ids[:1], None if output.logits is None else output.logits[:1], None, None)
        return self._run(rows, logits)

    def _run(self, rows: Rows, logits: bool) -> StepOutput:
        num_rows, num_streamed = len(rows.input_ids), len(rows.stream_rows)
        self._reserve(self.length + num_rows + num_streamed * self.num_streams)
        num_scored = len(rows.logit_rows)
        binding = self._binding(logits, num_streamed > 0)
        inputs: dict[str, npt.NDArray[Any]] = {
            contract.INPUT_IDS: rows.input_ids[None],
            contract.POSITION_IDS: rows.position_ids[None],
            contract.TREE_MASK: rows.tree_mask,
            contract.PAST_LENGTH: np.array([self.length], dtype=np.int32),
            contract.LOGIT_ROWS: rows.logit_rows,
        }
        if self.num_streams and not self.delayed:
            inputs[contract.STREAM_ROWS] = rows.stream_rows
        for name, array in inputs.items():
            binding.bind_ortvalue_input(name, _view(np.ascontiguousarray(array)))
        # Outputs that are not bound are not fetched: nobody pays for logits that greedy decoding does not read.
        next_ids = np.empty(num_scored, dtype=np.int64)
        outputs: dict[str, npt.NDArray[Any]] = {contract.NEXT_IDS: next_ids}
        if self.delayed:
            self._entry: FloatArray = np.empty((num_rows, self._hidden), dtype=np.float32)
            outputs[contract.ENTRY_STATES] = self._entry
        if logits:
            outputs[contract.LOGITS] = np.empty((num_scored, self.vocab_size), dtype=np.float32)
        if num_streamed:
            shape = (num_streamed, self.num_streams, self.top_k)
            outputs[contract.STREAM_IDS] = np.empty(shape, dtype=np.int64)
            outputs[contract.STREAM_LOGPROBS] = np.empty(shape, dtype=np.float32)
        for name, array in outputs.items():
            binding.bind_ortvalue_output(name, _view(array))
        self._session.run_with_iobinding(binding)
        self._last_rows, self._committed = num_rows, None
        return StepOutput(
            next_ids=next_ids,
            logits=outputs.get(contract.LOGITS),
            stream_ids=outputs.get(contract.STREAM_IDS),
            stream_logprobs=outputs.get(contract.STREAM_LOGPROBS),
        )

    def draft(self, token: int) -> DraftOutput:
        """See :meth:`Session.draft`."""
        if self._draft_session is None:
            raise ValueError("this bundle's streams have no pass of their own")
        row = self._committed
        if row is None:
            raise ValueError("draft without a row committed by the last call")
        self._reserve(self.length + self.num_streams)
        if self._draft_binding is None:
            self._draft_binding = self._draft_session.io_binding()
            self._bind_cache(self._draft_binding, range(self._first_draft_layer, self._layers))
        binding = self._draft_binding
        shape = (1, self.num_streams, self.top_k)
        ids, logprobs = np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.float32)
        pairs = np.empty((*shape, self.top_k), dtype=np.float32) if self._has_pairs else None
        for name, given in (
            (contract.ENTRY_STATE, self._entry[row : row + 1]),
            (contract.ROOT_ID, np.array([token], dtype=np.int64)),
            (contract.PAST_LENGTH, np.array([self.length], dtype=np.int32)),
        ):
            binding.bind_ortvalue_input(name, _view(given))
        for name, result in ((contract.STREAM_IDS, ids), (contract.STREAM_LOGPROBS, logprobs), (contract.STREAM_PAIRS, pairs)):
            if result is not None:
                binding.bind_ortvalue_output(name, _view(result))
        self._draft_session.run_with_iobinding(binding)
        return DraftOutput(ids[0], logprobs[0], None if pairs is None else pairs[0])

    def commit(self, rows: Sequence[int]) -> None:
        """See :meth:`Session.commit`. Rows that lie where they belong (plain decoding, the primary chain) are not touched."""
        kept = np.asarray(rows, dtype=np.int64)
        if len(kept) and (kept[0] < 0 or kept[-1] >= self._last_rows or (np.diff(kept) <= 0).any()):
            raise ValueError(f"commit of rows {kept.tolist()} after a call of {self._last_rows}: ascending row numbers expected")
        self._last_rows, self._committed = 0, int(kept[-1]) if len(kept) else None
        moved = np.flatnonzero(kept != np.arange(len(kept)))
        if len(moved):
            first, past = int(moved[0]), self.length
            self.cache[:, :, :, :, past + first : past + len(kept)] = self.cache[:, :, :, :, past + kept[first:]]
        self.length += len(kept)

    def rewind(self, length: int) -> None:
        """See :meth:`Session.rewind`."""
        if not 0 <= length <= self.length:
            raise ValueError(f"rewind to {length}: the cache has {self.length} rows")
        self.length = length
        self._last_rows, self._committed = 0, None

    def _reserve(self, rows: int) -> None:
        """Make room for ``rows`` of cache: doubling copies each row once on average, and only committed ones."""
        if rows > self.capacity:
            raise ValueError(f"{rows} rows of cache needed, the capacity is {self.capacity}")
        if rows > self.allocated:
            grown, old = self.allocated, self.cache
            while grown < rows:
                grown *= 2
            self._allocate(min(grown, self.capacity))
            self.cache[:, :, :, :, : self.length] = old[:, :, :, :, : self.length]

    def _allocate(self, rows: int) -> None:
        heads, head_dim = self._cache_shape
        # Zeros, not empty: rows that no mask lets through still meet a product with 0 in some kernels, and 0 · NaN is NaN.
        self.cache: FloatArray = np.zeros((self._layers, 2, 1, heads, rows, head_dim), dtype=np.float32)
        self._bindings: dict[tuple[bool, bool], ort.IOBinding] = {}
        self._draft_binding = None

    def _binding(self, logits: bool, streams: bool) -> ort.IOBinding:
        """The binding that returns these outputs; each kind has its own, since a bound output cannot be unbound alone."""
        binding = self._bindings.get((logits, streams))
        if binding is None:
            binding = self._bindings[logits, streams] = self._session.io_binding()
            self._bind_cache(binding, range(self._layers))
        return binding

    def _bind_cache(self, binding: ort.IOBinding, layers: range) -> None:
        """Past and present of each layer: the same slice of the cache."""
        for layer in layers:
            key, value = _view(self.cache[layer, 0]), _view(self.cache[layer, 1])
            binding.bind_ortvalue_input(contract.past_key(layer), key)
            binding.bind_ortvalue_input(contract.past_value(layer), value)
            binding.bind_ortvalue_output(contract.present_key(layer), key)
            binding.bind_ortvalue_output(contract.present_value(layer), value)

    def _check_contract(self, bundle: Bundle) -> None:
        """Compare the graphs with contract v1 and the manifest before the first call."""
        inputs: Sizes = {
            name: {} for name in (contract.INPUT_IDS, contract.POSITION_IDS, contract.TREE_MASK, contract.PAST_LENGTH, contract.LOGIT_ROWS)
        }
        outputs: Sizes = {contract.NEXT_IDS: {}, contract.LOGITS: {1: self.vocab_size}}
        if self.num_streams and not self.delayed:
            inputs[contract.STREAM_ROWS] = {}
            outputs |= {name: {1: self.num_streams, 2: self.top_k} for name in (contract.STREAM_IDS, contract.STREAM_LOGPROBS)}
        if self.delayed:
            outputs[contract.ENTRY_STATES] = {1: self._hidden}
        self._check_graph(bundle.path(bundle.manifest.graph), self._session, inputs, outputs, range(self._layers))
        if self._draft_session is not None:
            assert bundle.manifest.streams is not None
            assert bundle.manifest.streams.graph is not None
            inputs = {contract.ENTRY_STATE: {1: self._hidden}, contract.ROOT_ID: {}, contract.PAST_LENGTH: {}}
            outputs = {name: {1: self.num_streams, 2: self.top_k} for name in (contract.STREAM_IDS, contract.STREAM_LOGPROBS)}
            if self._has_pairs:
                outputs[contract.STREAM_PAIRS] = {1: self.num_streams, 2: self.top_k, 3: self.top_k}
            layers = range(self._first_draft_layer, self._layers)
            self._check_graph(bundle.path(bundle.manifest.streams.graph), self._draft_session, inputs, outputs, layers)

    def _check_graph(self, file: Path, session: ort.InferenceSession, inputs: Sizes, outputs: Sizes, layers: range) -> None:
        """Names, and sizes by axis, of a graph's inputs and outputs, the caches of ``layers`` among them; all problems at once."""
        kv_heads, head_dim = self._cache_shape
        cache_shape = {1: kv_heads, 3: head_dim}
        inputs = inputs | {name(i): cache_shape for i in layers for name in (contract.past_key, contract.past_value)}
        outputs = outputs | {name(i): cache_shape for i in layers for name in (contract.present_key, contract.present_value)}
        problems = []
        for kind, expected, found in (("input", inputs, session.get_inputs()), ("output", outputs, session.get_outputs())):
            shapes = {value.name: value.shape for value in found}
            problems += [f"no {kind} {name}" for name in expected if name not in shapes]
            problems += [f"unexpected {kind} {name}" for name in shapes if name not in expected and kind == "input"]
            for name, sizes in expected.items():
                for axis, size in sizes.items():
                    # Symbolic sizes are strings or None and promise nothing.
                    known = shapes[name][axis] if name in shapes and axis < len(shapes[name]) else None
                    if isinstance(known, int) and known != size:
                        problems.append(f"{kind} {name} has size {known} in dimension {axis} ({size} expected)")
        if problems:
            more = f" and {len(problems) - 4} more" if len(problems) > 4 else ""
            raise UserError(
                f"{file}: not the graph that the manifest describes (contract v{contract.CONTRACT_VERSION}): "
                f"{'; '.join(problems[:4])}{more}; export it again"
            )


def _twice(rows: Rows) -> Rows:
    """A single scored row, and the same beside it; neither sees the other."""
    return Rows(
        input_ids=np.repeat(rows.input_ids, 2),
        position_ids=np.repeat(rows.position_ids, 2),
        tree_mask=np.eye(2, dtype=np.bool_),
        logit_rows=np.arange(2, dtype=np.int64),
        stream_rows=rows.stream_rows,
    )


def usable_cores() -> int:
    """Cores that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _view(array: npt.NDArray[Any]) -> ort.OrtValue:
    """The array's own memory as a tensor; the tensor keeps the array alive."""
    return ort.OrtValue.ortvalue_from_numpy(array)


def _load_graph(bundle: Bundle, name: str, threads: int) -> ort.InferenceSession:
    graph = bundle.path(name)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # A memory pattern is kept for each set of input shapes; they repeat while the past grows, which no pattern knows.
    options.enable_mem_pattern = False
    # Threads that go on spinning after a call take the cores from the next one of another session: of the streams' own pass, or of a
    # second bundle in this process.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    # ONNX Runtime refuses weights behind a link that leaves the graph's own folder, so it gets their content from us.
    files = _files_beside(bundle, graph)
    home = graph.resolve().parent
    linked_away = any(not file.resolve().is_relative_to(home) for file in files)
    maps = [_map(file) for file in files] if linked_away else []
    if maps:
        names = [file.relative_to(graph.parent).as_posix() for file in files]
        options.add_external_initializers_from_files_in_memory(names, maps, [len(m) for m in maps])
    try:
        session = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors share no narrower class
        reason = str(error).splitlines()[0]
        raise UserError(f"{graph}: ONNX Runtime {ort.__version__} cannot load it: {reason}") from error
    for mapped in maps:  # the weights have been copied
        mapped.close()
    return session


def _files_beside(bundle: Bundle, graph: Path) -> list[Path]:
    """Files that the graph may name as its weights: all others below its folder that hold anything."""
    files = [bundle.folder / entry.path for entry in bundle.manifest.files if entry.bytes]
    return [file for file in files if file != graph and file.is_relative_to(graph.parent)]


def _map(path: Path) -> mmap.mmap:
    with open(path, "rb") as stream:
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
