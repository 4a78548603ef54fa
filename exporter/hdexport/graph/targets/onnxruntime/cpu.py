"""The graph that ONNX Runtime runs fastest on a CPU.

The graph computes in float32 whatever the bundle's dtype, since ONNX Runtime gains nothing from half precision on a
CPU, and reads the portable graph's weights.
"""

from __future__ import annotations

import logging
from collections import Counter

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedFunctionsPass, RemoveUnusedNodesPass

from hdexport.attention.registry import lowerings_of
from hdexport.graph.passes.graph_pass import run_passes
from hdexport.graph.passes.pool_in_blocks import PoolInBlocks
from hdexport.graph.passes.upcast_to_float32 import UpcastToFloat32
from hdexport.lowering.lowering import SharedParts
from hdexport.lowering.multi_head_attention import CONTRIB_DOMAIN
from hdexport.lowering.nodes import operator_of

logger = logging.getLogger(__name__)


def lower_for_onnxruntime_cpu(model: ir.Model) -> ir.Model:
    """Lower a portable graph in place, and return it."""
    passes = [
        PoolInBlocks(),
        UpcastToFloat32(),
        LowerAttentionToOnnxRuntime(),
        RemoveUnusedNodesPass(),
        RemoveUnusedFunctionsPass(),
    ]
    run_passes(model, passes)
    return model


class LowerAttentionToOnnxRuntime(ir.passes.InPlacePass):
    """Replace the nodes of hdexport's operators in a float32 graph as `Lowering.for_onnxruntime_cpu` says."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        parts, nodes = SharedParts(model), lowerings_of(model)
        for node, lowering in nodes:
            lowering.for_onnxruntime_cpu(node, parts)
        model.graph.opset_imports[CONTRIB_DOMAIN] = 1
        for operator, count in Counter(operator_of(node).name for node, _ in nodes).items():
            logger.info("%d nodes of %s are lowered for ONNX Runtime on a CPU", count, operator)
        return ir.passes.PassResult(model, modified=bool(nodes))
