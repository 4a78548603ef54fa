"""The files of a bundle's graphs for OpenVINO."""

from __future__ import annotations

__all__ = ["write_openvino_graphs"]

from pathlib import Path
from typing import TYPE_CHECKING

from hdexport.graph.lowering.openvino import lower_for_openvino
from hdruntime.bundle.manifest import GraphFile, Lowering
from hdruntime.constants import OPENVINO_LOWERING, OPENVINO_UNPADDED_LOWERING

if TYPE_CHECKING:
    import onnx_ir


def write_openvino_graphs(portable: onnx_ir.Model, directory: Path) -> list[GraphFile]:
    """Write the graph for any batch, and the one for batches without padding where it differs.

    Args:
        portable: the bundle's portable graph, whose weights they share; it stays as it is.
        directory: of the bundle.
    """
    import onnx_ir as ir

    differs = lower_for_openvino(for_any := portable.clone(), padded=True)
    graphs: dict[Lowering, onnx_ir.Model] = {OPENVINO_LOWERING: for_any}
    if differs:
        lower_for_openvino(unpadded := portable.clone(), padded=False)
        graphs[OPENVINO_UNPADDED_LOWERING] = unpadded
    for lowering, graph in graphs.items():
        ir.save(graph, directory / f"{lowering}.onnx")
    return [GraphFile(file=f"{lowering}.onnx", lowering=lowering, dtype="float32") for lowering in graphs]
