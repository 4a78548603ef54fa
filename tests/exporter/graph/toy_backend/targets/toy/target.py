"""What the exporter asks the toy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hdexport.graph.targets.target import GraphRequest, Target
from hdruntime.bundle.manifest import GraphFile

if TYPE_CHECKING:
    import onnx_ir


class ToyTarget(Target):
    """The portable graph, its functions inlined."""

    name = "toy"
    help = "toy the graph for the toy"
    backend = "toy"
    lowerings = ("toy",)
    title = "the toy"

    def write(self, portable: onnx_ir.Model, directory: Path, request: GraphRequest) -> list[GraphFile]:
        """Functions of ONNX's interpreter know no types that loops need."""
        import onnx_ir as ir
        from onnx_ir.passes.common import InlinePass

        graph = portable.clone()
        InlinePass()(graph)
        ir.save(graph, directory / "toy.onnx")
        return [GraphFile(file="toy.onnx", lowering="toy", dtype=request.dtype)]


TARGETS = (ToyTarget(),)
