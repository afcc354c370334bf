"""Weight files of Core ML packages (``weights/weight.bin``), read and written: arrays at offsets, elements of less than a byte too.

The layout is that of Core ML's blob storage, version 2 (coremltools, ``mlmodel/src/MILBlob/Blob/StorageFormat.hpp``): a header of 64
bytes; at each offset that a program names a record of 64 bytes, which says where the data is. Knows nothing of programs.
"""

from __future__ import annotations

import struct
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final, Self

import numpy as np
import numpy.typing as npt

from specstream.models.errors import UserError

Array = npt.NDArray[Any]

HEADER: Final = struct.Struct("<II")  # number of records, version
RECORD: Final = struct.Struct("<IIQQQ")  # marker, type of the elements, bytes of data, where the data is, unused bits at its end
RECORD_BYTES: Final = 64
MARKER: Final = 0xDEADBEEF
VERSION: Final = 2

# Type of elements -> number in a record.
NUMBERS: Final[dict[str, int]] = {
    "fp16": 1, "fp32": 2, "uint8": 3, "int8": 4, "int16": 6, "uint16": 7, "int4": 8, "uint1": 9, "uint2": 10, "uint4": 11, "uint3": 12,
    "uint6": 13, "int32": 14, "uint32": 15,
}  # fmt: skip

# Type of elements -> what NumPy holds them in. Those of less than a byte get a byte each.
NUMPY: Final[dict[str, type[np.generic]]] = {
    "fp16": np.float16, "fp32": np.float32, "fp64": np.float64, "int8": np.int8, "int16": np.int16, "int32": np.int32, "int64": np.int64,
    "uint8": np.uint8, "uint16": np.uint16, "uint32": np.uint32, "uint64": np.uint64, "bool": np.bool_, "int4": np.int8, "uint1": np.uint8,
    "uint2": np.uint8, "uint3": np.uint8, "uint4": np.uint8, "uint6": np.uint8,
}  # fmt: skip

BITS: Final[dict[str, int]] = {"int4": 4, "uint1": 1, "uint2": 2, "uint3": 3, "uint4": 4, "uint6": 6}  # types of less than a byte


def unpack(data: npt.NDArray[np.uint8], dtype: str, count: int) -> Array:
    """Elements of less than a byte, one byte each.

    Args:
        data: packed; the first element in the lowest bits, an element that crosses a byte's border with its low bits first.
        dtype: one of ``BITS``.
        count: of elements.

    Returns:
        [count] uint8, or int8 for a signed type.
    """
    bits = BITS[dtype]
    values: Array
    if bits == 4:
        values = np.stack([data & 15, data >> 4], axis=-1).reshape(-1)[:count]
    else:
        table = np.unpackbits(data, bitorder="little")[: count * bits].reshape(count, bits)
        values = np.packbits(table, axis=-1, bitorder="little").reshape(count)
    if dtype.startswith("int"):
        sign = 1 << (bits - 1)
        signed: Array = (values ^ sign).astype(np.int8) - np.int8(sign)
        return signed
    return values


def pack(values: Array, dtype: str) -> Array:
    """The reverse of :func:`unpack`; unused bits at the end are zero."""
    bits = BITS[dtype]
    flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    if bits == 4:
        if flat.size % 2:
            flat = np.append(flat, np.uint8(0))
        return (flat[0::2] & 15) | (flat[1::2] << 4)
    table = np.unpackbits(flat[:, None], axis=-1, bitorder="little")[:, :bits]
    return np.packbits(table.reshape(-1), bitorder="little")


class WeightBlob:
    """A weight file that is open for reading; its pages are read when they are touched.

    Raises:
        UserError: no such file, or it is not a weight file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise UserError(f"{path}: the package's weights are missing; copy the whole package again")
        self._bytes: npt.NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="r") if path.stat().st_size else np.empty(0, np.uint8)
        if len(self._bytes) < RECORD_BYTES or HEADER.unpack_from(self._bytes.data)[1] != VERSION:
            raise UserError(f"{path}: is not a Core ML weight file of version {VERSION}, or is cut short; copy the whole package again")

    def read(self, offset: int, dtype: str, shape: tuple[int, ...]) -> Array:
        """The array whose record is at an offset. Types of a byte or more are views of the file and cannot be written.

        Raises:
            UserError: no record is there, it has other elements than asked for, or the file ends before it does.
        """
        where = f"{self.path}: the weight at {offset}"
        if offset + RECORD_BYTES > len(self._bytes):
            raise UserError(f"{where} lies behind the end of the file ({len(self._bytes)} bytes); copy the whole package again")
        marker, number, size, start, _ = RECORD.unpack_from(self._bytes.data, offset)
        if marker != MARKER:
            raise UserError(f"{where} is damaged: no record is there; copy the whole package again")
        if NUMBERS.get(dtype) != number:
            found = next((name for name, n in NUMBERS.items() if n == number), f"type {number}")
            raise UserError(f"{where} holds {found} where the program expects {dtype}; the model and its weights do not belong together")
        count = int(np.prod(shape, dtype=np.int64))
        expected = (count * BITS[dtype] + 7) // 8 if dtype in BITS else count * np.dtype(NUMPY[dtype]).itemsize
        if size != expected:
            raise UserError(
                f"{where} has {size} bytes where {dtype} {list(shape)} needs {expected}; the model and its weights do not belong together"
            )
        if start + size > len(self._bytes):
            raise UserError(f"{where} is cut short: the file has {len(self._bytes)} of {start + size} bytes; copy the whole package again")
        data = self._bytes[start : start + size]
        values = unpack(data, dtype, count) if dtype in BITS else data.view(NUMPY[dtype])
        return np.asarray(values.reshape(shape))


class WeightBlobWriter:
    """Writes a weight file, one array at a time. Use as a context manager.

    Args:
        path: a new file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._count = 0
        self._stream: BinaryIO | None = None

    def __enter__(self) -> Self:
        self._stream = open(self.path, "wb")
        self._stream.write(bytes(RECORD_BYTES))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._stream is not None:
            self._stream.seek(0)
            self._stream.write(HEADER.pack(self._count, VERSION))
            self._stream.close()

    def write(self, values: Array, dtype: str) -> int:
        """Append an array and return the offset at which a program finds it.

        Args:
            values: of ``NUMPY[dtype]``; where elements are less than a byte, one byte each.
            dtype: one of ``NUMBERS``.
        """
        assert self._stream is not None
        if values.dtype != NUMPY[dtype]:
            raise ValueError(f"{values.dtype} given for {dtype}")
        data: Array = pack(values, dtype) if dtype in BITS else np.ascontiguousarray(values)
        offset = self._align()
        unused = data.nbytes * 8 - values.size * BITS[dtype] if dtype in BITS else 0
        record = RECORD.pack(MARKER, NUMBERS[dtype], data.nbytes, offset + RECORD_BYTES, unused)
        self._stream.write(record.ljust(RECORD_BYTES, b"\0"))
        self._stream.write(data.tobytes())
        self._align()
        self._count += 1
        return offset

    def _align(self) -> int:
        assert self._stream is not None
        self._stream.write(bytes(-self._stream.tell() % RECORD_BYTES))
        return self._stream.tell()
