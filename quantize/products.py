"""Which products of a graph have a constant matrix, and which lookups read one. Changes nothing.

The forms that an exported graph has:

    MatMul(x, W [K, N])                                             a projection, an untied head
    Gemm(x, E [N, K], transB=1)                                     a tied head, a draft head
    Transpose(MatMul(E [N, K], Transpose(x)))                       a large tied head
    Gather(E [V, H], ids)                                           the embedding
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

FloatArray = npt.NDArray[np.float32]

SMALLEST = 32  # columns and rows of a matrix that is worth packing; low-rank maps are below it or named below
LOW_RANK = (".lora_A", ".lora_B", "entry_", "correction_", "pair_", "prune_")  # parts of names


@dataclass(frozen=True, eq=False)
class Product:
    """``y = x W`` with a constant W, K rows and N columns.

    Attributes:
        name: of the weight; unique among products unless heads share a table.
        node: that makes ``output``; new nodes go before it.
        nodes: all that a replacement makes superfluous, ``node`` among them.
        rows: the value x, last dimension K.
        output: the value y, last dimension N.
        weight: the value of W, stored [K, N], or [N, K] when ``transposed``.
    """

    name: str
    node: ir.Node
    nodes: tuple[ir.Node, ...]
    rows: ir.Value
    output: ir.Value
    weight: ir.Value
    transposed: bool

    @property
    def shape(self) -> tuple[int, int]:
        """K, N."""
        first, second = _shape(self.weight)
        return (second, first) if self.transposed else (first, second)

    @property
    def is_head(self) -> bool:
        """Whether this scores tokens: its table has a row for each, as :class:`Lookup` has."""
        return self.transposed

    def matrix(self) -> FloatArray:
        """W as float32 [K, N], a copy or a view of the file's memory."""
        assert self.weight.const_value is not None
        stored: FloatArray = self.weight.const_value.numpy()
        return stored.T if self.transposed else stored


@dataclass(frozen=True, eq=False)
class Lookup:
    """A Gather of rows from a table [V, H]."""

    node: ir.Node
    table: ir.Value

    @property
    def shape(self) -> tuple[int, int]:
        """V, H."""
        rows, width = _shape(self.table)
        return rows, width


def find_products(model: ir.Model) -> list[Product]:
    """All products worth quantizing, in the graph's order. Low-rank updates are not among them."""
    found = [product for node in model.graph if (product := _product(node)) is not None]
    return [p for p in found if min(p.shape) >= SMALLEST and not _is_low_rank(p.weight)]


def find_lookups(model: ir.Model) -> list[Lookup]:
    """All Gathers of whole rows of float tables."""
    return [
        Lookup(node, table)
        for node in model.graph
        if node.op_type == "Gather" and node.domain == "" and node.attributes.get_int("axis", 0) == 0
        if (table := node.inputs[0]) is not None and _is_matrix(table) and min(_shape(table)) >= SMALLEST and not _is_low_rank(table)
    ]


def _is_low_rank(weight: ir.Value) -> bool:
    return any(part in (weight.name or "") for part in LOW_RANK)


def _product(node: ir.Node) -> Product | None:
    if node.domain != "" or len(node.inputs) < 2:
        return None
    first, second = node.inputs[0], node.inputs[1]
    if first is None or second is None:
        return None
    output = node.outputs[0]
    if node.op_type == "Gemm" and len(node.inputs) == 2 and _is_matrix(second):
        attributes = node.attributes
        plain = not attributes.get_int("transA", 0) and attributes.get_float("alpha", 1.0) == 1.0
        return Product(_name(second), node, (node,), first, output, second, bool(attributes.get_int("transB", 0))) if plain else None
    if node.op_type != "MatMul":
        return None
    if _is_matrix(second) and not first.is_initializer():
        return Product(_name(second), node, (node,), first, output, second, False)
    before, after = second.producer(), _only_user(output)
    if _is_matrix(first) and before is not None and after is not None and before.op_type == after.op_type == "Transpose":
        rows = before.inputs[0]
        assert rows is not None
        superfluous = (after, node) if len(before.outputs[0].uses()) > 1 else (after, node, before)
        return Product(_name(first), after, superfluous, rows, after.outputs[0], first, True)
    return None


def _is_matrix(value: ir.Value) -> bool:
    tensor = value.const_value
    return value.is_initializer() and tensor is not None and tensor.dtype == ir.DataType.FLOAT and len(tensor.shape) == 2


def _only_user(value: ir.Value) -> ir.Node | None:
    uses = list(value.uses())
    return uses[0].node if len(uses) == 1 and not value.is_graph_output() else None


def _shape(value: ir.Value) -> tuple[int, ...]:
    assert value.const_value is not None
    return tuple(int(size) for size in value.const_value.shape.numpy())


def _name(value: ir.Value) -> str:
    assert value.name is not None
    return value.name


def constant(graph: ir.Graph, name: str, array: npt.NDArray[Any]) -> ir.Value:
    """A new weight of the graph; its name is kept unique."""
    unique, number = name, 1
    while unique in graph.initializers:
        unique, number = f"{name}.{number}", number + 1
    tensor = ir.tensor(array, name=unique)
    value = ir.Value(name=unique, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor)
    graph.register_initializer(value)
    return value


def replace(product: Product, made: list[ir.Node]) -> None:
    """Put nodes in the place of a product; the last one's first output is y from now on."""
    graph = product.node.graph
    assert graph is not None
    new, old = made[-1].outputs[0], product.output
    graph.insert_before(product.node, made)
    new.shape, new.type = old.shape, old.type
    name = old.name
    is_output = old.is_graph_output()
    old.replace_all_uses_with(new, replace_graph_outputs=is_output)
    old.name = None
    new.name = name
    graph.remove(list(product.nodes), safe=True)


def drop_unused(model: ir.Model) -> None:
    """Remove weights that no node reads any more."""
    for name, value in list(model.graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del model.graph.initializers[name]
