"""Functions of standard operators that lowerings write as ONNX text; they are inlined in the end."""

from __future__ import annotations

__all__ = ["DOMAIN", "OPSET", "SharedTables", "add_function"]

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir

    from hdexport.lowering.multi_head_attention import Insertion

DOMAIN = "hdexport.openvino"
"""Of these functions, which are no operators of ours."""

OPSET = 24
"""Of the operator ``Attention``, which OpenVINO fuses."""


def add_function(model: onnx_ir.Model, text: str) -> None:
    """Give a graph a function of that opset.

    Args:
        model: the graph; its other functions may be of another opset until all are inlined.
        text: name, attributes, inputs, outputs and body, in ONNX's textual syntax.
    """
    import onnx
    import onnx_ir as ir

    header = f'<domain: "{DOMAIN}", opset_import: ["" : {OPSET}, "{DOMAIN}" : 1]>'
    function = ir.serde.deserialize_function(onnx.parser.parse_function(header + text))
    model.functions[function.identifier()] = function


@dataclass
class SharedTables:
    """The tables that layers alike share: nodes of the graph, made where the first layer needs them."""

    model: onnx_ir.Model
    _made: dict[tuple[object, ...], Sequence[onnx_ir.Value]] = field(default_factory=dict)
    _real: dict[onnx_ir.Value, onnx_ir.Value] = field(default_factory=dict)

    def of(
        self,
        insertion: Insertion,
        text: str,
        inputs: Sequence[onnx_ir.Value],
        *,
        outputs: int,
        attributes: Mapping[str, int] | None = None,
    ) -> Sequence[onnx_ir.Value]:
        """The outputs of a function, which is called once for the same inputs and attributes.

        Args:
            insertion: before the layer that needs them.
            text: the function, which begins with its name; another text needs another name.
            inputs: of the function.
            outputs: how many it has.
            attributes: of the function.
        """
        import onnx_ir as ir

        attributes = attributes or {}
        wanted = (text, *inputs, *attributes.items())
        if wanted not in self._made:
            add_function(self.model, text)
            name = text.split(maxsplit=1)[0]
            node = ir.node(name, inputs, attributes=attributes, domain=DOMAIN, num_outputs=outputs)
            insertion.insert(node)
            self._made[wanted] = tuple(node.outputs)
        return self._made[wanted]

    def real(self, insertion: Insertion, token_kind: onnx_ir.Value) -> onnx_ir.Value:
        """[batch, tokens, 1, 1], float32, 0 for padding."""
        import onnx_ir as ir

        if token_kind not in self._real:
            kinds = insertion.op("Cast", [token_kind], {"to": int(ir.DataType.BOOL)})
            numbers = insertion.op("Cast", [kinds], {"to": int(ir.DataType.FLOAT)})
            self._real[token_kind] = insertion.op("Unsqueeze", [numbers, insertion.integers([2, 3])])
        return self._real[token_kind]
