"""Portable graphs of attentions: alone, and as in a model, between the splitting and the merging of heads."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import torch
from onnx import TensorProto, helper, numpy_helper

from hdplugins import ONNX_DOMAIN, ONNX_DOMAIN_VERSION, ONNX_OPSET
from hdplugins.attention.operator import BodyVariant
from support.attention_layers import Layer
from support.operators.dense import Dense

BATCH = 3
HEADS = 2
PROTO = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
_State = TypeVar("_State")
_MASKS = {
    "key_mask": TensorProto.BOOL,
    **dict.fromkeys(("key_kind", "token_kind", "token_mask"), TensorProto.INT32),
}


_DENSE = Dense()


def chain_of(layers: Sequence[Layer], variant: BodyVariant = BodyVariant.BATCHED) -> onnx.ModelProto:
    """Attentions alone, each taking its first state from the one before; all are of the first one's heads and dtype.

    The inputs are the operator's that no layer has as constants. All but masks have the dtype. An axis has a name where
    the layers differ in its size.
    """
    dtype, operator = PROTO[layers[0].dtype], layers[0].operator
    axes: dict[str, list[str | int]] = {}
    for name in {name for layer in layers for name in layer.axes}:
        shapes = (layer.axes[name] for layer in layers if name in layer.axes)
        sizes_of_axes = enumerate(zip(*shapes, strict=True))
        axes[name] = [sizes[0] if len({*sizes}) == 1 else f"{name}_{place}" for place, sizes in sizes_of_axes]
    query, *others = operator.state_names
    tables = {name: table for layer in layers for name, table in layer.constants.items()}
    given = dict.fromkeys(name for layer in layers for name in (*operator.state_names, *layer.inputs))
    names = [query, *(f"attended_{number}" for number in range(len(layers)))]
    nodes = [
        helper.make_node(
            layer.name, [before, *others, *layer.inputs], [after], domain=ONNX_DOMAIN, **layer.node_attributes
        )
        for layer, (before, after) in zip(layers, itertools.pairwise(names), strict=True)
    ]
    inputs = [
        helper.make_tensor_value_info(name, _MASKS.get(name, dtype), axes[name]) for name in given if name not in tables
    ]
    constants = [numpy_helper.from_array(table, name) for name, table in tables.items()]
    *between, output = (helper.make_tensor_value_info(name, dtype, axes[query]) for name in names[1:])
    return helper.make_model(
        helper.make_graph(nodes, "attention", inputs, [output], constants, value_info=between),
        functions=list({layer.name: layer.body(variant) for layer in layers}.values()),
        opset_imports=[helper.make_opsetid("", ONNX_OPSET), helper.make_opsetid(ONNX_DOMAIN, ONNX_DOMAIN_VERSION)],
        ir_version=10,
    )


def attention_model(*layers: Layer) -> ir.Model:
    """`chain_of` these layers, with the shapes of all values."""
    model = chain_of(layers)
    onnx.checker.check_model(model)
    return ir.serde.deserialize_model(onnx.shape_inference.infer_shapes(model))


def portable_graph(*layers: Layer, head_dim: int = 32, dtype: int = TensorProto.FLOAT) -> ir.Model:
    """Attentions in a chain, each taking its first state from the one before; the result is the last one's, negated.

    An attention of more states than the first one takes the last one again.

    Args:
        layers: the attentions.
        head_dim: size of a head.
        dtype: of everything between the inputs and the result, which are float32.
    """
    first, states = layers[0], layers[0].operator.state_names
    heads = {name: first.heads_of(name) for name in states}
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", "tokens", heads[name] * head_dim])
        for name in states
    ]
    hidden, split = ["batch", "tokens", first.heads * head_dim], ["batch", "tokens", first.heads, head_dim]
    others = {name for layer in layers for name in layer.inputs}
    tables = {name: table for layer in layers for name, table in layer.constants.items()}
    inputs += [
        helper.make_tensor_value_info(name, kind, ["batch", "tokens"])
        for name, kind in _MASKS.items()
        if name in others
    ]
    body = [helper.make_node("Cast", [name], [f"{name}_typed"], to=dtype) for name in states]
    values = [
        helper.make_tensor_value_info(f"{name}_typed", dtype, ["batch", "tokens", heads[name] * head_dim])
        for name in states
    ]
    current, *rest = (f"{name}_typed" for name in states)
    for number, layer in enumerate(layers):
        parts = []
        names = layer.operator.state_names
        for state, source in zip(names, _given(layer, current, rest), strict=True):
            name = f"{state}_{number}"
            of_state = layer.heads_of(state)
            body.append(helper.make_node("Reshape", [source, f"to_heads_{of_state}"], [name]))
            values.append(helper.make_tensor_value_info(name, dtype, ["batch", "tokens", of_state, head_dim]))
            parts.append(name)
        attended, current = f"attended_{number}", f"merged_{number}"
        attributes = {**layer.attributes, "scale": head_dim**-0.5}
        body.append(helper.make_node(layer.name, [*parts, *layer.inputs], [attended], domain=ONNX_DOMAIN, **attributes))
        body.append(helper.make_node("Reshape", [attended, "to_hidden"], [current]))
        values.append(helper.make_tensor_value_info(attended, dtype, split))
        values.append(helper.make_tensor_value_info(current, dtype, hidden))
    # As in a model, where a projection follows.
    body.append(helper.make_node("Cast", [current], ["wide"], to=TensorProto.FLOAT))
    body.append(helper.make_node("Neg", ["wide"], ["result"]))
    constants = {f"to_heads_{number}": [0, 0, number, head_dim] for number in set(heads.values())}
    constants["to_hidden"] = [0, 0, first.heads * head_dim]
    graph = helper.make_graph(
        body,
        "attention",
        inputs,
        [helper.make_tensor_value_info("result", TensorProto.FLOAT, hidden)],
        [
            *(helper.make_tensor(name, TensorProto.INT64, [len(shape)], shape) for name, shape in constants.items()),
            *(numpy_helper.from_array(table, name) for name, table in tables.items()),
        ],
        value_info=values,
    )
    opsets = [helper.make_opsetid("", ONNX_OPSET), helper.make_opsetid(ONNX_DOMAIN, ONNX_DOMAIN_VERSION)]
    bodies = list({layer.name: layer.body() for layer in layers}.values())
    return ir.serde.deserialize_model(helper.make_model(graph, opset_imports=opsets, functions=bodies, ir_version=10))


def _given(layer: Layer, first: _State, others: Sequence[_State]) -> list[_State]:
    """The states that a layer of a chain takes."""
    return [first, *others, *others[-1:] * layer.operator.states][: layer.operator.states]


def insert_after(value: ir.Value, op_type: str) -> None:
    """Let everything that reads a value read a new node's result in its place."""
    readers = tuple(value.uses())
    changed = ir.node(op_type, [value])
    changed.outputs[0].shape, changed.outputs[0].dtype = value.shape, value.dtype
    producer = value.producer()
    assert producer is not None
    assert producer.graph is not None
    producer.graph.insert_after(producer, changed)
    for reader, index in readers:
        reader.replace_input_with(index, changed.outputs[0])


def states_of(batch: int, tokens: int, *, head_dim: int = 32, layer: Layer = _DENSE) -> dict[str, np.ndarray]:
    """States of a layer, [batch, tokens, hidden], far from a uniform softmax."""
    generator = np.random.default_rng(tokens * head_dim)
    shapes = {name: (batch, tokens, layer.heads_of(name) * head_dim) for name in layer.operator.state_names}
    return {name: (1.5 * generator.normal(size=shape)).astype(np.float32) for name, shape in shapes.items()}


def answer_by_definition(layers: Sequence[Layer], feeds: Mapping[str, np.ndarray]) -> np.ndarray:
    """The answer of these layers' `portable_graph`, [batch, tokens, hidden], computed in float64."""
    tensors = {name: torch.from_numpy(feed) for name, feed in feeds.items()}
    tensors |= {name: feed.double() for name, feed in tensors.items() if feed.dtype == torch.float32}
    first = layers[0]
    query, *rest = (tensors[name].unflatten(-1, (first.heads_of(name), -1)) for name in first.operator.state_names)
    for layer in layers:
        query = layer.by_definition(_given(layer, query, rest), tensors)
    return -query.flatten(2).numpy()


def session_of(lowered: ir.Model) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(ir.serde.serialize_model(lowered).SerializeToString(), options)
