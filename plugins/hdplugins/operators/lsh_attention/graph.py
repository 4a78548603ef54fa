"""LSH attention as function bodies of standard ONNX operators, with memory linear in tokens.

Tokens are hashed and sorted, and each chunk of sorted tokens meets the chunks that it sees: scores are [..., chunk,
span], never [tokens, tokens]. Rows of queries, keys and values are gathered from where they are by the sorted places,
and the results of all rounds likewise by the places' ranks. Hashes, sums and weights are float32 whatever the dtype.

The chunks come in two orders. In parallel those of all rounds, heads and texts are one batch of products, which
TensorRT fuses, and the sort counts: TensorRT's TopK takes 3840 numbers at most. Sequentially one head of one text
follows the other in a Scan, and in it groups of chunks whose scores fit in a CPU's cache; the sort is a TopK of all
tokens, which ONNX Runtime takes at any length. CPU milliseconds and megabytes of growth on one core of an Intel Xeon,
12 heads of 64, chunks of 64 that see one before, 16 x 32 buckets; beside it Hugging Face's module in PyTorch, without
its projections, called in turn:

======  ======  ==========  ============
tokens  rounds  sequential  Hugging Face
======  ======  ==========  ============
4096    1       57 (28)     136 (232)
4096    4       181 (53)    962 (643)
16384   1       272 (185)   1021 (623)
16384   2       480 (198)   2107 (1163)
16384   4       923 (277)   4060 (2303)
======  ======  ==========  ============

A quarter of the sequential time are the two products, a twelfth is the sort.

What a body sorts by is a value `sorting` of it, or of its Scan, by which verification reads a graph's hashes.

Everything but the states comes from `token_mask`, not from their shapes: ONNX Runtime sees then that all layers of a
model need the same tables, and in parallel computes them once.
"""

from __future__ import annotations

__all__ = ["function_of_node"]

from collections.abc import Mapping
from typing import Any

import onnx

from hdplugins.operators.chunk_attention.neighbours import check_chunks
from hdplugins.operators.chunk_attention.onnx_tables import tables
from hdplugins.operators.lsh_attention import OPERATOR
from hdplugins.operators.lsh_attention.hashing import check_buckets
from hdplugins.operators.lsh_attention.onnx_parallel import parallel
from hdplugins.operators.lsh_attention.onnx_sequential import sequential
from hdplugins.operators.onnx_text import function, nodes_of
from hdplugins.operators.operator import BlockOrder

_NAME, _INPUTS = OPERATOR.name, OPERATOR.inputs


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
    causal, by_row = bool(attributes["causal"]), bool(attributes["ends_by_row"])
    buckets, rounds = attributes["buckets"], attributes["rounds"]
    check_chunks(**chunks, causal=attributes["causal"])
    check_buckets(buckets, rounds)
    text = tables(**chunks, rounds=rounds, by_row=by_row)
    if order is BlockOrder.PARALLEL:
        assert not tokens_first
        text += parallel(chunk=chunks["chunk"], buckets=buckets, rounds=rounds, causal=causal)
    else:
        seen = chunks["before"] + 1 + chunks["after"]
        text += sequential(
            chunk=chunks["chunk"], seen=seen, buckets=buckets, rounds=rounds, causal=causal, tokens_first=tokens_first
        )
    suffix = "_chunk{chunk}_before{before}_after{after}_of{multiple}".format(**chunks)
    suffix += f"_rounds{rounds}_buckets{'x'.join(map(str, buckets))}" + "_causal" * causal + "_byrow" * by_row
    nodes = nodes_of(text, inputs=_INPUTS, attributes=OPERATOR.attributes)
    return function(OPERATOR, nodes, suffix=suffix + "_tokensfirst" * tokens_first, inputs=inputs)
