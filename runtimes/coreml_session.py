"""Core ML behind the `Session` protocol. Knows the package's contract and when rows move; nothing of text or drafting.

Twin of :mod:`specstream.runtimes.ort_session`. The cache lives in the package's states, which calls alone can write: a commit is
noted here and carried out by the next call, before anything else it does. Where there is no Core ML, the reference evaluator
(:mod:`specstream.runtimes.mil_evaluator`) computes the same package through the same code: for checking, not for speed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt

from specstream.export import contract
from specstream.export.coreml_contract import COMMIT_ROWS, COMMIT_START, CoreMLContract, CoreMLFunction
from specstream.models.errors import UserError
from specstream.runtimes.session import NEAR_TIE, DraftOutput, Rows, StepOutput
from specstream.runtimes.tree import IntArray

Array = npt.NDArray[Any]
ComputeUnits = Literal["all", "cpu", "cpu-gpu", "cpu-ne"]

_NO_TOKEN: Final = 0  # in padding; nothing sees it
_UNIT_NAMES: Final = {"all": "ALL", "cpu": "CPU_ONLY", "cpu-gpu": "CPU_AND_GPU", "cpu-ne": "CPU_AND_NE"}


class Function(Protocol):
    """One function of a package, of coremltools or of the evaluator."""

    def predict(self, inputs: dict[str, Array], state: Any) -> dict[str, Array]: ...
    def make_state(self) -> Any: ...


class CoreMLSession:
    """A package with its states (see :class:`specstream.runtimes.session.Session`).

    Args:
        package: the ``.mlpackage`` folder.
        sizes: its contract, from the bundle's manifest.
        capacity: rows that may be used, at most those of the package; all of them when left out.
        compute_units: where Core ML may run it; means nothing to the evaluator.
        near_tie: how close two logits must be for 16 bits to decide between them, measured at the export.
        load_function: gives the function of a name; Core ML's, or the evaluator's where there is none, when left out.

    Raises:
        UserError: the package cannot be loaded or is not the one that the contract describes; arguments that make no sense.
    """

    def __init__(
        self,
        package: Path,
        sizes: CoreMLContract,
        capacity: int | None = None,
        compute_units: ComputeUnits = "all",
        near_tie: float = NEAR_TIE,
        load_function: Callable[[str], Function] | None = None,
    ) -> None:
        if capacity is not None and not 1 <= capacity <= sizes.capacity:
            raise UserError(f"capacity: {capacity} given, 1 to {sizes.capacity} (what the package was exported with) expected")
        if compute_units not in get_args(ComputeUnits):
            raise UserError(f"compute units: {compute_units!r} given, one of {', '.join(get_args(ComputeUnits))} expected")
        self.sizes = sizes
        self.capacity = capacity or sizes.capacity
        self.length = 0
        self.vocab_size = sizes.vocab_size
        self.num_streams = sizes.num_streams
        self.top_k = sizes.top_k
        self.delayed = sizes.draft is not None
        self.near_tie = near_tie
        self.prompt_chunk = max(function.rows for function in sizes.functions)
        self.max_tree_rows = max(function.rows for function in sizes.functions if function.scored == function.rows)
        self.max_stream_rows = max(function.stream_rows for function in sizes.functions)
        self._package, self._compute_units, self._load = package, compute_units, load_function
        self._loaded: dict[str, Function] = {}
        missing = [name for name in self._names() if name not in _list_functions(package)]
        if missing:
            raise UserError(f"{package}: has no function {', '.join(missing)}, which its manifest names; export it again")
        self._state = self._function(sizes.functions[0].name).make_state()
        self._move: IntArray | None = None  # rows of the last call that the next one moves together
        self._move_start = 0
        self._last: CoreMLFunction | None = None
        self._last_rows = 0
        self._committed: int | None = None
        self._entry: Array | None = None
        self._entry_rows: list[int] = []

    def run(self, rows: Rows, logits: bool = False) -> StepOutput:
        """See :meth:`Session.run`."""
        count, scored, carriers = len(rows.input_ids), rows.logit_rows, rows.stream_rows
        if len(carriers) and (self.delayed or not self.num_streams):
            raise ValueError("stream rows given to a package without streams beside its rows")
        needed = self.length + count + len(carriers) * self.num_streams
        if needed > self.capacity:
            raise ValueError(f"{needed} rows of cache needed, the capacity is {self.capacity}")
        function = self._choose(count, len(scored), len(carriers))
        padding = function.rows - count
        mask = np.eye(function.rows, dtype=np.float16)
        mask[:count, :count] = rows.tree_mask
        inputs: dict[str, Array] = {
            contract.INPUT_IDS: np.pad(rows.input_ids, (0, padding), constant_values=_NO_TOKEN).astype(np.int32)[None],
            contract.POSITION_IDS: np.pad(rows.position_ids, (0, padding), constant_values=self.length).astype(np.int32)[None],
            contract.TREE_MASK: mask,
            **self._cache_inputs(),
        }
        all_scored = function.scored == function.rows
        if not all_scored:
            inputs[contract.LOGIT_ROWS] = np.resize(scored, function.scored).astype(np.int32)
        if function.stream_rows:
            inputs[contract.STREAM_ROWS] = np.resize(carriers, function.stream_rows).astype(np.int32)
        outputs = self._function(function.name).predict(inputs, self._state)
        self._moved()
        self._last_rows, self._committed = count, None
        places = scored if all_scored else np.arange(len(scored))
        if self.delayed:
            self._entry = outputs[contract.ENTRY_STATES]
            self._entry_rows = list(range(count)) if all_scored else scored.tolist()
        found = [outputs[name][: len(carriers)] for name in (contract.STREAM_IDS, contract.STREAM_LOGPROBS)] if len(carriers) else None
        return StepOutput(
            next_ids=outputs[contract.NEXT_IDS][places].astype(np.int64),
            logits=outputs[contract.LOGITS][places].astype(np.float32) if logits else None,
            stream_ids=None if found is None else found[0].astype(np.int64),
            stream_logprobs=None if found is None else found[1].astype(np.float32),
        )

    def draft(self, token: int) -> DraftOutput:
        """See :meth:`Session.draft`."""
        if self.sizes.draft is None:
            raise ValueError("this bundle's streams have no pass of their own")
        if self._committed is None or self._entry is None or self._committed not in self._entry_rows:
            raise ValueError("draft without a row committed by the last call")
        if self.length + self.num_streams > self.capacity:
            raise ValueError(f"{self.length + self.num_streams} rows of cache needed, the capacity is {self.capacity}")
        row = self._entry_rows.index(self._committed)
        inputs: dict[str, Array] = {
            contract.ENTRY_STATE: self._entry[row : row + 1].astype(np.float16),
            contract.ROOT_ID: np.array([token], dtype=np.int32),
            **self._cache_inputs(),
        }
        outputs = self._function(self.sizes.draft).predict(inputs, self._state)
        self._moved()
        return DraftOutput(
            outputs[contract.STREAM_IDS][0].astype(np.int64),
            outputs[contract.STREAM_LOGPROBS][0].astype(np.float32),
            outputs[contract.STREAM_PAIRS][0].astype(np.float32) if self.sizes.pairs else None,
        )

    def commit(self, rows: Sequence[int]) -> None:
        """See :meth:`Session.commit`. The next call moves rows that do not lie where they belong."""
        kept = np.asarray(rows, dtype=np.int64)
        if len(kept) and (kept[0] < 0 or kept[-1] >= self._last_rows or (np.diff(kept) <= 0).any()):
            raise ValueError(f"commit of rows {kept.tolist()} after a call of {self._last_rows}: ascending row numbers expected")
        moved = np.flatnonzero(kept != np.arange(len(kept)))
        if len(moved):
            first = int(moved[0])
            if len(kept) - first > self.sizes.commit_width:
                raise ValueError(f"commit of {len(kept) - first} rows that move; the package moves {self.sizes.commit_width} at most")
            self._move_start, self._move = self.length + first, self.length + kept[first:]
        self._last_rows, self._committed = 0, int(kept[-1]) if len(kept) else None
        self.length += len(kept)

    def rewind(self, length: int) -> None:
        """See :meth:`Session.rewind`."""
        if not 0 <= length <= self.length:
            raise ValueError(f"rewind to {length}: the cache has {self.length} rows")
        self.length = length
        self._last_rows, self._committed = 0, None

    def warm_up(self) -> None:
        """Load every function: on a device the first load compiles, which can take minutes."""
        for name in self._names():
            self._function(name)

    def _names(self) -> list[str]:
        return [function.name for function in self.sizes.functions] + ([self.sizes.draft] if self.sizes.draft is not None else [])

    def _choose(self, rows: int, scored: int, streams: int) -> CoreMLFunction:
        """The smallest function that holds a call; stream rows cost, so one without them where none are asked for."""
        for function in self.sizes.functions:
            carries = streams <= function.stream_rows and (streams > 0) == (function.stream_rows > 0)
            if rows <= function.rows and scored <= function.scored and carries:
                return function
        raise ValueError(
            f"a call of {rows} rows, {scored} scored, {streams} with streams: this package takes {self.prompt_chunk} rows of a prompt, "
            f"{self.max_tree_rows} of a tree, {self.max_stream_rows} with streams"
        )

    def _cache_inputs(self) -> dict[str, Array]:
        width = self.sizes.commit_width
        # Rows were moved to behind a start that leaves room for a whole width: slots reach further than the capacity.
        start = self._move_start if self._move is not None else 0
        rows = np.arange(start, start + width)
        if self._move is not None:
            rows[: len(self._move)] = self._move
        return {
            contract.PAST_LENGTH: np.array([self.length], dtype=np.int32),
            COMMIT_START: np.array([start], dtype=np.int32),
            COMMIT_ROWS: rows.astype(np.int32),
        }

    def _moved(self) -> None:
        self._move, self._move_start = None, 0

    def _function(self, name: str) -> Function:
        if name not in self._loaded:
            load = self._load or (lambda function: _load_function(self._package, function, self._compute_units))
            self._loaded[name] = load(name)
        return self._loaded[name]


def has_core_ml() -> bool:
    """Whether this system runs Core ML programs (elsewhere the reference evaluator computes them)."""
    return sys.platform == "darwin"


def _list_functions(package: Path) -> list[str]:
    from specstream.runtimes.mil_evaluator import MilModel

    return MilModel.functions(package)


def _load_function(package: Path, name: str, compute_units: ComputeUnits) -> Function:
    if not has_core_ml():
        from specstream.runtimes.mil_evaluator import MilModel

        return MilModel(package, name)
    from specstream.runtimes.coreml_import import import_coremltools

    ct = import_coremltools()
    try:
        model: Function = ct.models.MLModel(
            str(package), function_name=name, compute_units=getattr(ct.ComputeUnit, _UNIT_NAMES[compute_units])
        )
    except RuntimeError as error:
        raise UserError(f"{package}: Core ML cannot load its function {name}: {str(error).splitlines()[0]}") from error
    return model
