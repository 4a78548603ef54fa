"""The graph that ONNX Runtime runs fastest on a CPU.

The graph computes in float32 whatever the bundle's dtype, because ONNX Runtime gains nothing from half precision on a
CPU, and reads the portable graph's weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hdexport.attention.registry import lowerings_of
from hdexport.graph.passes.pool_in_blocks import pool_in_blocks
from hdexport.graph.passes.widen_to_float32 import widen_to_float32
from hdexport.lowering.lowering import SharedParts
from hdexport.lowering.multi_head_attention import CONTRIB_DOMAIN

if TYPE_CHECKING:
    import onnx_ir


def lower_for_onnxruntime_cpu(model: onnx_ir.Model) -> onnx_ir.Model:
    """Lower a portable graph, which is changed and returned: hand in a copy."""
    from onnx_ir.passes.common import RemoveUnusedFunctionsPass, RemoveUnusedNodesPass

    pool_in_blocks(model)
    widen_to_float32(model)
    parts = SharedParts(model)
    for node, lowering in lowerings_of(model):
        lowering.for_onnxruntime_cpu(node, parts)
    model.graph.opset_imports[CONTRIB_DOMAIN] = 1
    RemoveUnusedNodesPass()(model)
    RemoveUnusedFunctionsPass()(model)
    return model
