"""Dense attention as function bodies of standard ONNX operators.

Scores and softmax are float32 whatever the dtype of the inputs. The scores of all keys are materialised, so memory is
quadratic in tokens: these bodies are for runtimes without a fused attention.

The heads of queries that share a head of keys follow each other as rows of one matrix, so that no key is
repeated: reshaping [batch, heads, tokens, head_dim] to [batch, kv_heads, heads / kv_heads * tokens, head_dim] copies
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from onnx_ir import Value

from hdplugins.attention.function_bodies import FunctionBodies
from hdplugins.attention.function_parts import MASKED, bshd_body, upcast
from hdplugins.op_builder import OpBuilder, float_attribute


def function_bodies(inputs: Sequence[str], attributes: Mapping[str, Any], *, grouped: bool) -> FunctionBodies:
    """The body for nodes with these attributes; ``causal`` decides the body, which serves grouped heads too."""
    causal = bool(attributes["causal"])
    return FunctionBodies(suffix="_causal" * causal, batched=bshd_body(partial(_attended, causal=causal)))


def _attended(op: OpBuilder, query: Value, key: Value, value: Value, key_mask: Value, *, causal: bool) -> Value:
    # The query is scaled, not the scores: half-precision products then stay in range.
    scaled_query = op.Mul(query, op.CastLike(float_attribute(op, "scale"), query))
    heads_1d, key_heads_1d = (op.Shape(state, start=1, end=2) for state in (query, key))
    grouped_query = op.Reshape(scaled_query, op.Concat([0], key_heads_1d, [-1, 0], axis=0))
    scores = upcast(op, op.MatMul(grouped_query, op.Transpose(key, perm=[0, 1, 3, 2])))
    seen = mask = op.Unsqueeze(key_mask, [1, 2])
    if causal:
        tokens = op.Squeeze(op.Shape(key_mask, start=1))
        rows = op.Range(0, op.Squeeze(op.Shape(grouped_query, start=2, end=3)), 1)
        # Row r of a group is the token r modulo the tokens.
        positions = op.Unsqueeze(op.Mod(rows, tokens), [1])
        seen = op.And(mask, op.LessOrEqual(op.Range(0, tokens, 1), positions))
    weights = op.Softmax(op.Where(seen, scores, MASKED), axis=-1)
    grouped_sums = op.MatMul(op.CastLike(weights, query), value)
    sums = op.Reshape(grouped_sums, op.Concat([0], heads_1d, [-1, 0], axis=0))
    # A causal query of padding is 0, and others are 0 where there is no key.
    has_key = op.Unsqueeze(key_mask, [1, 3]) if causal else op.ReduceMax(upcast(op, mask), [3])
    return op.Mul(sums, op.CastLike(has_key, query))
