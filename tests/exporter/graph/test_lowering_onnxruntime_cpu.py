"""The CPU lowering of dense attention: fused, and by the definition for all masks, heads and lengths."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto

from hdexport.graph.lowering.onnxruntime_cpu import lower_for_onnxruntime_cpu
from support.attention_graphs import (
    BATCH,
    HEADS,
    Dense,
    answer_by_definition,
    insert_after,
    portable_graph,
    session_of,
    states_of,
)
from support.comparators import assert_close
from support.function_bodies import growth_bytes
from support.sparse_operators import PADDINGS, STATES, token_kinds


@functools.cache
def lowered_session(head_dim: int, *, bias: bool) -> onnxruntime.InferenceSession:
    return session_of(lower_for_onnxruntime_cpu(portable_graph(Dense(bias=bias), head_dim=head_dim)))


@pytest.mark.parametrize("bias_batch", [None, 1, BATCH], ids=["no bias", "shared bias", "a bias a row"])
@pytest.mark.parametrize("head_dim", [8, 32, 64])
@pytest.mark.parametrize("mask", PADDINGS)
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 127])
def test_lowered_attention_matches_the_definition(
    tokens: int, mask: str, head_dim: int, bias_batch: int | None
) -> None:
    feeds = states_of(BATCH, tokens, head_dim=head_dim) | {"key_mask": token_kinds(mask, tokens) != 0}
    if bias_batch is not None:
        shape = (bias_batch, HEADS, tokens, tokens)
        feeds["bias"] = np.random.default_rng(tokens).normal(size=shape).astype(np.float32)
    (got,) = lowered_session(head_dim, bias=bias_batch is not None).run(None, feeds)
    # Measured 4.1e-6; values reach 5.7.
    assert_close(got, answer_by_definition([Dense(bias=bias_batch is not None)], feeds), atol=5e-6)
    if mask == "all":
        assert (got[0] == 0).all()


def test_every_attention_is_fused_and_looks_at_one_mask() -> None:
    lowered = lower_for_onnxruntime_cpu(portable_graph(Dense(), Dense(), Dense()))
    operators = [node.op_type for node in lowered.graph.all_nodes()]
    assert operators.count("If") == 3
    assert operators.count("MultiHeadAttention") == 6
    assert operators.count("ReduceMin") == 1
    assert not {"DenseAttention", "Transpose", "Softmax"} & set(operators)
    assert not lowered.functions


def test_without_padding_no_mask_is_read() -> None:
    """The form without a mask is the one whose memory is linear in tokens."""
    lowered = lower_for_onnxruntime_cpu(portable_graph(Dense()))
    (choice,) = (node for node in lowered.graph if node.op_type == "If")
    (free,) = (node for node in choice.attributes["then_branch"].as_graph() if node.op_type == "MultiHeadAttention")
    assert sum(value is not None for value in free.inputs) == 3
    masked = next(iter(choice.attributes["else_branch"].as_graph()))
    assert masked.inputs[4] is not None


def test_memory_without_padding_is_linear_in_tokens(tmp_path: Path) -> None:
    """8192 tokens: the scores of a head would take 256 MiB, the states take 2 MiB."""
    path = tmp_path / "model.onnx"
    ir.save(lower_for_onnxruntime_cpu(portable_graph(Dense(), head_dim=32)), path)
    grown_bytes = growth_bytes(path, tokens=8192)
    assert grown_bytes < 64 * 1024 * 1024, f"{grown_bytes} bytes"


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_a_half_precision_graph_is_widened_and_its_original_is_not(dtype: int) -> None:
    portable = portable_graph(Dense(), dtype=dtype)
    lowered = lower_for_onnxruntime_cpu(portable.clone())
    half = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    assert not [value for node in lowered.graph.all_nodes() for value in node.outputs if value.dtype in half]
    assert all(node.outputs[0].dtype == dtype for node in portable.graph if node.op_type == "DenseAttention")
    feeds = states_of(BATCH, 65) | {"key_mask": token_kinds("left", 65) != 0}
    (got,) = session_of(lowered).run(None, feeds)
    assert_close(got, answer_by_definition([Dense()], feeds), atol=5e-6)


@pytest.mark.parametrize("mask", ["none", "holes"])
@pytest.mark.parametrize("changed", [*STATES, "attended"])
def test_what_changes_between_splitting_attention_and_merging_stays(changed: str, mask: str) -> None:
    """As rotary positions do."""
    model = portable_graph(Dense())
    node = next(node for node in model.graph if node.op_type == "DenseAttention")
    insert_after(node.outputs[0] if changed == "attended" else node.inputs[STATES.index(changed)], "Sin")
    feeds = states_of(BATCH, 37) | {"key_mask": token_kinds(mask, 37) != 0}
    exact = {name: np.sin(feed.astype(np.float64)) if name == changed else feed for name, feed in feeds.items()}
    expected = answer_by_definition([Dense()], exact)
    (got,) = session_of(lower_for_onnxruntime_cpu(model)).run(None, feeds)
    assert_close(got, np.sin(expected) if changed == "attended" else expected, atol=5e-6)


def test_nothing_is_quadratic_in_a_real_graph(tiny_bundles) -> None:
    lowered = tiny_bundles("bert").cpu_graph
    operators = [node.op_type for node in lowered.graph.all_nodes()]
    assert operators.count("MultiHeadAttention") == 4
    assert "Softmax" not in operators
    assert operators.count("Gelu") == 2
    assert operators.count("LayerNormalization") == 5
