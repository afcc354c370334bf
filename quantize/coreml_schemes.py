"""The schemes for Core ML: which weight of a saved package gets which form, from an fp16 package to a smaller one.

    int8      8-bit integers, a scale for each output channel
    int4      4-bit integers, a scale for each block of a row; for the GPU and CPU: the Neural Engine is reported to compute such
              blocks silently wrong
    palette4  4-bit indices into tables of 16 values, one for each group of output channels; for the Neural Engine too
    palette6  the same with 6 bits and 64 values

The embedding and the head have a scheme of their own, for their errors meet every token: where they are one table (tied), it is one
weight here too, used by both.

A package is edited on disk, all functions at once, a weight that several share once. (coremltools' own compression refuses packages of
several functions, and rebuilds programs.) Only constants change: a ``const`` becomes a ``constexpr_blockwise_shift_scale`` or a
``constexpr_lut_to_dense`` with the same name and type, all else stays byte for byte. The same package gives the same bytes. Knows
packages; nothing of bundles or sessions.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from specstream.export.coreml_package import MANIFEST, MODEL, WEIGHTS, canonicalise
from specstream.export.weight_blob import WeightBlob, WeightBlobWriter
from specstream.models.errors import UserError
from specstream.quantize.coreml_formats import FloatArray, Form, Integers, Palette, check_fits, to_integers, to_palette

COREML_SCHEMES: Final = ("int8", "int4", "palette4", "palette6")

# Of the embedding and the head when nothing is asked for. With `palette4`, 8 bits would make a third of a small model's package.
HEAD_SCHEMES: Final[dict[str, str]] = {"int8": "int8", "int4": "int4", "palette4": "palette6", "palette6": "int8"}

# What a scheme needs of a device, for manifests.
COREML_REQUIRES: Final[dict[str, str]] = {
    "int4": "compute units without the Neural Engine (cpu-gpu): per-block integers are reported silently wrong there",
}

QUANTIZATION_KEY: Final = "specstream.quantization"  # of the package's metadata: JSON of :class:`CoreMLOptions`

LEAST_ELEMENTS: Final = 1 << 15  # smaller weights (adapters of low rank, norms) stay fp16: they are few and their errors are not
COMPRESSED_USES: Final = frozenset({("linear", "weight"), ("gather", "x")})  # (operator, parameter)
OTHER_PRODUCTS: Final = frozenset({("matmul", "x"), ("matmul", "y"), ("conv", "weight")})  # our exporter makes none of them of weights
IOS_18: Final = 9  # specification version, which brought blocks and groups


@dataclass(frozen=True)
class CoreMLOptions:
    """What a scheme can be told.

    Attributes:
        scheme: one of ``COREML_SCHEMES``.
        head: of the embedding and the head: one of ``COREML_SCHEMES``, or fp16; by ``HEAD_SCHEMES`` when left out.
        block_size: inputs that share a scale, of int4.
        group_size: output channels that share a table, of palettes.

    Raises:
        UserError: a scheme or a size that does not exist.
    """

    scheme: str
    head: str = ""
    block_size: int = 32
    group_size: int = 16

    def __post_init__(self) -> None:
        if self.scheme not in COREML_SCHEMES:
            raise UserError(f"scheme {self.scheme!r} is unknown for Core ML; one of {', '.join(COREML_SCHEMES)} expected")
        if not self.head:
            object.__setattr__(self, "head", HEAD_SCHEMES[self.scheme])
        if self.head not in (*COREML_SCHEMES, "fp16"):
            raise UserError(f"head scheme {self.head!r} is unknown for Core ML; one of {', '.join(COREML_SCHEMES)}, fp16 expected")
        for name, size in (("block size", self.block_size), ("group size", self.group_size)):
            if size < 1:
                raise UserError(f"{name} {size} given, 1 or more expected")

    def form(self, head: bool) -> Form | None:
        """The form of a weight; None: it stays fp16."""
        match self.head if head else self.scheme:
            case "int8":
                return Integers(8)
            case "int4":
                return Integers(4, self.block_size)
            case "palette4":
                return Palette(4, self.group_size)
            case "palette6":
                return Palette(6, self.group_size)
        return None


@dataclass(frozen=True)
class CompressedPackage:
    """What was written.

    Attributes:
        matrices: how many factors and tables are stored in each form, ``fp16`` among them.
        weight_bytes: size of the file of weights.
        source_bytes: that of the package it was made from.
    """

    matrices: dict[str, int]
    weight_bytes: int
    source_bytes: int


@dataclass
class _Weight:
    """A constant in the file of weights.

    Attributes:
        dtype: by MIL's name.
        uses: (operator, parameter) of all that it is given to, in any function.
        name: in the first function that has it.
    """

    dtype: str
    shape: tuple[int, ...]
    name: str
    uses: set[tuple[str, str]] = field(default_factory=set)


def check_package(package: Path, options: CoreMLOptions, vocab_size: int) -> None:
    """Look whether a package can be compressed so, without reading weights.

    Raises:
        UserError: it is not an ML Program of iOS 18, is compressed already, or a block or group size does not divide a matrix.
    """
    _plan(_read(package), package, options, vocab_size)


def compress_package(
    package: Path, out: Path, options: CoreMLOptions, vocab_size: int, moments: Mapping[int, FloatArray] | None = None
) -> CompressedPackage:
    """Write a compressed copy of a package. Import coremltools first (``runtimes.coreml_import``): it brings the protocol's classes.

    Args:
        package: an ``.mlpackage`` of fp16 weights.
        out: a new folder; it appears when it is complete.
        vocab_size: tables of so many rows are the embedding and the head.
        moments: offset of a factor in the file of weights -> [inputs, inputs], the mean of x xᵀ over its inputs, float32. Rounding
            errors of these are made up for, see :mod:`specstream.quantize.compensate`; of the embedding, which is no factor, never.

    Raises:
        UserError: as :func:`check_package`; a damaged file of weights.
    """
    spec = _read(package)
    weights, forms = _plan(spec, package, options, vocab_size)
    blob = WeightBlob(package / WEIGHTS)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as folder:
        made = Path(folder) / out.name
        (made / WEIGHTS).parent.mkdir(parents=True)
        shutil.copyfile(package / MANIFEST, made / MANIFEST)
        places: dict[int, _Stored] = {}
        counts: Counter[str] = Counter()
        with WeightBlobWriter(made / WEIGHTS) as writer:
            for offset, weight in sorted(weights.items()):
                form = forms.get(offset)
                known = moments[offset] if moments is not None and offset in moments and weight.uses == {("linear", "weight")} else None
                places[offset] = _store(blob.read(offset, weight.dtype, weight.shape), weight, form, writer, known)
                if len(weight.shape) == 2 and weight.uses & (COMPRESSED_USES | OTHER_PRODUCTS):
                    counts[_title(form) if form else "fp16"] += 1
        for operation in _operations(spec):
            _rewrite(operation, places)
        spec.description.metadata.userDefined[QUANTIZATION_KEY] = json.dumps(asdict(options), sort_keys=True)
        (made / MODEL).write_bytes(spec.SerializeToString(deterministic=True))
        canonicalise(made)
        size = (made / WEIGHTS).stat().st_size
        made.rename(out)
    return CompressedPackage(dict(counts), size, (package / WEIGHTS).stat().st_size)


def _title(form: Form) -> str:
    return f"int{form.bits}" if isinstance(form, Integers) else f"palette{form.bits}"


def _read(package: Path) -> Any:
    from coremltools.proto import Model_pb2
    from google.protobuf.message import DecodeError

    file = package / MODEL
    if not file.is_file():
        raise UserError(f"{package}: is not a Core ML package: it has no {MODEL}")
    spec = Model_pb2.Model()
    try:
        spec.ParseFromString(file.read_bytes())
    except DecodeError as error:
        raise UserError(f"{package}: its model file is damaged; copy the whole package again") from error
    if spec.WhichOneof("Type") != "mlProgram" or spec.specificationVersion < IOS_18:
        raise UserError(f"{package}: is not an ML Program for iOS 18 or later, which compressed weights need; export it again")
    return spec


def _operations(spec: Any) -> Iterator[Any]:
    """All operations of all functions, in the order of names."""
    for _, function in sorted(spec.mlProgram.functions.items()):
        yield from function.block_specializations[function.opset].operations


def _plan(spec: Any, package: Path, options: CoreMLOptions, vocab_size: int) -> tuple[dict[int, _Weight], dict[int, Form]]:
    """The weights by their offsets, and the forms of those that are compressed."""
    weights: dict[int, _Weight] = {}
    for _, function in sorted(spec.mlProgram.functions.items()):
        offsets: dict[str, int] = {}
        for operation in function.block_specializations[function.opset].operations:
            if operation.type.startswith("constexpr_"):
                raise UserError(f"{package}: its weights are compressed already ({operation.type}); compress the fp16 package")
            value = operation.attributes["val"] if operation.type == "const" else None
            if value is not None and value.WhichOneof("value") == "blobFileValue":
                name, offset = operation.outputs[0].name, value.blobFileValue.offset
                shape = tuple(dimension.constant.size for dimension in value.type.tensorType.dimensions)
                weights.setdefault(offset, _Weight(_dtype_name(value.type.tensorType.dataType), shape, name))
                offsets[name] = offset
            for parameter, argument in operation.inputs.items():
                for binding in argument.arguments:
                    if binding.WhichOneof("binding") == "value" and binding.value.WhichOneof("value") == "blobFileValue":
                        raise UserError(f"{package}: an operation {operation.type} has a weight in place, which is unknown here")
                    if binding.name in offsets:
                        weights[offsets[binding.name]].uses.add((operation.type, parameter))
    forms: dict[int, Form] = {}
    for offset, weight in weights.items():
        form = _choose(weight, options, vocab_size)
        if form is not None:
            check_fits(form, (weight.shape[0], weight.shape[1]), weight.name)
            forms[offset] = form
    if not forms:
        raise UserError(f"{package}: has no products with fp16 weights to compress")
    return weights, forms


def _choose(weight: _Weight, options: CoreMLOptions, vocab_size: int) -> Form | None:
    """The embedding and the head by their rows; other matrices that are factors and large. A table that is only looked up and is not
    the vocabulary's (rotary angles) stays as it is."""
    if weight.dtype not in ("fp16", "fp32") or len(weight.shape) != 2 or not weight.uses <= COMPRESSED_USES:
        return None
    if weight.shape[0] == vocab_size:
        return options.form(head=True)
    if ("linear", "weight") not in weight.uses or weight.shape[0] * weight.shape[1] < LEAST_ELEMENTS:
        return None
    return options.form(head=False)


@dataclass(frozen=True)
class _Part:
    """An array in the new file of weights."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class _Stored:
    """Where a weight went: the operation that makes it, and its parameters; ``const`` with ``val`` where it stayed as it was."""

    operation: str
    parts: Mapping[str, _Part]


def _store(values: npt.NDArray[Any], weight: _Weight, form: Form | None, writer: WeightBlobWriter, moments: FloatArray | None) -> _Stored:
    def put(array: npt.NDArray[Any], dtype: str) -> _Part:
        return _Part(dtype, array.shape, writer.write(array, dtype))

    if form is None:
        return _Stored("const", {"val": put(values, weight.dtype)})
    matrix = values.astype(np.float32)
    if isinstance(form, Integers):
        integers, scales = to_integers(matrix, form, moments)
        scale = put(scales, "fp16") if weight.dtype == "fp16" else put(scales.astype(np.float32), "fp32")
        return _Stored("constexpr_blockwise_shift_scale", {"data": put(integers, form.dtype), "scale": scale})
    indices, tables = to_palette(matrix, form, moments)
    entries = tables[:, None, :, None]
    lut = put(entries, "fp16") if weight.dtype == "fp16" else put(entries.astype(np.float32), "fp32")
    return _Stored("constexpr_lut_to_dense", {"indices": put(indices, form.dtype), "lut": lut})


def _rewrite(operation: Any, places: Mapping[int, _Stored]) -> None:
    """Give an operation that is a constant its new place and form."""
    if operation.type != "const" or operation.attributes["val"].WhichOneof("value") != "blobFileValue":
        return
    value = operation.attributes["val"]
    stored = places[value.blobFileValue.offset]
    if stored.operation == "const":
        value.blobFileValue.offset = stored.parts["val"].offset
        return
    file = value.blobFileValue.fileName
    operation.type = stored.operation
    del operation.attributes["val"]
    for parameter, part in stored.parts.items():
        made = operation.inputs[parameter].arguments.add().value
        made.blobFileValue.fileName, made.blobFileValue.offset = file, part.offset
        made.type.tensorType.dataType, made.type.tensorType.rank = _dtype_number(part.dtype), len(part.shape)
        for size in part.shape:
            made.type.tensorType.dimensions.add().constant.size = size


def _dtype_number(name: str) -> int:
    from coremltools.proto import MIL_pb2

    number: int = MIL_pb2.DataType.Value(_PROTO_NAMES.get(name, name.upper()))
    return number


def _dtype_name(number: int) -> str:
    from coremltools.proto import MIL_pb2

    name: str = MIL_pb2.DataType.Name(number)
    return next((ours for ours, theirs in _PROTO_NAMES.items() if theirs == name), name.lower())


_PROTO_NAMES: Final = {"fp16": "FLOAT16", "fp32": "FLOAT32"}
