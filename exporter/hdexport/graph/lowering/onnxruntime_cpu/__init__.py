"""The graph that ONNX Runtime runs fastest on a CPU.

It computes in float32 whatever the bundle's dtype, because ONNX Runtime gains nothing from half precision on a CPU, and
reads the portable graph's weights. One module lowers one operator.
"""

from __future__ import annotations

__all__ = ["FUSED_DTYPES", "FUSED_FOR_SHORT_TEXTS", "lower_for_onnxruntime_cpu"]

from typing import TYPE_CHECKING

from hdexport.graph.lowering.multi_head_attention import CONTRIB_DOMAIN
from hdexport.graph.lowering.onnxruntime_cpu.block_sparse_attention import lower_block_sparse_attention
from hdexport.graph.lowering.onnxruntime_cpu.clipped_distance_attention import lower_clipped_distance_attention
from hdexport.graph.lowering.onnxruntime_cpu.dense_attention import lower_dense_attention
from hdexport.graph.lowering.onnxruntime_cpu.sequential_bodies import use_sequential_bodies
from hdexport.graph.lowering.onnxruntime_cpu.sliding_window_attention import lower_sliding_window_attention
from hdexport.graph.passes.pool_in_blocks import pool_in_blocks
from hdexport.graph.passes.widen_to_float32 import widen_to_float32

if TYPE_CHECKING:
    import onnx_ir

FUSED_DTYPES: dict[str, tuple[str, ...]] = {"DenseAttention": ("float32",)}
"""Operator -> dtypes in which this lowering computes it with a fused kernel; a half-precision graph is widened.

Not sparse attention: short texts may take the fused kernel there too, but what it is for are the others.
"""

FUSED_FOR_SHORT_TEXTS = ("BlockSparseAttention", "ClippedDistanceAttention", "SlidingWindowAttention")
"""Operators whose short texts do."""

_SEQUENTIAL = (
    "ChunkAttention",
    "DisentangledAttention",
    "FavorAttention",
    "LSHAttention",
    "LocalGlobalAttention",
    "RelativeAttention",
)
"""Operators that are their sequential bodies, whatever the length of a text."""


def lower_for_onnxruntime_cpu(model: onnx_ir.Model) -> onnx_ir.Model:
    """Lower a portable graph.

    Args:
        model: the portable graph; it is changed and returned, so hand in a copy.
    """
    from onnx_ir.passes.common import RemoveUnusedFunctionsPass, RemoveUnusedNodesPass

    pool_in_blocks(model)
    widen_to_float32(model)
    lower_dense_attention(model)
    lower_clipped_distance_attention(model)
    lower_sliding_window_attention(model)
    lower_block_sparse_attention(model)
    for operator in _SEQUENTIAL:
        use_sequential_bodies(model, operator)
    model.graph.opset_imports[CONTRIB_DOMAIN] = 1
    RemoveUnusedNodesPass()(model)
    RemoveUnusedFunctionsPass()(model)
    return model
