"""ONNX Runtime behind the `Session` protocol. Knows the graph contract and the cache's memory; nothing of text or drafting.

The cache is one NumPy array. Each layer's tensor is a slice of it, bound as input and as output, so the graph writes new rows in
place, nothing is copied between calls, and a commit is one NumPy assignment. A call's other inputs and its outputs are small arrays
that stay bound too: a call fills in the inputs, runs, and hands out views of the outputs.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from specstream.export import contract
from specstream.models.errors import UserError
from specstream.runtimes.bundle import Bundle
from specstream.runtimes.processor import saturates
from specstream.runtimes.session import NEAR_TIE, PROMPT_CHUNK, DraftOutput, Rows, StepOutput
from specstream.runtimes.threads import join_pool
from specstream.runtimes.tree import FloatArray

Sizes = dict[str, dict[int, int]]  # of a graph's value, by name and axis

FIRST_ALLOCATION = 512  # rows of cache at the start when no capacity is asked for; it doubles from there
CACHE_TYPES: Final = {"float32": "tensor(float)", "int8": "tensor(int8)"}  # NumPy's name: ONNX Runtime's
_KEPT_ROWS: Final = 32  # calls of more rows (prompts) are bound anew each time
_SCORE_BYTES: Final = 64 << 20  # that a prompt's call may take for attention scores
_FEWEST_PROMPT_ROWS: Final = 32
TILED_ATTENTION_OFF: Final = "ORT_GQA_DISABLE_FLASH_ATTENTION"  # ONNX Runtime reads it when a session is made
_ENVIRONMENT: Final = threading.Lock()  # held while it is set


@dataclass(frozen=True, eq=False)
class _Bound:
    """Calls of one shape: their binding, and the arrays that it reads and writes."""

    binding: ort.IOBinding
    inputs: Mapping[str, npt.NDArray[Any]]
    outputs: Mapping[str, npt.NDArray[Any]]
    result: StepOutput


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
        cache_dtype = bundle.manifest.contract.cache_dtype
        if cache_dtype not in CACHE_TYPES:
            raise UserError(f"{bundle.folder}: a {cache_dtype} cache; this specstream runs {' and '.join(CACHE_TYPES)}")
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
        self.max_tree_rows = self.capacity
        self.max_stream_rows = 0 if self.delayed or not self.num_streams else self.capacity
        self.near_tie = NEAR_TIE
        self._layers, self._heads = model.num_layers, model.num_heads
        self._hidden = model.hidden_size
        self._cache_shape = (model.num_kv_heads, model.head_dim)
        self._cache_dtype = cache_dtype
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
        self._last_call: _Bound | None = None
        self._last_rows = 0  # rows of the last call that a commit may name
        self._draft_pass: tuple[ort.IOBinding, Mapping[str, npt.NDArray[Any]], DraftOutput] | None = None
        self._logits: FloatArray = np.empty((0, self.vocab_size), dtype=np.float32)
        self._allocate(capacity or min(FIRST_ALLOCATION, model.context_length))

    @property
    def allocated(self) -> int:
        """Rows that the cache has memory for now."""
        rows: int = self.cache.shape[4]
        return rows

    @property
    def prompt_chunk(self) -> int:
        """Rows of a prompt in one call at most: fewer where the cache is so large that their attention scores would take much memory."""
        affordable = _SCORE_BYTES // (4 * self._heads * self.allocated)
        return min(PROMPT_CHUNK, max(affordable, _FEWEST_PROMPT_ROWS))

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
        call = self._bound(num_rows, len(rows.logit_rows), num_streamed, logits)
        inputs = call.inputs
        inputs[contract.INPUT_IDS][0] = rows.input_ids
        inputs[contract.POSITION_IDS][0] = rows.position_ids
        inputs[contract.TREE_MASK][...] = rows.tree_mask
        inputs[contract.PAST_LENGTH][0] = self.length
        inputs[contract.LOGIT_ROWS][...] = rows.logit_rows
        if num_streamed:
            inputs[contract.STREAM_ROWS][...] = rows.stream_rows
        self._session.run_with_iobinding(call.binding)
        self._last_call, self._last_rows, self._committed = call, num_rows, None
        return call.result

    def draft(self, token: int) -> DraftOutput:
        """See :meth:`Session.draft`."""
        if self._draft_session is None:
            raise ValueError("this bundle's streams have no pass of their own")
        row, last = self._committed, self._last_call
        if row is None or last is None:
            raise ValueError("draft without a row committed by the last call")
        self._reserve(self.length + self.num_streams)
        if self._draft_pass is None:
            self._draft_pass = self._bind_draft(self._draft_session)
        binding, inputs, result = self._draft_pass
        inputs[contract.ENTRY_STATE][0] = last.outputs[contract.ENTRY_STATES][row]
        inputs[contract.ROOT_ID][0] = token
        inputs[contract.PAST_LENGTH][0] = self.length
        self._draft_session.run_with_iobinding(binding)
        return result

    def commit(self, rows: Sequence[int]) -> None:
        """See :meth:`Session.commit`. Rows that lie where they belong (plain decoding, the primary chain) are not touched."""
        before, moved = -1, 0
        for place, row in enumerate(rows):
            if not before < row < self._last_rows:
                raise ValueError(f"commit of rows {list(rows)} after a call of {self._last_rows}: ascending row numbers expected")
            before = row
            moved += row == place  # ascending rows stay where they are up to some place, and all behind it move
        count = len(rows)
        self._last_rows, self._committed = 0, int(before) if count else None
        for place in range(moved, count):  # each from behind where it goes, so none is overwritten before it has moved
            self.cache[..., self.length + place, :] = self.cache[..., self.length + rows[place], :]
        self.length += count

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
        self.cache: npt.NDArray[Any] = np.zeros((self._layers, 2, 1, heads, rows, head_dim), dtype=self._cache_dtype)
        self._calls: dict[tuple[int, int, int, bool], _Bound] = {}
        self._draft_pass = None

    def _bound(self, rows: int, scored: int, streamed: int, logits: bool) -> _Bound:
        """What calls of this shape are made with; kept for trees, whose shapes come again and again."""
        shape = rows, scored, streamed, logits
        call = self._calls.get(shape)
        if call is None:
            call = self._bind(*shape)
            if rows <= _KEPT_ROWS:
                self._calls[shape] = call
        return call

    def _bind(self, rows: int, scored: int, streamed: int, logits: bool) -> _Bound:
        inputs: dict[str, npt.NDArray[Any]] = {
            contract.INPUT_IDS: np.empty((1, rows), dtype=np.int64),
            contract.POSITION_IDS: np.empty((1, rows), dtype=np.int64),
            contract.TREE_MASK: np.empty((rows, rows), dtype=np.bool_),
            contract.PAST_LENGTH: np.empty(1, dtype=np.int32),
            contract.LOGIT_ROWS: np.empty(scored, dtype=np.int64),
        }
        if self.num_streams and not self.delayed:
            inputs[contract.STREAM_ROWS] = np.empty(streamed, dtype=np.int64)
        # Outputs that are not bound are not fetched: nobody pays for logits that greedy decoding does not read.
        next_ids = np.empty(scored, dtype=np.int64)
        outputs: dict[str, npt.NDArray[Any]] = {contract.NEXT_IDS: next_ids}
        if self.delayed:
            outputs[contract.ENTRY_STATES] = np.empty((rows, self._hidden), dtype=np.float32)
        if logits:
            outputs[contract.LOGITS] = self._room_for_logits(scored)
        if streamed:
            shape = (streamed, self.num_streams, self.top_k)
            outputs[contract.STREAM_IDS] = np.empty(shape, dtype=np.int64)
            outputs[contract.STREAM_LOGPROBS] = np.empty(shape, dtype=np.float32)
        binding = self._session.io_binding()
        self._bind_cache(binding, range(self._layers))
        _bind_arrays(binding, inputs, outputs)
        result = StepOutput(
            next_ids=next_ids,
            logits=outputs.get(contract.LOGITS),
            stream_ids=outputs.get(contract.STREAM_IDS),
            stream_logprobs=outputs.get(contract.STREAM_LOGPROBS),
        )
        return _Bound(binding, inputs, outputs, result)

    def _room_for_logits(self, scored: int) -> FloatArray:
        """float32 [scored, V]: rows of one array for calls of all shapes, since they are large."""
        if len(self._logits) < scored:
            self._logits = np.empty((scored, self.vocab_size), dtype=np.float32)
            self._calls = {shape: call for shape, call in self._calls.items() if call.result.logits is None}
        return self._logits[:scored]

    def _bind_draft(self, session: ort.InferenceSession) -> tuple[ort.IOBinding, Mapping[str, npt.NDArray[Any]], DraftOutput]:
        """The streams' own pass: its binding, inputs and outputs."""
        shape = (1, self.num_streams, self.top_k)
        inputs: dict[str, npt.NDArray[Any]] = {
            contract.ENTRY_STATE: np.empty((1, self._hidden), dtype=np.float32),
            contract.ROOT_ID: np.empty(1, dtype=np.int64),
            contract.PAST_LENGTH: np.empty(1, dtype=np.int32),
        }
        ids, logprobs = np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.float32)
        outputs: dict[str, npt.NDArray[Any]] = {contract.STREAM_IDS: ids, contract.STREAM_LOGPROBS: logprobs}
        if self._has_pairs:
            outputs[contract.STREAM_PAIRS] = np.empty((*shape, self.top_k), dtype=np.float32)
        binding = session.io_binding()
        self._bind_cache(binding, range(self._first_draft_layer, self._layers))
        _bind_arrays(binding, inputs, outputs)
        return binding, inputs, DraftOutput(ids[0], logprobs[0], outputs[contract.STREAM_PAIRS][0] if self._has_pairs else None)

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
            others = [v for v in found if v.name.startswith(("past_key_values.", "present.")) and v.type != CACHE_TYPES[self._cache_dtype]]
            problems += [f"{kind} {v.name} is {v.type} ({CACHE_TYPES[self._cache_dtype]} expected)" for v in others]
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


def _bind_arrays(binding: ort.IOBinding, inputs: Mapping[str, npt.NDArray[Any]], outputs: Mapping[str, npt.NDArray[Any]]) -> None:
    """Their own memory, so that what is written there later is what the graph reads."""
    for name, array in inputs.items():
        binding.bind_ortvalue_input(name, _view(array))
    for name, array in outputs.items():
        binding.bind_ortvalue_output(name, _view(array))


def _view(array: npt.NDArray[Any]) -> ort.OrtValue:
    """The array's own memory as a tensor; the tensor keeps the array alive."""
    return ort.OrtValue.ortvalue_from_numpy(array)


def _load_graph(bundle: Bundle, name: str, threads: int) -> ort.InferenceSession:
    graph = bundle.path(name)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    # A memory pattern is kept for each set of input shapes; they repeat while the past grows, which no pattern knows.
    options.enable_mem_pattern = False
    if join_pool(threads):
        options.use_per_session_threads = False
    else:
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
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
        with _untiled_attention():
            session = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors share no narrower class
        reason = str(error).splitlines()[0]
        raise UserError(f"{graph}: ONNX Runtime {ort.__version__} cannot load it: {reason}") from error
    for mapped in maps:  # the weights have been copied
        mapped.close()
    return session


@contextmanager
def _untiled_attention() -> Iterator[None]:
    """Sessions made meanwhile compute attention a head at a time, not in the tiles of flash attention.

    For the few rows of a tree these cost more than they save, and even for prompts (docs/benchmarks.md, *Attention in tiles*). ONNX Runtime
    has no session option for it. What the user has set stays.
    """
    with _ENVIRONMENT:
        if TILED_ATTENTION_OFF in os.environ:
            yield
            return
        os.environ[TILED_ATTENTION_OFF] = "1"
        try:
            yield
        finally:
            del os.environ[TILED_ATTENTION_OFF]


def _files_beside(bundle: Bundle, graph: Path) -> list[Path]:
    """Files that the graph may name as its weights: all others below its folder that hold anything."""
    files = [bundle.folder / entry.path for entry in bundle.manifest.files if entry.bytes]
    return [file for file in files if file != graph and file.is_relative_to(graph.parent)]


def _map(path: Path) -> mmap.mmap:
    with open(path, "rb") as stream:
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
