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

from hdexport.attention.registry import lowerings_of
from hdexport.graph.passes.pool_in_blocks import pool_in_blocks
from hdexport.graph.passes.widen_to_float32 import widen_to_float32
from hdexport.lowering.lowering import SharedParts
from hdexport.lowering.nodes import operator_nodes
from hdexport.lowering.openvino_functions import OPSET, OpenVinoLowering

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
    forms = [(node, form) for node, form in lowerings_of(model) if isinstance(form, OpenVinoLowering)]
    differs = [form.for_openvino(node, parts) for node, form in forms]
    # The bodies' operators mean the same in each opset from theirs on, and a graph has one.
    for function in model.functions.values():
        function.opset_imports[""] = OPSET
    model.graph.opset_imports[""] = OPSET
    InlinePass()(model)
    _name_types_of_constants(model)
    assert not operator_nodes(model)
    model.functions.clear()
    scans_to_loops(model)
    RemoveUnusedNodesPass()(model)
    return any(differs)


def _name_types_of_constants(model: onnx_ir.Model) -> None:
    """Make the constants of inlined attributes float32 tensors: tools that fold constants make doubles of them."""
    import onnx_ir as ir

    for node in model.graph.all_nodes():
        if node.op_type == "Constant" and "value_float" in node.attributes:
            value = ir.tensor(node.attributes.pop("value_float").as_float(), ir.DataType.FLOAT)
            node.attributes["value"] = ir.AttrTensor("value", value)


def scans_to_loops(model: onnx_ir.Model) -> int:
    """Replace every Scan of a graph, also within branches and loops but not in bodies of functions, in place; returns
    how many.

    A loop's body gathers its element of each sequence by its number. Sequences are read along axis 0, forwards.
    """
    scans = [node for node in model.graph.all_nodes() if node.op_type == "Scan" and not node.domain]
    for number, scan in enumerate(scans):
        _replace(scan, name=f"loop_{number}")
    return len(scans)


def _replace(scan: onnx_ir.Node, *, name: str) -> None:
    import onnx_ir as ir

    assert set(scan.attributes) == {"body", "num_scan_inputs"}, "axes and directions are the default ones"
    graph = scan.graph
    assert graph is not None
    body = scan.attributes.pop("body").as_graph()
    states = len(scan.inputs) - scan.attributes["num_scan_inputs"].as_int()
    number = ir.Value(name=f"{name}_number", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([]))
    goes_on = ir.Value(name=f"{name}_goes_on", type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([]))

    first, elements = body[0], list(body.inputs)[states:]
    for element, sequence in zip(elements, list(scan.inputs)[states:], strict=True):
        gather = ir.node("Gather", [sequence, number], attributes={"axis": 0})
        gathered = gather.outputs[0]
        gathered.name, gathered.type, gathered.shape = element.name, element.type, element.shape
        body.insert_before(first, gather)
        ir.convenience.replace_all_uses_with(element, gathered)
    body.inputs[:] = [number, goes_on, *list(body.inputs)[:states]]
    goes_on_still = ir.node("Identity", [goes_on])
    body.append(goes_on_still)
    still = goes_on_still.outputs[0]
    still.name, still.type, still.shape = f"{name}_goes_on_still", goes_on.type, goes_on.shape
    body.outputs[:] = [still, *body.outputs]

    length = ir.node("Shape", [scan.inputs[states]], attributes={"start": 0, "end": 1})
    trips = ir.node("Squeeze", [length.outputs[0]])
    inputs = [trips.outputs[0], None, *list(scan.inputs)[:states]]
    loop = ir.node("Loop", inputs, attributes={"body": body}, num_outputs=len(scan.outputs))
    for before, after in zip(scan.outputs, loop.outputs, strict=True):
        after.type, after.shape = before.type, before.shape
    graph.insert_before(scan, [length, trips, loop])
    # A body may end with a result of its Scan.
    ir.convenience.replace_all_uses_with(scan.outputs, loop.outputs, replace_graph_outputs=True)
    graph.remove(scan, safe=True)
