"""ONNX graphs on disk whose weights lie in one file beside them. Knows offsets and bytes; nothing of operators or schemes.

Weights go to the file one at a time, so writing a model needs memory for one of them. Equal bytes are written once, whatever
shape a graph gives them: the rows of a tied embedding serve the lookup and the head, and two graphs of one bundle share what they
have in common.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np
import onnx_ir as ir

INLINE_BYTES = 1024  # smaller tensors stay in the graph, where shape inference can read them
ALIGNMENT = 64  # bytes: a cache line, so that the runtime may use the mapped file as it is


class WeightFile:
    """Where the weights of one or more graphs go. Use as a context manager, then call :meth:`save` for each graph.

    Args:
        path: a new file, in the folder of the graphs.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.nbytes = 0
        self._places: dict[bytes, tuple[int, int]] = {}
        self._stream: BinaryIO | None = None

    def __enter__(self) -> Self:
        self._stream = open(self.path, "wb")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._stream is not None:
            self._stream.close()

    def save(self, model: ir.Model, graph: Path) -> None:
        """Write the graph to ``graph`` and its weights to this file. The model's large tensors become references to it."""
        for value in model.graph.initializers.values():
            tensor = value.const_value
            if tensor is None:
                continue
            if tensor.nbytes > INLINE_BYTES:
                value.const_value = self._put(tensor, value.name or "")
            elif isinstance(tensor, ir.ExternalTensor):  # small and in the source's file, which will not be there
                value.const_value = ir.tensor(np.array(tensor.numpy()), name=value.name)
            if isinstance(tensor, ir.ExternalTensor):
                tensor.release()  # its pages of the source file need not stay in memory
        ir.save(model, graph)

    def _put(self, tensor: ir.TensorProtocol, name: str) -> ir.ExternalTensor:
        assert self._stream is not None
        data = tensor.tobytes()
        key = hashlib.blake2b(data).digest()
        if key not in self._places:
            self._stream.write(b"\0" * (-self.nbytes % ALIGNMENT))
            offset = self._stream.tell()
            self._stream.write(data)
            self.nbytes = offset + len(data)
            self._places[key] = (offset, len(data))
        offset, length = self._places[key]
        return ir.ExternalTensor(
            self.path.name, offset, length, tensor.dtype, shape=ir.Shape(tensor.shape.numpy()), name=name, base_dir=self.path.parent
        )


def weight_bytes(model: ir.Model) -> int:
    """Bytes of all initializers of a graph."""
    return sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value is not None)
