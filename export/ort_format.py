"""ONNX graphs in ONNX Runtime's own format (``.ort``), which its reduced builds for phones read; and what such a build must hold.

An ``.ort`` file is a flatbuffer with an optimised graph and its weights inside. Knows graphs and bytes; nothing of bundles, tokens or
targets. ``python -m specstream.export.ort_format GRAPH.onnx OUT.ort`` converts in a process of its own: a graph's weights are in memory
twice meanwhile.
"""

from __future__ import annotations

import argparse
import hashlib
import mmap
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from specstream.models.errors import UserError

LARGEST_FILE: Final = (1 << 31) - 1  # bytes; a flatbuffer's offsets are signed and of 32 bits
INLINE_BYTES: Final = 1024  # smaller weights stay in the ONNX file, where shape inference can read them
_ALIGNMENT: Final = 64  # of what a flatbuffer holds; nothing in this format asks for more
_MODEL_FIELD: Final = 6  # where an InferenceSession table's vtable has its model

Operators = dict[tuple[str, int], set[str]]  # (domain, version that defined it) -> names


def convert(graph: Path, out: Path, weights: Sequence[Path] = ()) -> None:
    """Write the graph in ``.ort`` form: the same bytes each time.

    All optimisations are applied now ("Fixed" style): a reduced build has none of its own. The one that arranges convolutions for the
    processor at hand is left out, so the file is for any. The others depend on the graph alone.

    Args:
        graph: an ONNX file.
        out: the file to write.
        weights: files beside the graph that hold its weights, when they are links that lead out of its folder.

    Raises:
        UserError: ONNX Runtime refuses the graph, or the result is larger than an ``.ort`` file can be.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(out)
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.add_session_config_entry("session.save_model_format", "ORT")
    # Quantize-dequantize pairs, if a graph has them, may become 8-bit kernels: right for Arm.
    options.add_session_config_entry("session.qdqisint8allowed", "1")
    maps = [_mapped(file) for file in weights]
    if maps:
        options.add_external_initializers_from_files_in_memory([file.name for file in weights], maps, [len(m) for m in maps])
    try:
        ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"], disabled_optimizers=["NchwcTransformer"])
    except Exception as error:  # onnxruntime's errors share no narrower class
        reason = str(error).splitlines()[0]
        raise UserError(f"{graph}: ONNX Runtime {ort.__version__} cannot convert it: {reason}") from error
    for mapped in maps:
        mapped.close()
    if out.stat().st_size > LARGEST_FILE:
        raise UserError(f"{graph}: {out.stat().st_size / 1e9:.2f} GB in .ort form, which holds 2.14 GB at most; quantize the model")
    canonicalise(out)


def canonicalise(file: Path) -> None:
    """Write the head of an ``.ort`` file anew, in an order of our own.

    The head lists which types each operator's kernels go by. ONNX Runtime writes that list from a hash map whose order differs from
    one process to the next; the model behind it is the same each time. The list's entries are found by name, so any layout will do.

        before   root, list in some order, model        after   root, list by operator, model
    """
    fbs = _schema()
    data = np.memmap(file, np.uint8, mode="r")
    session = fbs.InferenceSession.InferenceSession.GetRootAs(data, 0)
    model = session.Model()._tab.Pos
    # A flatbuffer is written from its end to its start: the model and all that it refers to, its vtable included, lie behind this place.
    start = min(model, model - int.from_bytes(data[model : model + 4].tobytes(), "little", signed=True))
    head = bytearray(_head(fbs, session))
    # What a flatbuffer holds is aligned as counted from its end.
    head += bytes((start - len(data) - len(head)) % _ALIGNMENT)
    place = fbs.InferenceSession.InferenceSession.GetRootAs(head, 0)._tab
    field = place.Pos + place.Offset(_MODEL_FIELD)
    head[field : field + 4] = (len(head) + model - start - field).to_bytes(4, "little")
    partial = file.with_name(f".{file.name}.head-{os.getpid()}")
    with open(file, "rb") as old, open(partial, "wb") as new:
        new.write(head)
        old.seek(start)
        shutil.copyfileobj(old, new, 1 << 22)
    del data, session, place
    partial.replace(file)


def _head(fbs: Any, session: Any) -> bytes:
    """A flatbuffer of the root and the list; the place of the model is left to fill in."""
    import flatbuffers

    resolver = session.KernelTypeStrResolver()
    operators = [resolver.OpKernelTypeStrArgs(i) for i in range(resolver.OpKernelTypeStrArgsLength())]
    builder = flatbuffers.Builder(1 << 14)

    def tables(offsets: list[int]) -> int:
        """A vector of tables: it is written from its end."""
        builder.StartVector(4, len(offsets), 4)
        for offset in reversed(offsets):
            builder.PrependUOffsetTRelative(offset)
        return int(builder.EndVector())

    entries = []
    for operator in sorted(operators, key=lambda o: bytes(o.OpId())):
        kinds = [operator.KernelTypeStrArgs(i) for i in range(operator.KernelTypeStrArgsLength())]
        written = []
        for kind in sorted(kinds, key=lambda k: bytes(k.KernelTypeStr())):
            arguments = []
            for argument in (kind.Args(i) for i in range(kind.ArgsLength())):
                fbs.ArgTypeAndIndex.Start(builder)
                fbs.ArgTypeAndIndex.AddArgType(builder, argument.ArgType())
                fbs.ArgTypeAndIndex.AddIndex(builder, argument.Index())
                arguments.append(fbs.ArgTypeAndIndex.End(builder))
            name, listed = builder.CreateString(kind.KernelTypeStr()), tables(arguments)
            fbs.KernelTypeStrArgsEntry.Start(builder)
            fbs.KernelTypeStrArgsEntry.AddKernelTypeStr(builder, name)
            fbs.KernelTypeStrArgsEntry.AddArgs(builder, listed)
            written.append(fbs.KernelTypeStrArgsEntry.End(builder))
        name, listed = builder.CreateString(operator.OpId()), tables(written)
        fbs.OpIdKernelTypeStrArgsEntry.Start(builder)
        fbs.OpIdKernelTypeStrArgsEntry.AddOpId(builder, name)
        fbs.OpIdKernelTypeStrArgsEntry.AddKernelTypeStrArgs(builder, listed)
        entries.append(fbs.OpIdKernelTypeStrArgsEntry.End(builder))
    listed = tables(entries)
    fbs.KernelTypeStrResolver.Start(builder)
    fbs.KernelTypeStrResolver.AddOpKernelTypeStrArgs(builder, listed)
    types, version = fbs.KernelTypeStrResolver.End(builder), builder.CreateString(session.OrtVersion())
    fbs.InferenceSession.Start(builder)
    fbs.InferenceSession.AddOrtVersion(builder, version)
    builder.PrependUint32Slot(1, 0xFFFFFFFF, 0)  # the model, which is not in this buffer
    fbs.InferenceSession.AddKernelTypeStrResolver(builder, types)
    builder.Finish(fbs.InferenceSession.End(builder), file_identifier=b"ORTM")
    return bytes(builder.Output())


def operators(files: Iterable[Path]) -> Operators:
    """Operators of the graphs in ``.ort`` files, subgraphs included."""
    fbs = _schema()
    found: Operators = {}

    def collect(graph: Any) -> None:
        for i in range(graph.NodesLength()):
            node = graph.Nodes(i)
            key = (node.Domain().decode() or "ai.onnx", node.SinceVersion())
            found.setdefault(key, set()).add(node.OpType().decode())
            for attribute in (node.Attributes(j) for j in range(node.AttributesLength())):
                if attribute.Type() == fbs.AttributeType.AttributeType.GRAPH:
                    collect(attribute.G())
                elif attribute.Type() == fbs.AttributeType.AttributeType.GRAPHS:
                    for j in range(attribute.GraphsLength()):
                        collect(attribute.Graphs(j))

    for file in files:
        collect(_graph(fbs, np.memmap(file, np.uint8, mode="r")))
    return found


def onnx_operators(graph: Path) -> Operators:
    """Operators of an ONNX graph, subgraphs included, each with the version that defined it as the graph's opset has it."""
    import onnx

    model = onnx.load(graph, load_external_data=False)
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    found: Operators = {}

    def collect(nodes: Iterable[Any]) -> None:
        for node in nodes:
            version = opsets[node.domain]
            if node.domain == "":
                version = onnx.defs.get_schema(node.op_type, version, "").since_version
            found.setdefault((node.domain or "ai.onnx", version), set()).add(node.op_type)
            for attribute in node.attribute:
                for inner in (attribute.g, *attribute.graphs):
                    collect(inner.node)

    collect(model.graph.node)
    return found


def config_text(found: Sequence[Operators], names: Iterable[str]) -> str:
    """What ``build.sh --include_ops_by_config`` of ONNX Runtime reads: ``domain;version;operators`` lines."""
    keys = sorted({key for operators_of in found for key in operators_of})
    lines = [f"# operators of {', '.join(names)}"]
    for key in keys:
        listed = sorted(set().union(*(operators_of.get(key, set()) for operators_of in found)))
        lines.append(f"{key[0]};{key[1]};{','.join(listed)}")
    return "\n".join(lines) + "\n"


def share_weights(graph: Path, out: Path, files: Sequence[Path]) -> int:
    """Write the ONNX graph beside ``.ort`` files, its weights being those inside them: an ONNX file may name any bytes as its weights.

    Weights that no ``.ort`` file has as they are (an optimisation changed them) go to ``<out>.data``.

    Args:
        graph: an ONNX file whose weights lie beside it.
        out: the file to write, in the folder of ``files``.
        files: where to look, in this order.

    Returns:
        Bytes of weights that are found there.
    """
    import onnx_ir as ir

    known: dict[bytes, tuple[str, int]] = {}
    for file in files:
        for offset, data in stored_weights(file):
            known.setdefault(_digest(data), (file.name, offset))
    model = ir.load(graph)
    shared = 0
    rest: list[Any] = []
    rest_bytes = 0
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is None:
            continue
        if tensor.nbytes <= INLINE_BYTES:
            if isinstance(tensor, ir.ExternalTensor):
                value.const_value = ir.tensor(np.array(tensor.numpy()), name=value.name)
            continue
        data = _content(tensor, graph.parent)
        if (place := known.get(_digest(data))) is None:
            place = (f"{out.name}.data", rest_bytes)
            rest.append(data)
            rest_bytes += len(data)
        else:
            shared += len(data)
        value.const_value = ir.ExternalTensor(
            place[0], place[1], len(data), tensor.dtype, shape=ir.Shape(tensor.shape.numpy()), name=value.name or "", base_dir=out.parent
        )
    if rest:
        with open(out.with_name(f"{out.name}.data"), "wb") as stream:
            stream.writelines(rest)
    ir.save(model, out)
    return shared


def stored_weights(file: Path) -> list[tuple[int, npt.NDArray[np.uint8]]]:
    """Where each large weight lies in an ``.ort`` file, and its bytes (mapped, not read)."""
    data = np.memmap(file, np.uint8, mode="r")
    graph = _graph(_schema(), data)
    first = data.__array_interface__["data"][0]
    found = []
    for tensor in (graph.Initializers(i) for i in range(graph.InitializersLength())):
        if tensor.RawDataLength() > INLINE_BYTES:
            raw = tensor.RawDataAsNumpy()
            offset = raw.__array_interface__["data"][0] - first
            found.append((offset, np.asarray(data[offset : offset + len(raw)])))
    return found


def _content(tensor: Any, folder: Path) -> Any:
    """A weight's bytes, read by us: onnx_ir refuses files with links, which are as good as others in a checked bundle."""
    import onnx_ir as ir

    if not isinstance(tensor, ir.ExternalTensor):
        return tensor.tobytes()
    return np.memmap(folder / tensor.location, np.uint8, mode="r", offset=tensor.offset or 0, shape=(tensor.nbytes,))


def _graph(fbs: Any, data: npt.NDArray[np.uint8]) -> Any:
    if bytes(data[4:8]) != b"ORTM":
        raise ValueError("not an .ort file")
    return fbs.InferenceSession.InferenceSession.GetRootAs(data, 0).Model().Graph()


def _schema() -> Any:
    """Readers and writers of the format's tables, as onnxruntime brings them."""
    import importlib

    import onnxruntime.tools.ort_format_model  # noqa: F401 - makes the next one importable

    names = ("InferenceSession", "KernelTypeStrResolver", "OpIdKernelTypeStrArgsEntry", "KernelTypeStrArgsEntry", "ArgTypeAndIndex")
    for name in (*names, "AttributeType"):
        importlib.import_module(f"ort_flatbuffers_py.fbs.{name}")
    return importlib.import_module("ort_flatbuffers_py.fbs")


def _digest(data: Any) -> bytes:
    return hashlib.blake2b(data).digest()


def _mapped(path: Path) -> mmap.mmap:
    with open(path, "rb") as stream:
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("graph", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--weights", type=Path, action="append", default=[])
    arguments = parser.parse_args()
    convert(arguments.graph, arguments.out, arguments.weights)


if __name__ == "__main__":
    _main()
