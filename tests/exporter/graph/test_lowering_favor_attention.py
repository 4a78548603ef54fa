"""FAVOR+ as ONNX Runtime computes it on a CPU: one head of one text after another, in float32."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from dataclasses import replace

import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto

from hdexport.graph.targets.onnxruntime.cpu import lower_for_onnxruntime_cpu
from hdplugins.attention.favor.onnx_functions import CHUNK_TOKENS
from support.attention_graphs import BATCH, answer_by_definition, portable_graph, session_of, states_of
from support.attention_layers import PADDINGS, token_kinds
from support.comparators import assert_close, named_case
from support.operators.favor import Favor

NODES = (Favor(), Favor(compat=1), Favor(features=7, epsilon=1e-6))
ATOL = 2e-5
"""Measured 6e-6; values reach 5.5."""


@functools.cache
def lowered_session(*nodes: Favor) -> onnxruntime.InferenceSession:
    return session_of(lower_for_onnxruntime_cpu(portable_graph(*nodes)))


def assert_right(session: onnxruntime.InferenceSession, padding: str, tokens: int, batch: int, *nodes: Favor) -> None:
    feeds = {**states_of(batch, tokens), "key_mask": token_kinds(padding, tokens, batch=batch) != 0}
    for name in ("query", "key"):
        feeds[name] *= 0.4
    (got,) = session.run(None, feeds)
    assert_close(got, answer_by_definition(nodes, feeds), atol=ATOL)


@pytest.mark.parametrize("node", NODES, ids=str)
def test_lowered_attention_matches_the_definition_at_every_length(node: Favor) -> None:
    paddings, batches = itertools.cycle(PADDINGS), itertools.cycle((BATCH, 1, BATCH))
    for tokens in (1, 2, 5, CHUNK_TOKENS - 1, CHUNK_TOKENS, CHUNK_TOKENS + 1, 2 * CHUNK_TOKENS + 1):
        for padding, batch in zip(itertools.islice(paddings, 2), batches, strict=False):
            with named_case(tokens, padding, batch):
                assert_right(lowered_session(node), padding, tokens, batch, node)


@pytest.mark.parametrize("dtype", ["FLOAT16", "BFLOAT16"])
def test_a_half_precision_graph_is_computed_in_float32(dtype: str) -> None:
    lowered = lower_for_onnxruntime_cpu(portable_graph(NODES[0], dtype=getattr(TensorProto, dtype)))
    half = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    assert not [value for inner in lowered.graph.all_nodes() for value in inner.outputs if value.dtype in half]
    assert_right(session_of(lowered), "right", 131, BATCH, NODES[0])


def test_layers_that_differ_share_a_graph_that_swaps_nothing() -> None:
    """States are read as projections leave them; one body for layers alike."""
    nodes = (NODES[0], NODES[1], replace(NODES[0], epsilon=0.01))
    lowered = lower_for_onnxruntime_cpu(portable_graph(*nodes))
    assert Counter(node.op_type for node in lowered.graph)["Transpose"] == 0
    assert sorted(function.name for function in lowered.functions.values()) == [
        "FavorAttention",
        "FavorAttention_compat",
    ]
    assert_right(session_of(lowered), "right", 131, BATCH, *nodes)
