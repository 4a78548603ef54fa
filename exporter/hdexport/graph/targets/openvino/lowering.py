"""The graphs that OpenVINO runs fastest on a CPU.

OpenVINO knows neither our domain nor functions, so that nothing of either is left: some attentions have forms that
OpenVINO fuses, the others their parallel bodies, inlined. OpenVINO reads no Scan whose body reads from around it; the
Scans of the bodies become loops. The graphs compute in float32, whatever the bundle's dtype: OpenVINO chooses the
precision when it loads them. The graphs read the portable graph's weights.

In half precision, OpenVINO rounds whatever is a float, so what counts tokens must be an integer: see
`hdruntime.backends.openvino.devices.needs_float32` for the one operator that counts in floats.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hdexport.attention.kinds import lowering_of
from hdexport.graph.passes.pool_in_blocks import pool_in_blocks
from hdexport.graph.passes.widen_to_float32 import widen_to_float32
from hdexport.graph.targets.openvino.scans_to_loops import scans_to_loops
from hdexport.lowering.lowering import SharedParts
from hdexport.lowering.nodes import operator_nodes
from hdexport.lowering.openvino_functions import OPSET

if TYPE_CHECKING:
    import onnx_ir


def lower_for_openvino(model: onnx_ir.Model, *, padded: bool) -> bool:
    """Lower a copy of a portable graph in place; returns whether `padded` makes a difference to it.

    Without `padded`, no batch has padding, and dense attention needs no mask.
    """
    from onnx_ir.passes.common import InlinePass, RemoveUnusedNodesPass

    pool_in_blocks(model)
    widen_to_float32(model)
    parts = SharedParts(model, padded=padded)
    differs = [lowering_of(node).for_openvino(node, parts) for node in operator_nodes(model)]
    # The bodies' operators mean the same in each opset from theirs on, and a graph has one.
    for function in model.functions.values():
        function.opset_imports[""] = OPSET
    model.graph.opset_imports[""] = OPSET
    InlinePass()(model)
    assert not operator_nodes(model)
    model.functions.clear()
    scans_to_loops(model)
    RemoveUnusedNodesPass()(model)
    return any(differs)
