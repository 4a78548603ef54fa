"""What the function bodies of operators share: attention, and their making of ONNX text."""

from __future__ import annotations

__all__ = ["attention", "function", "heads_and_tokens", "nodes_of"]

from collections.abc import Sequence

import onnx
import onnx.helper
import onnx.parser

from hdplugins.constants import ONNX_DOMAIN, ONNX_OPSET
from hdplugins.operators.operator import Operator


def attention(query: str, keys: str, values: str, bias: str, sums: str, *, axes: int, scaled: bool = False) -> str:
    """Text of attention over the last two of that number of axes.

    Args:
        query: name of the queries, [..., queries, head_dim].
        keys: of the keys, [..., keys, head_dim].
        values: of the values, like the keys.
        bias: of what is added to the scores, float32, broadcast to [..., queries, keys].
        sums: of the result, like the queries; other values that the text makes begin with it.
        axes: how many axes they have.
        scaled: whether the queries are scaled; else `typed_scale` is their factor.
    """
    perm = [*range(axes - 2), axes - 1, axes - 2]
    scaling = f"{sums}_query = {'Identity' if scaled else 'Mul'} ({query}{'' if scaled else ', typed_scale'})"
    return f"""
    {scaling}
    {sums}_keys = Transpose <perm = {perm}> ({keys})
    {sums}_products = MatMul ({sums}_query, {sums}_keys)
    {sums}_scores = Cast <to = 1> ({sums}_products)
    {sums}_biased = Add ({sums}_scores, {bias})
    {sums}_weights = Softmax <axis = -1> ({sums}_biased)
    {sums}_typed = CastLike ({sums}_weights, {values})
    {sums} = MatMul ({sums}_typed, {values})
"""


def heads_and_tokens(source: str, result: str, *, swapped: bool) -> str:
    """Text that makes `result` of `source`, [..., head_dim], its axes 1 and 2 swapped or as they are."""
    return f"{result} = {'Transpose <perm = [0, 2, 1, 3]>' if swapped else 'Identity'} ({source})\n"


def function(operator: Operator, nodes: Sequence[onnx.NodeProto], *, suffix: str, inputs: int) -> onnx.FunctionProto:
    """The body of an operator's nodes that have that number of inputs, under the operator's name and a suffix."""
    return onnx.helper.make_function(
        ONNX_DOMAIN,
        operator.name + suffix,
        operator.inputs[:inputs],
        ["attended"],
        nodes,
        [onnx.helper.make_opsetid("", ONNX_OPSET)],
        operator.attributes,
    )


def nodes_of(text: str, *, inputs: Sequence[str], attributes: Sequence[str]) -> list[onnx.NodeProto]:
    """The nodes of a part of a function's body.

    Args:
        text: nodes in ONNX's textual syntax; what they read may be made by other parts.
        inputs: names of the function's inputs.
        attributes: names of its attributes.
    """
    signature = f"part <{', '.join(attributes)}> ({', '.join(inputs)}) => (none)"
    opening = f'<domain: "{ONNX_DOMAIN}", opset_import: ["" : {ONNX_OPSET}]>'
    return list(onnx.parser.parse_function(f"{opening} {signature} {{ {text} }}").node)
