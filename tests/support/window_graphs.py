"""Small portable graphs of `SlidingWindowAttention` nodes, without a checkpoint or a trace."""

from __future__ import annotations

__all__ = ["HEADS", "window_graph"]

import itertools
from typing import Any

import onnx
import onnx_ir as ir
from onnx import TensorProto, helper

from hdexport.graph.passes.attach_functions import attach_functions

HEADS = 2
_DTYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}


def window_graph(
    *, dtype: str, head_dim: int = 32, layers: int = 1, dense_layers: int = 0, **attributes: Any
) -> ir.Model:
    """A chain of nodes with bodies, each taking the query from the one before.

    The inputs are query, key and value, [batch, 2, tokens, head_dim], and token_kind, [batch, tokens] int32.

    Args:
        dtype: of query, key and value.
        head_dim: size of a head.
        layers: windowed nodes.
        dense_layers: nodes of dense attention behind them.
        attributes: of the windowed nodes, where they differ from a window of 16 and 4 global tokens.
    """
    state = ["batch", HEADS, "tokens", head_dim]
    inputs = [helper.make_tensor_value_info(name, _DTYPES[dtype], state) for name in ("query", "key", "value")]
    inputs.append(helper.make_tensor_value_info("token_kind", TensorProto.INT32, ["batch", "tokens"]))
    own = {"left": 16, "right": 16, "dilation": [1], "global_bound": 4, "scale": head_dim**-0.5, **attributes}
    names = ["query", *(f"attended_{layer}" for layer in range(layers + dense_layers))]
    nodes = [helper.make_node("Cast", ["token_kind"], ["key_mask"], to=TensorProto.BOOL)]
    for layer, (before, after) in enumerate(itertools.pairwise(names)):
        mask, operator, given = (
            ("token_kind", "SlidingWindowAttention", own)
            if layer < layers
            else ("key_mask", "DenseAttention", {"scale": head_dim**-0.5})
        )
        nodes.append(helper.make_node(operator, [before, "key", "value", mask], [after], domain="hdexport", **given))
    states = [helper.make_tensor_value_info(name, _DTYPES[dtype], state) for name in names[1:]]
    model = helper.make_model(
        helper.make_graph(nodes, "windows", inputs, states[-1:], value_info=states[:-1]),
        opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid("hdexport", 1)],
        ir_version=10,
    )
    portable = ir.serde.deserialize_model(model)
    attach_functions(portable)
    onnx.checker.check_model(ir.serde.serialize_model(portable))
    return portable
