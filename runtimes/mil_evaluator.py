"""Computes a Core ML ML Program from its saved package, on any system: what checks the file that we ship where Core ML is not.

Operations are evaluated in order; a value's result is rounded to the type that the program declares, and freed after its last use.
For checking, not for speed, though big products go to NumPy's BLAS. What a device does inside an operation (the order of a sum, more
rounding) it does not know.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specstream.export.weight_blob import NUMPY
from specstream.models.errors import UserError
from specstream.runtimes.mil_operators import FACTORS, LISTS, OPERATORS, VIEWS, Operator, slice_update_in_place
from specstream.runtimes.mil_program import Function, MilPackage, Named, Operation, TensorType, open_package

Array = npt.NDArray[Any]


@dataclass
class MilState:
    """Values that stay from call to call. One object serves all functions of a package.

    Attributes:
        arrays: state's name -> value. A call puts new arrays in their place and never writes into one, so what was read stays as it was.
    """

    arrays: dict[str, Array]


@dataclass(frozen=True)
class _Step:
    """An operation that is ready to be evaluated.

    Attributes:
        fixed: parameters that are constants, or lists that begin as constants.
        values: parameter -> names of values; a tuple where the parameter takes a list, in which constants are given as arrays.
        frees: values that no later step needs.
    """

    operation: Operation
    function: Operator | None  # None: it reads or writes a state
    fixed: dict[str, Any]
    values: Mapping[str, str | tuple[str | Array, ...]]
    frees: tuple[str, ...] = ()


class MilModel:
    """One function of a saved Core ML package.

    Args:
        path: of the ``.mlpackage``. Models of several functions of one package share its weights.
        function: name of the function; the package's default one when left out.

    Attributes:
        inputs: name -> type of what :meth:`predict` needs.
        outputs: name -> type of what it gives.
        states: name -> type of the states that the function reads or writes.
        observer: called before each operation but those on states, with it and with its parameters' values; for measurements.

    Raises:
        UserError: no such package or function; a damaged file; an operator or a compression that is unknown here.
    """

    def __init__(self, path: Path, function: str | None = None) -> None:
        self.path = Path(path)
        self.observer: Callable[[Operation, Mapping[str, Any]], None] | None = None
        self._package = open_package(self.path)
        body = self._package.function(function or self._package.default)
        self.function = body.name
        self.inputs: Mapping[str, TensorType] = {named.name: named.type for named in body.inputs if not named.is_state}
        self.states: Mapping[str, TensorType] = {named.name: named.type for named in body.inputs if named.is_state}
        types = body.types
        missing = [name for name in body.outputs if name not in types]
        if missing:
            raise UserError(f"{self.path}: function {body.name} returns {', '.join(missing)}, which nothing computes")
        self.outputs: Mapping[str, TensorType] = {name: types[name] for name in body.outputs}
        self._steps = _prepare(self._package, body)
        self._fixed = {name: self._package.constant(body.constants[name]) for name in body.outputs if name in body.constants}

    @staticmethod
    def functions(path: Path) -> list[str]:
        """Names of a package's functions, the order being that of its description.

        Raises:
            UserError: no such package, or a damaged one.
        """
        return list(open_package(Path(path)).functions)

    @property
    def metadata(self) -> Mapping[str, str]:
        """Keys and texts that the package's maker stored in it."""
        return self._package.metadata

    def make_state(self) -> MilState:
        """States of zeros, as Core ML makes them.

        Raises:
            UserError: a state's size is not fixed.
        """
        arrays = {}
        for name, kind in self.states.items():
            if None in kind.shape:
                raise UserError(f"{self.path}: state {name} of function {self.function} is {kind}: states need fixed sizes")
            arrays[name] = np.zeros([size or 0 for size in kind.shape], dtype=NUMPY[kind.dtype])
        return MilState(arrays)

    def predict(self, inputs: Mapping[str, Array], state: MilState | None = None) -> dict[str, Array]:
        """Compute the function.

        Args:
            inputs: name -> array of exactly the type that the program declares.
            state: what :meth:`make_state` of any function of the package made; updated when the call has succeeded.

        Returns:
            name -> array.

        Raises:
            UserError: inputs or states that do not fit; an operation that cannot be evaluated with these values.
        """
        self._check(inputs, state)
        states = dict(state.arrays) if state is not None else {}
        values: dict[str, Any] = {name: np.asarray(inputs[name]) for name in self.inputs}
        values.update(self._fixed)
        with np.errstate(all="ignore"):  # overflow and nan are results here
            for step in self._steps:
                self._evaluate(step, values, states)
        if state is not None:
            for name, array in states.items():
                aliased = any(np.may_share_memory(array, values[given]) for given in self.inputs)
                state.arrays[name] = array.copy() if aliased else array
        return {name: np.array(values[name]) for name in self.outputs}

    def _check(self, inputs: Mapping[str, Array], state: MilState | None) -> None:
        """All that is wrong with what a caller gives, at once."""
        wrong = [f"input {name!r} is missing ({kind} expected)" for name, kind in self.inputs.items() if name not in inputs]
        unknown = sorted(set(inputs) - set(self.inputs))
        wrong += [f"input {name!r} is unknown (the function takes {', '.join(self.inputs) or 'none'})" for name in unknown]
        given = [("input", name, kind, np.asarray(inputs[name])) for name, kind in self.inputs.items() if name in inputs]
        if self.states and state is None:
            wrong.append(f"no state given (make_state() makes {', '.join(self.states)})")
        elif state is not None:
            wrong += [f"state {name!r} is missing ({kind} expected)" for name, kind in self.states.items() if name not in state.arrays]
            given += [("state", name, kind, state.arrays[name]) for name, kind in self.states.items() if name in state.arrays]
        for what, name, kind, array in given:
            if array.dtype != NUMPY.get(kind.dtype) or not kind.fits(array.shape):
                wrong.append(f"{what} {name!r} is {array.dtype} {list(array.shape)}, {kind} expected")
        if wrong:
            raise UserError(f"{self.path}: function {self.function}: {'; '.join(wrong)}")

    def _evaluate(self, step: _Step, values: dict[str, Any], states: dict[str, Array]) -> None:
        operation = step.operation
        if operation.type == "read_state":
            results: tuple[Any, ...] = (states[str(step.values["input"])],)
        elif operation.type in _WRITES:
            target, source = _WRITES[operation.type]
            written = values[str(step.values[source])] if source in step.values else step.fixed[source]
            states[str(step.values[target])] = written
            results = (written,) * len(operation.outputs)
        else:
            given = {
                name: values[bound] if isinstance(bound, str) else [values[item] if isinstance(item, str) else item for item in bound]
                for name, bound in step.values.items()
            }
            assert step.function is not None
            if self.observer is not None:
                self.observer(operation, step.fixed | given)
            try:
                result = step.function(**step.fixed, **given)
            except (ValueError, IndexError, TypeError) as error:
                raise UserError(f"{self._where(operation)}: {error}") from error
            results = result if isinstance(result, tuple) else (result,)
        if len(results) != len(operation.outputs):
            raise UserError(f"{self._where(operation)}: gives {len(results)} values where the program declares {len(operation.outputs)}")
        for output, result in zip(operation.outputs, results, strict=True):
            values[output.name] = self._rounded(operation, output, np.asarray(result))
        for name in step.frees:
            del values[name]

    def _rounded(self, operation: Operation, output: Named, result: Array) -> Array:
        if not output.type.fits(result.shape):
            raise UserError(f"{self._where(operation)}: gives a shape of {list(result.shape)} where the program declares {output.type}")
        return result.astype(NUMPY[output.type.dtype], copy=False)

    def _where(self, operation: Operation) -> str:
        return f"{self.path}: function {self.function}: {_title(operation)}"


# Operations that write a state -> their parameters for the state and the value. Programs on disk have the first; the second is what
# coremltools shows in its place.
_WRITES = {"write_state": ("input", "data"), "coreml_update_state": ("state", "value")}


def _title(operation: Operation) -> str:
    outputs = ", ".join(output.name for output in operation.outputs)
    return f"operator {operation.type} (output {outputs or operation.name})"


def _prepare(package: MilPackage, body: Function) -> tuple[_Step, ...]:
    """Steps in the program's order, constants read."""
    where = f"{package.path}: function {body.name}"
    known = {"read_state", *_WRITES, *OPERATORS}
    unknown = [operation for operation in body.operations if operation.has_blocks or operation.type not in known]
    if unknown:
        more = f", and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise UserError(f"{where}: {_title(unknown[0])} is unknown here{more}; the package cannot be evaluated")
    defined = {named.name for named in body.inputs}
    steps: list[_Step] = []
    for operation in body.operations:
        function = OPERATORS.get(operation.type)
        fixed: dict[str, Any] = {}
        values: dict[str, str | tuple[str | Array, ...]] = {}
        for parameter, bound in operation.inputs.items():
            wide = (operation.type, parameter) in FACTORS
            items: list[Any] = []
            for item in bound:
                constant = body.constants.get(item) if isinstance(item, str) else item
                if constant is None and item not in defined:
                    raise UserError(f"{where}: {_title(operation)} uses {item}, which nothing before it computes")
                items.append(item if constant is None else package.constant(constant, wide))
            if (operation.type, parameter) in LISTS:
                values[parameter] = tuple(items)
            elif len(items) != 1:
                raise UserError(f"{where}: {_title(operation)} has {len(items)} values for its parameter {parameter}")
            elif isinstance(bound[0], str) and bound[0] not in body.constants:
                values[parameter] = items[0]
            else:
                fixed[parameter] = items[0]
        if function is not None:
            try:
                inspect.signature(function).bind(**fixed, **values)
            except TypeError as error:
                raise UserError(f"{where}: {_title(operation)}: {error}") from error
        defined.update(output.name for output in operation.outputs)
        steps.append(_Step(operation, function, fixed, values))
    return _with_frees(_with_updates_in_place(steps, body), body)


def _names(step: _Step) -> set[str]:
    """Values and states that a step is given."""
    return {item for bound in step.values.values() for item in ((bound,) if isinstance(bound, str) else bound) if isinstance(item, str)}


def _with_updates_in_place(steps: list[_Step], body: Function) -> list[_Step]:
    """The same steps; an update of a slice writes into its x where that cannot be seen.

    A decoder updates a state once for each layer: with a copy each time, most of a call would be copying. In x's place is safe when

    1. the memory was made by another update in this call, so it is no caller's, and
    2. no value in that memory is needed afterwards but the update's own result, and
    3. a state that holds that memory is written before it is read again.
    """
    states = {named.name for named in body.inputs if named.is_state}
    last: dict[str, int] = dict.fromkeys(body.outputs, len(steps))
    for at, step in enumerate(steps):
        for name in _names(step):
            last[name] = max(last.get(name, 0), at)
    memory: dict[str, int] = {}  # value or state -> number of the step that made the memory it may lie in
    made = []
    for at, step in enumerate(steps):
        kind, outputs = step.operation.type, step.operation.outputs
        if kind in _WRITES:
            target, source = (str(step.values.get(parameter, "")) for parameter in _WRITES[kind])
            memory.pop(target, None)
            if source in memory:
                memory[target] = memory[source]
                memory.update((value.name, memory[source]) for value in outputs)
        elif kind == "slice_update":
            x = step.values.get("x")
            own = memory.get(x) if isinstance(x, str) else None
            sharing = [name for name, number in memory.items() if number == own]
            unseen = all(_written_next(steps, at, name) if name in states else last.get(name, -1) <= at for name in sharing)
            if own is not None and unseen and step.values.get("update") not in sharing:
                step = replace(step, function=slice_update_in_place)
                memory[outputs[0].name] = own
            else:
                memory[outputs[0].name] = at
        elif kind == "read_state" or kind in VIEWS:
            shared = [memory[name] for name in _names(step) if name in memory]
            if shared:
                memory.update((value.name, shared[0]) for value in outputs)
        made.append(step)
    return made


def _written_next(steps: list[_Step], at: int, state: str) -> bool:
    """Whether the next step after ``at`` that touches a state writes it."""
    for step in steps[at + 1 :]:
        if step.operation.type in _WRITES and step.values.get(_WRITES[step.operation.type][0]) == state:
            return True
        if state in _names(step):
            return False
    return False


def _with_frees(steps: list[_Step], body: Function) -> tuple[_Step, ...]:
    """The same steps, each freeing what no later one needs."""
    kept = {named.name for named in body.inputs} | set(body.outputs)
    made: list[_Step] = []
    for step in reversed(steps):
        used = _names(step) | {output.name for output in step.operation.outputs}
        made.append(replace(step, frees=tuple(sorted(used - kept))))
        kept |= used
    return tuple(reversed(made))
