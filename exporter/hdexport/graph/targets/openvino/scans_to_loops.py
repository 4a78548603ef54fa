"""Turn ``Scan`` into ``Loop``: OpenVINO takes outer values that a Scan's body reads for states, and refuses it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir


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
