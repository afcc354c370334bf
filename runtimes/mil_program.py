"""Reads a Core ML package (``.mlpackage``) from disk: its functions, their operations, and their constants with compressed ones expanded.

Reads the protocol buffers itself, by the field numbers of coremltools' ``MIL.proto`` and ``Model.proto``: what is evaluated are the
file's own operations. (coremltools' loader rebuilds a program: it folds constants and joins operations on states. It also takes
seconds to import.) Knows nothing of what operations compute.

A package is a folder: ``Manifest.json`` names a model file, and beside that file is ``weights/weight.bin``.
"""

from __future__ import annotations

import json
import struct
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from specstream.export.weight_blob import BITS, NUMPY, WeightBlob, unpack
from specstream.models.errors import UserError

Array = npt.NDArray[Any]
Literal = Array | str  # what a constant is once it is read; strings name modes and types

ML_PROGRAM: Final = 502  # field of Model.proto

# DataType of MIL.proto -> the name that programs themselves use, as in cast(dtype="fp16").
DTYPES: Final[dict[int, str]] = {
    1: "bool", 2: "string", 10: "fp16", 11: "fp32", 12: "fp64", 21: "int8", 22: "int16", 23: "int32", 24: "int64", 25: "int4", 31: "uint8",
    32: "uint16", 33: "uint32", 34: "uint64", 35: "uint4", 36: "uint2", 37: "uint1", 38: "uint6", 39: "uint3",
}  # fmt: skip


@dataclass(frozen=True)
class TensorType:
    """Type of a value.

    Attributes:
        dtype: one of ``DTYPES``' values.
        shape: None where a size is not fixed; () for a scalar.
    """

    dtype: str
    shape: tuple[int | None, ...]

    def __str__(self) -> str:
        return f"{self.dtype} [{', '.join('?' if size is None else str(size) for size in self.shape)}]"

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether an array of this shape is of this type."""
        return len(shape) == len(self.shape) and all(want is None or want == have for want, have in zip(self.shape, shape, strict=True))


@dataclass(frozen=True)
class Named:
    """A value's name and type.

    Attributes:
        is_state: a state of that type, not a value.
    """

    name: str
    type: TensorType
    is_state: bool = False


@dataclass(frozen=True)
class Constant:
    """A constant as the program names it: bytes in the program, or a place in a weight file.

    Attributes:
        type: of the constant.
        data: a TensorValue message, or (file name, offset).
    """

    type: TensorType
    data: bytes | tuple[str, int]


@dataclass(frozen=True)
class Expanded:
    """A constant that an operation ``constexpr_*`` makes of others.

    Attributes:
        kind: the operation's type.
        type: of the result.
        inputs: parameters in alphabetical order.
    """

    kind: str
    type: TensorType
    inputs: tuple[tuple[str, Constant | Expanded], ...]


@dataclass(frozen=True)
class Operation:
    """One operation.

    Attributes:
        inputs: parameter -> what is bound to it, each the name of a value or a constant; several for a parameter that takes a list.
        outputs: what it gives, in order.
        has_blocks: it holds operations of its own (a loop or a branch).
    """

    type: str
    name: str
    inputs: Mapping[str, tuple[str | Constant, ...]]
    outputs: tuple[Named, ...]
    has_blocks: bool = False


@dataclass(frozen=True)
class Function:
    """A function of a program.

    Attributes:
        inputs: values and states that a caller gives.
        constants: name -> constant.
        operations: all others, in order.
        outputs: names of what it returns.
    """

    name: str
    inputs: tuple[Named, ...]
    constants: Mapping[str, Constant | Expanded]
    operations: tuple[Operation, ...]
    outputs: tuple[str, ...]


@dataclass
class MilPackage:
    """A package that is open for reading. Make it with :func:`open_package`.

    Attributes:
        path: of the package.
        functions: their names; a package of one function calls it ``main``.
        default: the function that Core ML runs when none is named.
        metadata: keys and texts that the package's maker stored.
    """

    path: Path
    functions: tuple[str, ...]
    default: str
    metadata: Mapping[str, str]
    _bodies: Mapping[str, bytes]
    _data: Path  # folder of the model file, to which weight files are relative
    _blobs: dict[str, WeightBlob] = field(default_factory=dict)
    _read: dict[tuple[Constant | Expanded, bool], Literal] = field(default_factory=dict)

    def function(self, name: str) -> Function:
        """Read one function.

        Raises:
            UserError: there is none of that name, or it uses what this module cannot read.
        """
        if name not in self._bodies:
            raise UserError(f"{self.path}: has no function {name!r}; it has {', '.join(self.functions)}")
        try:
            return _function(name, self._bodies[name])
        except _MALFORMED as error:
            raise UserError(f"{self.path}: function {name} cannot be read ({error})") from error

    def constant(self, constant: Constant | Expanded, wide: bool = False) -> Literal:
        """The value of a constant. It is kept: functions that share a weight share the array, which cannot be written.

        Args:
            wide: float16 values as float32, for products.

        Raises:
            UserError: the weight file is not the one that the program describes.
        """
        key = (constant, wide)
        if key not in self._read:
            try:
                value = self._expand(constant) if isinstance(constant, Expanded) else self._literal(constant)
            except _MALFORMED as error:
                raise UserError(f"{self.path}: a constant {constant.type} cannot be read ({error})") from error
            if not isinstance(value, str):
                if wide and value.dtype == np.float16:
                    value = value.astype(np.float32)
                if not constant.type.fits(value.shape):
                    raise UserError(f"{self.path}: a constant of type {constant.type} has the shape {list(value.shape)}")
                value.flags.writeable = False
            self._read[key] = value
        return self._read[key]

    def _literal(self, constant: Constant) -> Literal:
        dtype, shape = constant.type.dtype, tuple(size or 0 for size in constant.type.shape)
        if isinstance(constant.data, bytes):
            return _tensor_value(constant.data, dtype, shape)
        file, offset = constant.data
        if file not in self._blobs:
            self._blobs[file] = WeightBlob(_inside(self._data, file.removeprefix("@model_path/"), self.path))
        return self._blobs[file].read(offset, dtype, shape)

    def _expand(self, constant: Expanded) -> Array:
        # Inputs are not kept: of a compressed weight only what it expands to is used.
        inputs: dict[str, Any] = {
            name: self._expand(value) if isinstance(value, Expanded) else self._literal(value) for name, value in constant.inputs
        }
        if constant.kind not in _EXPANSIONS:
            known = ", ".join(sorted(_EXPANSIONS))
            raise UserError(f"{self.path}: a weight {constant.type} is compressed by {constant.kind}, which is unknown; known are {known}")
        value: Array = _EXPANSIONS[constant.kind](**inputs)
        return value.astype(NUMPY[constant.type.dtype], copy=False)


# Packages that are open, by path and state of the files: functions of one package that are loaded one by one share their weights.
_OPEN: weakref.WeakValueDictionary[tuple[Any, ...], MilPackage] = weakref.WeakValueDictionary()


def open_package(path: Path) -> MilPackage:
    """Open a package. A second call while the first result is in use gives the same object, unless the files have changed.

    Raises:
        UserError: there is no such folder, it is not a Core ML package, or holds another kind of model than an ML Program.
    """
    model = _model_file(path)
    files = [model, *sorted((model.parent / "weights").glob("*"))]
    key = (model.resolve(), *((file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files))
    package = _OPEN.get(key)
    if package is None:
        package = _OPEN[key] = _read_package(path, model)
    return package


def _model_file(path: Path) -> Path:
    """The model file that a package's manifest names."""
    if not path.exists():
        raise UserError(f"{path}: no such Core ML package")
    manifest = path / "Manifest.json"
    if not manifest.is_file():
        raise UserError(f"{path}: is not a Core ML package: it has no Manifest.json")
    try:
        content = json.loads(manifest.read_text(encoding="utf-8"))
        name = content["itemInfoEntries"][content["rootModelIdentifier"]]["path"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{manifest}: is not the manifest of a Core ML package; copy the whole package again") from error
    model = _inside(path / "Data", name, path)
    if not model.is_file():
        raise UserError(f"{path}: its model file {model.relative_to(path)} is missing; copy the whole package again")
    return model


def _inside(folder: Path, name: Any, package: Path) -> Path:
    parts = PurePosixPath(name).parts if isinstance(name, str) else ()
    if not parts or ".." in parts or parts[0] == "/":
        raise UserError(f"{package}: names the file {name!r}, which is not inside the package")
    return folder.joinpath(*parts)


def _read_package(path: Path, model: Path) -> MilPackage:
    not_a_model = f"{path}: {model.name} is not a Core ML model, or is damaged; copy the whole package again"
    try:
        fields = _fields(model.read_bytes())
        if ML_PROGRAM not in fields:
            kind = next((number for number in sorted(fields) if number >= 200), None)
            if kind is None:
                raise UserError(not_a_model)
            raise UserError(
                f"{path}: is not an ML Program (it is a model of kind {kind} in Model.proto); only ML Programs can be evaluated"
            )
        bodies = _map(_fields(_message(fields, ML_PROGRAM)), 2)
        description = _fields(_message(fields, 2))
        metadata = _fields(_message(description, 100)) if 100 in description else {}
        texts = {key: str(value, "utf-8") for key, value in _map(metadata, 100).items()}
        names = tuple(str(_message(_fields(function), 1), "utf-8") for function in description.get(20, []) if isinstance(function, bytes))
        default = _text(description, 21)
    except _MALFORMED as error:
        raise UserError(not_a_model) from error
    # The description gives the order in which the functions were stored; the program's own map has none.
    functions = tuple(name for name in names if name in bodies) or tuple(sorted(bodies))
    if set(functions) != set(bodies) or not bodies:
        raise UserError(f"{path}: its description names the functions {sorted(names)}, its program has {sorted(bodies)}")
    return MilPackage(path, functions, default if default in bodies else functions[0], texts, bodies, model.parent)


# ---------------------------------------------------------------------------------------------------------------------------------------
# Protocol buffers: a message is a sequence of (field number, wire type, value).

_Fields = dict[int, list["int | bytes"]]
_MALFORMED = (ValueError, KeyError, IndexError, TypeError, struct.error)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7


def _wire(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == 0:
            number, at = _varint(data, at)
            yield tag >> 3, number
            continue
        size = {1: 8, 5: 4}.get(kind, -1)
        if kind == 2:
            size, at = _varint(data, at)
        if size < 0 or at + size > len(data):
            raise ValueError("damaged: a field ends behind its message")
        yield tag >> 3, data[at : at + size]
        at += size


def _fields(data: bytes) -> _Fields:
    fields: _Fields = {}
    for number, value in _wire(data):
        fields.setdefault(number, []).append(value)
    return fields


def _message(fields: _Fields, number: int) -> bytes:
    """The last value of a field that holds a message, a string or bytes."""
    value = fields[number][-1]
    if not isinstance(value, bytes):
        raise ValueError(f"damaged: field {number} is a number")
    return value


def _messages(fields: _Fields, number: int) -> list[bytes]:
    return [_message({number: [value]}, number) for value in fields.get(number, [])]


def _text(fields: _Fields, number: int) -> str:
    return str(_message(fields, number), "utf-8") if number in fields else ""


def _number(fields: _Fields, number: int) -> int:
    value = fields.get(number, [0])[-1]
    if not isinstance(value, int):
        raise ValueError(f"damaged: field {number} is not a number")
    return value


def _map(fields: _Fields, number: int) -> dict[str, bytes]:
    entries = [_fields(entry) for entry in _messages(fields, number)]
    return {_text(entry, 1): _message(entry, 2) if 2 in entry else b"" for entry in entries}


# ---------------------------------------------------------------------------------------------------------------------------------------
# MIL.proto, message by message.


def _tensor_type(data: bytes) -> TensorType:
    fields = _fields(data)
    number = _number(fields, 1)
    if number not in DTYPES:
        raise ValueError(f"values of data type {number} in MIL.proto")
    shape: list[int | None] = []
    for dimension in map(_fields, _messages(fields, 3)):
        shape.append(_number(_fields(_message(dimension, 1)), 1) if 1 in dimension else None)
    return TensorType(DTYPES[number], tuple(shape))


def _named(data: bytes) -> Named:
    fields = _fields(data)
    name, kind = _text(fields, 1), _fields(_message(fields, 2))
    if 5 in kind:  # a state, which wraps a tensor type
        kind = _fields(_message(_fields(_message(kind, 5)), 1))
        return Named(name, _tensor_type(_message(kind, 1)), is_state=True)
    if 1 not in kind:
        raise ValueError(f"value {name}: neither a tensor nor a state")
    return Named(name, _tensor_type(_message(kind, 1)))


def _constant(data: bytes) -> Constant:
    fields = _fields(data)
    kind = _fields(_message(fields, 2))
    if 1 not in kind:
        raise ValueError("a constant that is not a tensor")
    tensor_type = _tensor_type(_message(kind, 1))
    if 5 in fields:
        blob = _fields(_message(fields, 5))
        return Constant(tensor_type, (_text(blob, 1), _number(blob, 2)))
    return Constant(tensor_type, _message(_fields(_message(fields, 3)), 1))


def _tensor_value(data: bytes, dtype: str, shape: tuple[int, ...]) -> Literal:
    """A TensorValue message: its values lie in the field of their kind, packed."""
    fields = _fields(data)
    kind = max(fields)
    content = _fields(_message(fields, kind)).get(1, [])
    packed = b"".join(value if isinstance(value, bytes) else b"" for value in content)
    if kind == 4:
        if shape or len(content) != 1:
            raise ValueError("a constant of several strings")
        return str(packed, "utf-8")
    if kind in (1, 6):
        values: Array = np.frombuffer(packed, dtype="<f4" if kind == 1 else "<f8")
    elif kind in (2, 3, 5):
        numbers = list(content) if content and isinstance(content[0], int) else []
        at = 0
        while at < len(packed):
            number, at = _varint(packed, at)
            numbers.append(number)
        values = np.array(numbers, dtype=np.uint64).view(np.int64)
    elif dtype in BITS:
        values = unpack(np.frombuffer(packed, dtype=np.uint8), dtype, int(np.prod(shape, dtype=np.int64)))
    else:
        values = np.frombuffer(packed, dtype=NUMPY[dtype])
    return values.astype(NUMPY[dtype]).reshape(shape)


def _function(name: str, data: bytes) -> Function:
    fields = _fields(data)
    blocks = _map(fields, 3)
    block = _fields(blocks[_text(fields, 2)])
    constants: dict[str, Constant | Expanded] = {}
    operations: list[Operation] = []
    for body in _messages(block, 3):
        operation, attributes = _operation(body)
        if operation.type == "const":
            constants[operation.outputs[0].name] = attributes["val"]
        elif operation.type.startswith("constexpr_"):
            constants[operation.outputs[0].name] = _expanded(operation, attributes, constants)
        else:
            operations.append(operation)
    inputs = tuple(_named(value) for value in _messages(fields, 1))
    return Function(name, inputs, constants, tuple(operations), tuple(str(output, "utf-8") for output in _messages(block, 2)))


def _operation(data: bytes) -> tuple[Operation, dict[str, Constant]]:
    """An operation, and its attributes but the name."""
    fields = _fields(data)
    inputs: dict[str, tuple[str | Constant, ...]] = {}
    for parameter, argument in _map(fields, 2).items():
        bindings = [_fields(binding) for binding in _messages(_fields(argument), 1)]
        inputs[parameter] = tuple(_text(binding, 1) if 1 in binding else _constant(_message(binding, 2)) for binding in bindings)
    attributes = _map(fields, 5)
    name = attributes.pop("name", None)
    title = _constant(name).data if name is not None else b""
    if not isinstance(title, bytes):
        raise ValueError("a name that is not a text")
    outputs = tuple(_named(value) for value in _messages(fields, 3))
    operation = Operation(
        _text(fields, 1), str(_tensor_value(title, "string", ())) if title else "", inputs, outputs, has_blocks=4 in fields
    )
    return operation, {key: _constant(value) for key, value in attributes.items()}


def _expanded(operation: Operation, attributes: Mapping[str, Constant], constants: Mapping[str, Constant | Expanded]) -> Expanded:
    """Parameters of ``constexpr_*`` are attributes up to iOS 17, inputs since iOS 18."""
    inputs: dict[str, Constant | Expanded] = dict(attributes)
    for parameter, (bound, *more) in operation.inputs.items():
        if more:
            raise ValueError(f"{operation.type}: several values for {parameter}")
        inputs[parameter] = constants[bound] if isinstance(bound, str) else bound
    return Expanded(operation.type, operation.outputs[0].type, tuple(sorted(inputs.items())))


# ---------------------------------------------------------------------------------------------------------------------------------------
# Compressed constants, by the definitions in coremltools' operators of iOS 16 and 18. Arithmetic in float32, rounded to the result's type.


def _repeat(array: Array, shape: tuple[int, ...]) -> Array:
    """Every element repeated along each axis until the shape is reached."""
    for axis, (size, wanted) in enumerate(zip(array.shape, shape, strict=True)):
        if size not in (1, wanted):
            if wanted % size:
                raise ValueError(f"{size} groups do not divide {wanted}")
            array = np.repeat(array, wanted // size, axis)
    return array


def blockwise_shift_scale(data: Array, scale: Array, offset: Array | None = None) -> Array:
    """``scale * (data - offset)``; scale and offset hold for blocks of equal size along each axis (iOS 18)."""
    values = data.astype(np.float32)
    if offset is not None:
        values -= _repeat(offset.astype(np.float32), data.shape)
    values *= _repeat(scale.astype(np.float32), data.shape)
    return values.astype(scale.dtype)


def lut_to_dense(indices: Array, lut: Array, vector_axis: Array | None = None, shape: Array | None = None) -> Array:
    """Entries of lookup tables.

    Args:
        indices: of iOS 18: [*D], into the table of the element's group; of iOS 16: packed bytes.
        lut: of iOS 18: [*G, entries, width], G dividing D; of iOS 16: [entries].
        vector_axis: along which entries of a width above one are laid out.
        shape: only of iOS 16: that of the result.
    """
    if shape is not None:  # iOS 16: one table
        bits = int(lut.size - 1).bit_length()
        count = int(np.prod(shape))
        flat = indices[:count] if bits == 8 else unpack(indices, f"uint{bits}", count)
        return lut[flat].reshape(tuple(shape.tolist()))
    groups, width = lut.shape[:-2], lut.shape[-1]
    if len(groups) != indices.ndim or any(size % group for size, group in zip(indices.shape, groups, strict=True)):
        raise ValueError(f"tables {list(lut.shape)} do not divide indices {list(indices.shape)}")
    # Tables one by one: of a big weight, the number of each element's table would take several times the weight's memory.
    result = np.empty((*indices.shape, width), dtype=lut.dtype)
    steps = [size // group for size, group in zip(indices.shape, groups, strict=True)]
    for group in np.ndindex(*groups):
        place = tuple(slice(i * step, (i + 1) * step) for i, step in zip(group, steps, strict=True))
        result[place] = lut[group][indices[place]]
    if width == 1:
        return result[..., 0]
    if vector_axis is None:
        raise ValueError("a table of vectors without an axis")
    axis = int(vector_axis) % indices.ndim
    laid = list(indices.shape)
    laid[axis] *= width
    return np.moveaxis(result, -1, axis + 1).reshape(laid)


def affine_dequantize(quantized_data: Array, scale: Array, zero_point: Array, axis: Array) -> Array:
    """``scale * (data - zero_point)``, both one value or one for each index of the axis (iOS 16)."""
    along = [1] * quantized_data.ndim
    along[int(axis)] = -1

    def spread(array: Array) -> Array:
        return array.astype(np.float32).reshape(along if array.ndim else ())

    return ((quantized_data.astype(np.float32) - spread(zero_point)) * spread(scale)).astype(scale.dtype)


def cast(source_val: Array, output_dtype: str) -> Array:
    """The same values as another type."""
    return source_val.astype(NUMPY[output_dtype])


_EXPANSIONS: Final[dict[str, Any]] = {
    "constexpr_affine_dequantize": affine_dequantize,
    "constexpr_blockwise_shift_scale": blockwise_shift_scale,
    "constexpr_cast": cast,
    "constexpr_lut_to_dense": lut_to_dense,
}
