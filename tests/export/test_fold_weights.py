"""Folding of weights: what becomes a weight, what stays, and that values are right."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from specstream.export.passes.fold_weights import fold_weights

rng = np.random.default_rng(0)
TABLE = rng.standard_normal((6, 4)).astype(np.float32)


def graph(nodes: list[ir.Node], outputs: list[ir.Value], constants: dict[str, ir.Value], inputs: list[ir.Value]) -> ir.Model:
    made = ir.Graph(inputs, outputs, nodes=nodes, initializers=list(constants.values()), opset_imports={"": 24}, name="g")
    return ir.Model(made, ir_version=10)


def constant(name: str, value: np.ndarray) -> ir.Value:
    tensor = ir.tensor(value, name=name)
    return ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)


def rows(name: str, *shape: int) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT))


def test_scaled_and_gathered_weights_are_stored_transposed() -> None:
    weights = {
        name: constant(name, value) for name, value in (("b", TABLE), ("two", np.float32(2.0).reshape(())), ("pick", np.array([4, 1])))
    }
    x = rows("x", 3, 4)
    scaled = ir.node("Mul", [weights["b"], weights["two"]])
    first = ir.node("Transpose", [scaled.outputs[0]], {"perm": [1, 0]})
    chosen = ir.node("Gather", [weights["b"], weights["pick"]], {"axis": 0})
    second = ir.node("Transpose", [chosen.outputs[0]], {"perm": [1, 0]})
    products = [ir.node("MatMul", [x, node.outputs[0]]) for node in (first, second)]
    model = graph([scaled, first, chosen, second, *products], [p.outputs[0] for p in products], weights, [x])
    assert fold_weights(model) == 4
    assert [node.op_type for node in model.graph] == ["MatMul", "MatMul"]
    found = [node.inputs[1] for node in model.graph]
    expected = [(TABLE * 2).T, TABLE[[4, 1]].T]
    for value, array in zip(found, expected, strict=True):
        assert value is not None
        assert value.const_value is not None
        np.testing.assert_array_equal(value.const_value.numpy(), array)


def test_only_user_takes_the_name() -> None:
    weights = {"w": constant("w", TABLE)}
    x = rows("x", 3, 4)
    turned = ir.node("Transpose", [weights["w"]], {"perm": [1, 0]})
    product = ir.node("MatMul", [x, turned.outputs[0]])
    model = graph([turned, product], [product.outputs[0]], weights, [x])
    assert fold_weights(model) == 1
    assert list(model.graph.initializers) == ["w"]
    assert model.graph.initializers["w"].shape == ir.Shape([4, 6])


def test_tied_table_and_activations_stay() -> None:
    weights = {"table": constant("table", TABLE)}
    ids = ir.Value(name="ids", shape=ir.Shape(["T"]), type=ir.TensorType(ir.DataType.INT64))
    embedded = ir.node("Gather", [weights["table"], ids], {"axis": 0})
    turned = ir.node("Transpose", [weights["table"]], {"perm": [1, 0]})
    head = ir.node("MatMul", [embedded.outputs[0], turned.outputs[0]])
    model = graph([embedded, turned, head], [head.outputs[0]], weights, [ids])
    assert fold_weights(model) == 0
    assert len(model.graph) == 3
