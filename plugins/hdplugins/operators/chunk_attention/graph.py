"""Chunk attention as function bodies of standard ONNX operators, with memory linear in tokens.

Each chunk of queries meets the chunks that it sees, joined into one span of keys: scores are [..., chunk, span], never
[tokens, tokens].

The chunks come in two orders. In parallel they are one batch of products, which TensorRT fuses. Sequentially they are a
Scan, a few chunks of one text per step, whose scores fit in a CPU's cache at any batch size. CPU milliseconds and
megabytes of growth on one core of an Intel Xeon, 12 heads of 64, chunks of 64 that see one before; beside it Hugging
Face's module in PyTorch, without its projections, called in turn:

======  ==========  ============
tokens  sequential  Hugging Face
======  ==========  ============
4096    30 (26)     76 (123)
8192    60 (83)     256 (285)
16384   115 (164)   596 (420)
======  ==========  ============

Everything but query, key and value comes from `token_mask`, not from their shapes: ONNX Runtime sees then that all
layers of a model need the same tables, and in parallel computes them once.
"""

from __future__ import annotations

__all__ = ["function_of_node"]

from collections.abc import Mapping
from typing import Any

import onnx

from hdplugins.operators.chunk_attention import OPERATOR
from hdplugins.operators.chunk_attention.neighbours import check_chunks
from hdplugins.operators.chunk_attention.onnx_tables import tables
from hdplugins.operators.onnx_text import attention, function, heads_and_tokens, nodes_of
from hdplugins.operators.operator import BlockOrder

_NAME, _INPUTS = OPERATOR.name, OPERATOR.inputs

_STEP_TOKENS = 64
"""Queries of a sequential step, of each head."""


def function_of_node(
    *,
    inputs: int,
    attributes: Mapping[str, Any],
    order: BlockOrder = BlockOrder.PARALLEL,
    tokens_first: bool = False,
) -> onnx.FunctionProto:
    """The body for a node of the portable graph, and for others of that name.

    Bodies that differ need names that differ: TensorRT-RTX 1.7.1 gives every node of one name the same body.

    Args:
        inputs: of the node; 4.
        attributes: of the node; all but ``scale`` decide the body.
        order: of the chunks.
        tokens_first: the function takes and returns [batch, tokens, heads, head_dim], which is not the operator; its
            name says so. In sequence only.

    Raises:
        ValueError: another number of inputs, or attributes that define nothing.
    """
    if inputs != len(_INPUTS):
        raise ValueError(f"{_NAME} has {len(_INPUTS)} inputs, not {inputs}.")
    chunks = {name: attributes[name] for name in ("chunk", "before", "after", "multiple")}
    check_chunks(**chunks, causal=attributes["causal"])
    causal = bool(attributes["causal"])
    text = tables(**chunks)
    if order is BlockOrder.PARALLEL:
        assert not tokens_first
        text += _parallel(causal=causal)
    else:
        text += _sequential(chunks["chunk"], causal=causal, tokens_first=tokens_first)
    suffix = "_chunk{chunk}_before{before}_after{after}_of{multiple}".format(**chunks) + "_causal" * causal
    nodes = nodes_of(text, inputs=_INPUTS, attributes=OPERATOR.attributes)
    return function(OPERATOR, nodes, suffix=suffix + "_tokensfirst" * tokens_first, inputs=inputs)


def _parallel(*, causal: bool) -> str:
    text = _PLACES + _PARALLEL_BIAS + (_CAUSAL if causal else "bias = Identity (key_bias)\n")
    text += "".join(_CHUNKED.format(state=state) for state in ("query", "key", "value"))
    text += "".join(_SEEN.format(state=state) for state in ("key", "value"))
    return text + attention("query_chunks", "seen_key", "seen_value", "bias", "sums", axes=5) + _DROP_PADDING


def _sequential(chunk: int, *, causal: bool, tokens_first: bool) -> str:
    text = "".join(
        heads_and_tokens(state, f"token_{state}", swapped=not tokens_first) for state in OPERATOR.state_names
    )
    text += _PLACES + _STEPS.format(group=max(_STEP_TOKENS // chunk, 1))
    text += _SCAN_STEPS.format(
        bias=_CAUSAL if causal else "bias = Identity (key_bias)\n",
        attention=attention("block_query", "block_key", "block_value", "bias", "sums", axes=4),
    )
    return text + heads_and_tokens("rows", "attended", swapped=not tokens_first)


_PLACES = """
    typed_scale = CastLike (scale, query)
    seen = Squeeze (seen_chunks, zero_1d)
    chunks_shape = Concat <axis = 0> (any_number, chunk_1d)
    query_chunk_places = Reshape (places, chunks_shape)
    seen_places_of_chunks = Gather <axis = 0> (query_chunk_places, seen)
    spans_shape = Constant <value_ints = [0, -1]> ()
    key_chunk_places = Reshape (seen_places_of_chunks, spans_shape)
"""

# `key_bias` is [batch, 1, chunks, 1, span], and query_places and key_places broadcast to it.
_PARALLEL_BIAS = """
    axis_before_last = Constant <value_ints = [-2]> ()
    query_places = Identity (query_chunk_places)
    key_places = Identity (key_chunk_places)
    span_bias = Gather <axis = 1> (padded_bias, key_chunk_places)
    bias_axes = Constant <value_ints = [1, 3]> ()
    key_bias = Unsqueeze (span_bias, bias_axes)
"""

_CAUSAL = """
    query_column = Unsqueeze (query_places, last_axis)
    key_row = Unsqueeze (key_places, axis_before_last)
    is_behind = Greater (key_row, query_column)
    bias = Where (is_behind, masked_score, key_bias)
"""

_CHUNKED = """
    {state}_dim = Shape <start = 3, end = 4> ({state})
    {state}_before = Constant <value_ints = [0, 0, 0, 0, 0, 0]> ()
    {state}_padding = Concat <axis = 0> ({state}_before, missing_1d, zero_1d)
    padded_{state} = Pad ({state}, {state}_padding)
    {state}_chunks_shape = Concat <axis = 0> (zero_1d, zero_1d, any_number, chunk_1d, {state}_dim)
    {state}_chunks = Reshape (padded_{state}, {state}_chunks_shape)
"""

_SEEN = """
    seen_{state}_chunks = Gather <axis = 2> ({state}_chunks, seen)
    seen_{state}_shape = Concat <axis = 0> (zero_1d, zero_1d, zero_1d, any_number, {state}_dim)
    seen_{state} = Reshape (seen_{state}_chunks, seen_{state}_shape)
"""

# Where, not a product: the sums of padded queries may be anything.
_DROP_PADDING = """
    rows_shape = Concat <axis = 0> (zero_1d, zero_1d, any_number, query_dim)
    rows_and_more = Reshape (sums, rows_shape)
    rows = Slice (rows_and_more, zero_1d, tokens_1d, two_1d)
    real_axes = Constant <value_ints = [1, 3]> ()
    real_rows = Unsqueeze (real, real_axes)
    nothing = CastLike (seen_score, query)
    attended = Where (real_rows, rows, nothing)
"""

# A step is a group of chunks of a text; the last chunk fills the last group up. Rows of all heads of all tokens of all
# texts are numbered through, in that order from the inside.
_STEPS = """
    axis_before_last = Constant <value_ints = [-2]> ()
    both_last_axes = Constant <value_ints = [-2, -1]> ()
    batch = Gather (mask_shape, zero)
    heads_1d = Shape <start = 2, end = 3> (token_query)
    num_heads = Squeeze (heads_1d)
    head_range = Range (zero, num_heads, one)
    head_numbers = Unsqueeze (head_range, both_axes)
    head_dim_1d = Shape <start = 3, end = 4> (token_query)
    all_rows_shape = Concat <axis = 0> (any_number, head_dim_1d)
    all_queries = Reshape (token_query, all_rows_shape)
    all_keys = Reshape (token_key, all_rows_shape)
    all_values = Reshape (token_value, all_rows_shape)
    text_rows = Mul (tokens, num_heads)
    largest_group = Constant <value_int = {group}> ()
    group = Min (largest_group, chunks)
    group_1d = Unsqueeze (group, zero_1d)
    last_chunk = Sub (chunks, one)
    last_group = Div (last_chunk, group)
    num_groups = Add (last_group, one)
    grouped_chunks = Mul (num_groups, group)
    grouped_range = Range (zero, grouped_chunks, one)
    grouped_numbers = Min (grouped_range, last_chunk)
    grouped_query_places = Gather <axis = 0> (query_chunk_places, grouped_numbers)
    grouped_key_places = Gather <axis = 0> (key_chunk_places, grouped_numbers)
    query_size = Shape <start = 1, end = 2> (query_chunk_places)
    key_size = Shape <start = 1, end = 2> (key_chunk_places)
    query_groups_shape = Concat <axis = 0> (any_number, group_1d, query_size)
    key_groups_shape = Concat <axis = 0> (any_number, group_1d, key_size)
    query_groups = Reshape (grouped_query_places, query_groups_shape)
    key_groups = Reshape (grouped_key_places, key_groups_shape)
    num_steps = Mul (batch, num_groups)
    step_numbers = Range (zero, num_steps, one)
    step_texts = Div (step_numbers, num_groups)
    text_steps = Mul (step_texts, num_groups)
    step_groups = Sub (step_numbers, text_steps)
"""

_SCAN_STEPS = """
    scanned_rows = Scan <num_scan_inputs = 2, body = attend (int64 text, int64 place) => (
        float[group, chunk, heads, head_dim] wide_rows
    ) {{
        query_places = Gather <axis = 0> (query_groups, place)
        key_places = Gather <axis = 0> (key_groups, place)
        text_bias = Gather <axis = 0> (padded_bias, text)
        span_bias = Gather <axis = 0> (text_bias, key_places)
        key_bias = Unsqueeze (span_bias, axis_before_last)
        {bias}
        first_row = Mul (text, text_rows)
        head_starts = Add (head_numbers, first_row)
        queries_in_text = Min (query_places, last_token)
        keys_in_text = Min (key_places, last_token)
        query_offsets = Mul (queries_in_text, num_heads)
        key_offsets = Mul (keys_in_text, num_heads)
        query_rows = Add (head_starts, query_offsets)
        key_rows = Add (head_starts, key_offsets)
        block_query = Gather <axis = 0> (all_queries, query_rows)
        block_key = Gather <axis = 0> (all_keys, key_rows)
        block_value = Gather <axis = 0> (all_values, key_rows)
        {attention}
        turned_sums = Transpose <perm = [1, 2, 0, 3]> (sums)
        query_bias = Gather <axis = 0> (text_bias, query_places)
        is_real = Equal (query_bias, seen_score)
        real_column = Unsqueeze (is_real, both_last_axes)
        nothing = CastLike (seen_score, query)
        real_sums = Where (real_column, turned_sums, nothing)
        wide_rows = Cast <to = 1> (real_sums)
    }}> (step_texts, step_groups)
    typed_rows = CastLike (scanned_rows, query)
    all_tokens_shape = Concat <axis = 0> (batch_1d, any_number, heads_1d, head_dim_1d)
    rows_and_more = Reshape (typed_rows, all_tokens_shape)
    rows = Slice (rows_and_more, zero_1d, tokens_1d, one_1d)
"""
