"""Portable graphs of attentions alone, as they are in a model: between the splitting and the merging of heads."""

from __future__ import annotations

__all__ = [
    "BATCH",
    "HEADS",
    "MASKS",
    "STATES",
    "Blocks",
    "Dense",
    "Window",
    "answer_by_definition",
    "insert_after",
    "key_mask_of",
    "portable_graph",
    "session_of",
    "states_of",
]

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import torch
from onnx import TensorProto, helper, numpy_helper

from hdplugins import ONNX_DOMAIN, ONNX_DOMAIN_VERSION, ONNX_OPSET
from hdplugins.operators.block_sparse_attention import onnx_function as block_function
from hdplugins.operators.block_sparse_attention.reference import block_sparse_attention
from hdplugins.operators.dense_attention.onnx_function import function_of_arity
from hdplugins.operators.dense_attention.reference import dense_attention
from hdplugins.operators.sliding_window_attention.onnx_function import function_for, function_name
from hdplugins.operators.sliding_window_attention.reference import sliding_window_attention

HEADS = 2
STATES = ("query", "key", "value")


@dataclass(frozen=True, kw_only=True)
class Dense:
    """A node DenseAttention."""

    bias: bool = False

    @property
    def name(self) -> str:
        """Operator type of the node."""
        return "DenseAttention"

    @property
    def body(self) -> onnx.FunctionProto:
        """What the portable graph holds for it."""
        return function_of_arity(5 if self.bias else 4)

    @property
    def inputs(self) -> tuple[str, ...]:
        """After query, key and value."""
        return ("key_mask", "bias") if self.bias else ("key_mask",)

    @property
    def attributes(self) -> dict[str, object]:
        """Of the node, `scale` aside."""
        return {}

    def by_definition(self, states: Sequence[torch.Tensor], feeds: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """[batch, heads, tokens, head_dim]."""
        scale = states[0].shape[-1] ** -0.5
        return dense_attention(*states, feeds["key_mask"], feeds.get("bias"), scale=scale)


@dataclass(frozen=True, kw_only=True)
class Window:
    """A node SlidingWindowAttention."""

    left: int
    right: int
    dilation: tuple[int, ...] = (1,)
    bound: int = 0

    @property
    def name(self) -> str:
        """Operator type of the node."""
        return function_name(dilation=self.dilation, global_bound=self.bound)

    @property
    def body(self) -> onnx.FunctionProto:
        """What the portable graph holds for it."""
        return function_for(dilation=self.dilation, global_bound=self.bound)

    @property
    def inputs(self) -> tuple[str, ...]:
        """After query, key and value."""
        return ("token_kind",)

    @property
    def attributes(self) -> dict[str, object]:
        """Of the node, `scale` aside."""
        return {
            "left": self.left,
            "right": self.right,
            "dilation": list(self.dilation),
            "global_bound": self.bound,
        }

    def by_definition(self, states: Sequence[torch.Tensor], feeds: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """[batch, heads, tokens, head_dim]."""
        scale = states[0].shape[-1] ** -0.5
        return sliding_window_attention(*states, feeds["token_kind"], **self.attributes, scale=scale)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """A node BlockSparseAttention; `listed` is the shape of its table."""

    block: int = 8
    first: int = 1
    last: int = 1
    window: int = 1
    repeats: int = 0
    dense: int = 0
    by_row: int = 0
    listed: tuple[int, int, int] | None = None

    @property
    def name(self) -> str:
        """Operator type of the node."""
        return block_function.function_name(attributes=self.attributes, listed=self.listed is not None)

    @property
    def body(self) -> onnx.FunctionProto:
        """What the portable graph holds for it."""
        return block_function.function_for(attributes=self.attributes, listed=self.listed is not None)

    @property
    def inputs(self) -> tuple[str, ...]:
        """After query, key and value."""
        return ("token_mask", *self.constants)

    @property
    def constants(self) -> dict[str, np.ndarray]:
        """The table, [1 or heads, rows, listed], by its name."""
        if self.listed is None:
            return {}
        table = np.random.default_rng(0).integers(-1, self.listed[1] + 4, self.listed)
        return {"table_" + "x".join(map(str, self.listed)): table.astype(np.int32)}

    @property
    def attributes(self) -> dict[str, Any]:
        """Of the node, `scale` aside."""
        return {
            "block_size": self.block,
            "first_global": self.first,
            "last_global": self.last,
            "window": self.window,
            "first_repeats": self.repeats,
            "dense_tokens": self.dense,
            "ends_by_row": self.by_row,
        }

    def by_definition(self, states: Sequence[torch.Tensor], feeds: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """[batch, heads, tokens, head_dim]."""
        scale = states[0].shape[-1] ** -0.5
        tables = map(torch.from_numpy, self.constants.values())
        return block_sparse_attention(*states, feeds["token_mask"], *tables, **self.attributes, scale=scale)


def portable_graph(*layers: Blocks | Dense | Window, head_dim: int = 32, dtype: int = TensorProto.FLOAT) -> ir.Model:
    """Attentions in a chain, each taking its query from the one before; the result is the last one's, negated.

    Args:
        layers: the attentions.
        head_dim: size of a head.
        dtype: of everything between the inputs and the result, which are float32.
    """
    hidden, split = ["batch", "tokens", HEADS * head_dim], ["batch", HEADS, "tokens", head_dim]
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, hidden) for name in STATES]
    others = {name for layer in layers for name in layer.inputs}
    kinds = {"key_mask": TensorProto.BOOL, "token_kind": TensorProto.INT32, "token_mask": TensorProto.INT32}
    tables = {name: table for layer in layers if isinstance(layer, Blocks) for name, table in layer.constants.items()}
    inputs += [
        helper.make_tensor_value_info(name, kinds[name], ["batch", "tokens"]) for name in kinds if name in others
    ]
    body = [helper.make_node("Cast", [name], [f"{name}_typed"], to=dtype) for name in STATES]
    values = [helper.make_tensor_value_info(f"{name}_typed", dtype, hidden) for name in STATES]
    if "bias" in others:
        shape = ["bias_batch", HEADS, "tokens", "tokens"]
        inputs.append(helper.make_tensor_value_info("bias", TensorProto.FLOAT, shape))
    current = "query_typed"
    for number, layer in enumerate(layers):
        parts = []
        for state, source in zip(STATES, (current, "key_typed", "value_typed"), strict=True):
            name = f"{state}_{number}"
            body.append(helper.make_node("Reshape", [source, "to_heads"], [f"{name}_heads"]))
            body.append(helper.make_node("Transpose", [f"{name}_heads"], [name], perm=[0, 2, 1, 3]))
            values.append(helper.make_tensor_value_info(name, dtype, split))
            parts.append(name)
        attended, current = f"attended_{number}", f"merged_{number}"
        attributes = {**layer.attributes, "scale": head_dim**-0.5}
        body.append(helper.make_node(layer.name, [*parts, *layer.inputs], [attended], domain=ONNX_DOMAIN, **attributes))
        body.append(helper.make_node("Transpose", [attended], [f"{attended}_turned"], perm=[0, 2, 1, 3]))
        body.append(helper.make_node("Reshape", [f"{attended}_turned", "to_hidden"], [current]))
        values.append(helper.make_tensor_value_info(attended, dtype, split))
        values.append(helper.make_tensor_value_info(current, dtype, hidden))
    # As in a model, where a projection follows.
    body.append(helper.make_node("Cast", [current], ["wide"], to=TensorProto.FLOAT))
    body.append(helper.make_node("Neg", ["wide"], ["result"]))
    constants = {"to_heads": [0, 0, HEADS, head_dim], "to_hidden": [0, 0, HEADS * head_dim]}
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
    bodies = list({layer.name: layer.body for layer in layers}.values())
    return ir.serde.deserialize_model(helper.make_model(graph, opset_imports=opsets, functions=bodies, ir_version=10))


def insert_after(value: ir.Value, op_type: str) -> None:
    """Let everything that reads a value read what a new node makes of it."""
    readers = tuple(value.uses())
    changed = ir.node(op_type, [value])
    changed.outputs[0].shape, changed.outputs[0].dtype = value.shape, value.dtype
    producer = value.producer()
    assert producer is not None
    assert producer.graph is not None
    producer.graph.insert_after(producer, changed)
    for reader, index in readers:
        reader.replace_input_with(index, changed.outputs[0])


def states_of(batch: int, tokens: int, *, head_dim: int = 32) -> dict[str, np.ndarray]:
    """Query, key and value, [batch, tokens, hidden], far from a uniform softmax."""
    generator = np.random.default_rng(tokens * head_dim)
    shape = (batch, tokens, HEADS * head_dim)
    return {name: (1.5 * generator.normal(size=shape)).astype(np.float32) for name in STATES}


def answer_by_definition(layers: Sequence[Blocks | Dense | Window], feeds: Mapping[str, np.ndarray]) -> np.ndarray:
    """What `portable_graph` of these layers answers, [batch, tokens, hidden], computed in float64."""
    tensors = {name: torch.from_numpy(feed) for name, feed in feeds.items()}
    tensors |= {name: feed.double() for name, feed in tensors.items() if feed.dtype == torch.float32}
    query, *rest = (tensors[name].unflatten(-1, (HEADS, -1)).transpose(1, 2) for name in STATES)
    for layer in layers:
        query = layer.by_definition([query, *rest], tensors)
    return -query.transpose(1, 2).flatten(2).numpy()


BATCH = 3
MASKS = ("full", "right", "left", "scattered", "all padding")


def key_mask_of(kind: str, tokens: int) -> np.ndarray:
    """[batch, tokens], bool; row 0 has the padding, the others have none."""
    mask = np.ones((BATCH, tokens), bool)
    if kind == "right":
        mask[0, (tokens + 1) // 2 :] = False
    elif kind == "left":
        mask[0, : tokens // 2] = False
    elif kind == "scattered":
        mask[0] = np.random.default_rng(tokens).random(tokens) < 0.5
        mask[0, tokens // 2] = True
    elif kind == "all padding":
        mask[0] = False
    return mask


def session_of(lowered: ir.Model) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(ir.serde.serialize_model(lowered).SerializeToString(), options)
