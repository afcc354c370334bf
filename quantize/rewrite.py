"""Puts formats into a graph: each product in its place, a table that lookups and heads share only once.

    MatMul(x, W)          ->  MatMulNBits(x, packed, scales, zero_points)
    MatMul(x, W)          ->  MatMulIntegerToFloat(QuantizeLinear(x, s, 128), W8, s, scales, 128)
    MatMul(x, W), rows    ->  Mul(MatMulIntegerToFloat(QuantizeLinear(Div(x, m), s, 128), ...), m),  m = ReduceMax(Abs(x))
    Gather(E, ids)        ->  GatherBlockQuantized(packed, ids, scales, zero_points)
    Gather(E, ids)        ->  Mul(Cast(Gather(E8, ids)), Gather(scales, ids))

Nothing here chooses a format.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from specstream.quantize.formats import ZERO, BlockFormat, Blocks, FloatArray, Format, IntegerFormat, to_blocks, to_integers
from specstream.quantize.products import Lookup, Product, constant, drop_unused, find_lookups, find_products, replace

CONTRIB = "com.microsoft"


def rewrite(model: ir.Model, plan: Mapping[str, Format], moments: Mapping[str, FloatArray] | None = None) -> dict[str, int]:
    """Replace each product and each lookup whose weight's name is in ``plan``.

    A table that lookups read keeps rows of tokens together, so that a head, or another graph of the bundle, finds the same bytes.

    Args:
        moments: float32 [K, K] of values that products read, for the rounding of 4-bit blocks (see
            :func:`specstream.quantize.formats.to_blocks`).

    Returns:
        How many nodes of each kind were made: ``MatMulNBits``, ``MatMulIntegerToFloat``, ``GatherBlockQuantized``, ``Gather``.

    Raises:
        UserError: a block size that does not divide a matrix.
    """
    counts: Counter[str] = Counter()
    moments = moments or {}
    tables = _Tables(model.graph)
    rounded = _Rounded(model.graph)
    products, lookups = find_products(model), find_lookups(model)
    looked_up = {lookup.table.name or "" for lookup in lookups}
    unknown = set(plan) - {product.name for product in products} - looked_up
    if unknown:
        raise ValueError(f"the plan names weights that the graph does not have: {', '.join(sorted(unknown))}")
    for product in products:
        form = plan.get(product.name)
        if isinstance(form, BlockFormat):
            of_rows = moments.get(product.rows.name or "") if form.bits == 4 else None
            replace(product, _block_nodes(product, form, tables, of_rows))
            counts["MatMulNBits"] += 1
        elif isinstance(form, IntegerFormat):
            replace(product, _integer_nodes(product, form, tables, rounded, product.name in looked_up))
            counts["MatMulIntegerToFloat"] += 1
    for lookup in lookups:
        form = plan.get(lookup.table.name or "")
        if isinstance(form, BlockFormat):
            _replace_lookup(lookup, [_block_lookup(lookup, form, tables)])
            counts["GatherBlockQuantized"] += 1
        elif isinstance(form, IntegerFormat):
            _replace_lookup(lookup, _integer_lookup(lookup, tables))
            counts["Gather"] += 1
    model.graph.opset_imports.setdefault(CONTRIB, 1)
    drop_unused(model)
    return dict(counts)


class _Tables:
    """Weights in their new form, made once for all nodes that read them."""

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        self._blocks: dict[str, Blocks] = {}
        self._values: dict[str, ir.Value] = {}

    def blocks(self, weight: ir.Value, transposed: bool, form: BlockFormat, moments: FloatArray | None = None) -> Blocks:
        name = weight.name or ""
        if name not in self._blocks:
            self._blocks[name] = to_blocks(_matrix(weight, transposed), form, name, moments)
        return self._blocks[name]

    def value(self, name: str, array: Any) -> ir.Value:
        """A new weight, or the one of that name that was made before."""
        if name not in self._values:
            self._values[name] = constant(self.graph, name, array)
        return self._values[name]

    def integers(self, weight: ir.Value, transposed: bool, as_table: bool) -> tuple[ir.Value, ir.Value]:
        """int8 [K, N] (or the table [N, K]) and scales [N]."""
        name = weight.name or ""
        if f"{name}.int8" not in self._values:
            integers, scales = to_integers(_matrix(weight, transposed))
            self.value(f"{name}.int8", np.ascontiguousarray(integers.T if as_table else integers))
            self.value(f"{name}.scales", scales)
        return self._values[f"{name}.int8"], self._values[f"{name}.scales"]


class _Rounded:
    """Activations as unsigned bytes, made once for all products that read them with the same scale."""

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        self._made: dict[tuple[ir.Value, IntegerFormat], tuple[ir.Value, ir.Value | None]] = {}
        self._scales: dict[float, ir.Value] = {}
        self._constants: dict[str, ir.Value] = {}

    def scale(self, scale: float) -> ir.Value:
        if scale not in self._scales:
            self._scales[scale] = constant(self.graph, "activation_scale", np.array(scale, dtype=np.float32))
        return self._scales[scale]

    def shared(self, name: str, array: Any) -> ir.Value:
        if name not in self._constants:
            self._constants[name] = constant(self.graph, name, array)
        return self._constants[name]

    def rows(self, product: Product, form: IntegerFormat) -> tuple[list[ir.Node], ir.Value, ir.Value | None]:
        """New nodes (none when they were made before), the bytes, and the row maxima when rows are normalised."""
        key = (product.rows, form)
        nodes: list[ir.Node] = []
        if key not in self._made:
            source, largest = product.rows, None
            if form.normalised:
                magnitude = ir.node("Abs", [source])
                axis = self.shared("last_axis", np.array([-1], dtype=np.int64))
                most = ir.node("ReduceMax", [magnitude.outputs[0], axis], {"keepdims": 1})
                floor = ir.node("Max", [most.outputs[0], self.shared("least_magnitude", np.array(1e-12, dtype=np.float32))])
                largest = floor.outputs[0]
                divided = ir.node("Div", [source, largest])
                nodes += [magnitude, most, floor, divided]
                source = divided.outputs[0]
            zero = self.shared("activation_zero", np.array(ZERO, dtype=np.uint8))
            nodes.append(ir.node("QuantizeLinear", [source, self.scale(form.scale), zero]))
            self._made[key] = (nodes[-1].outputs[0], largest)
        return nodes, *self._made[key]


def _matrix(weight: ir.Value, transposed: bool) -> Any:
    assert weight.const_value is not None
    stored = weight.const_value.numpy()
    return stored.T if transposed else stored


def _block_nodes(product: Product, form: BlockFormat, tables: _Tables, moments: FloatArray | None) -> list[ir.Node]:
    blocks = tables.blocks(product.weight, product.transposed, form, moments)
    inputs = [product.rows, tables.value(f"{product.name}.packed", blocks.packed), tables.value(f"{product.name}.scales", blocks.scales)]
    if blocks.zero_points is not None:
        inputs.append(tables.value(f"{product.name}.zero_points", blocks.zero_points))
    inner, columns = product.shape
    attributes = {"K": inner, "N": columns, "bits": form.bits, "block_size": form.block_size, "accuracy_level": form.accuracy_level}
    return [ir.node("MatMulNBits", inputs, attributes, domain=CONTRIB)]


def _block_lookup(lookup: Lookup, form: BlockFormat, tables: _Tables) -> ir.Node:
    name = lookup.table.name or ""
    blocks = tables.blocks(lookup.table, True, form)
    rows = lookup.shape[0]
    # The same bytes as the head's, as a matrix: written to the file once.
    inputs = [tables.value(f"{name}.packed_rows", blocks.packed.reshape(rows, -1)), lookup.node.inputs[1]]
    inputs.append(tables.value(f"{name}.scales", blocks.scales))
    if blocks.zero_points is not None:
        inputs.append(tables.value(f"{name}.zero_points", blocks.zero_points))
    attributes = {"bits": form.bits, "block_size": form.block_size, "gather_axis": 0, "quantize_axis": 1}
    return ir.node("GatherBlockQuantized", inputs, attributes, domain=CONTRIB)


def _integer_nodes(product: Product, form: IntegerFormat, tables: _Tables, rounded: _Rounded, as_table: bool) -> list[ir.Node]:
    nodes, quantized, largest = rounded.rows(product, form)
    weight, scales = tables.integers(product.weight, product.transposed, as_table)
    if as_table:
        # Lookups read rows of the table, the product wants columns: ONNX Runtime transposes it once, when it loads the graph.
        turned = ir.node("Transpose", [weight], {"perm": [1, 0]})
        nodes.append(turned)
        weight = turned.outputs[0]
    zero = rounded.shared("activation_zero", np.array(ZERO, dtype=np.uint8))
    nodes.append(ir.node("MatMulIntegerToFloat", [quantized, weight, rounded.scale(form.scale), scales, zero], domain=CONTRIB))
    if largest is not None:
        nodes.append(ir.node("Mul", [nodes[-1].outputs[0], largest]))
    return nodes


def _integer_lookup(lookup: Lookup, tables: _Tables) -> list[ir.Node]:
    table, scales = tables.integers(lookup.table, True, True)
    name = lookup.table.name or ""
    assert scales.const_value is not None
    # The head's scales once more, as a column: the same bytes.
    column = tables.value(f"{name}.scales_column", scales.const_value.numpy().reshape(-1, 1))
    gathered = ir.node("Gather", [table, lookup.node.inputs[1]], {"axis": 0})
    floats = ir.node("Cast", [gathered.outputs[0]], {"to": int(ir.DataType.FLOAT)})
    factors = ir.node("Gather", [column, lookup.node.inputs[1]], {"axis": 0})
    return [gathered, floats, factors, ir.node("Mul", [floats.outputs[0], factors.outputs[0]])]


def _replace_lookup(lookup: Lookup, made: list[ir.Node]) -> None:
    product = Product("", lookup.node, (lookup.node,), lookup.table, lookup.node.outputs[0], lookup.table, True)
    replace(product, made)
