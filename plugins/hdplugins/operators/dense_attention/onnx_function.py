"""Dense attention as a function body of standard ONNX operators.

Scores and softmax are float32 whatever the dtype of the inputs. The scores of all keys are materialised, so memory is
quadratic in tokens: this body is for runtimes without a fused attention.
"""

from __future__ import annotations

__all__ = ["function_of_node"]

from collections.abc import Mapping

import onnx
import onnx.parser

from hdplugins.constants import ONNX_DOMAIN, ONNX_OPSET

# The masked score is finite, so that no runtime meets inf - inf, and so far below any score that exp() of it is
# exactly 0 in float32. The query is scaled, not the scores: half-precision products then stay in range.
_BODY = """
<domain: "{domain}", opset_import: ["" : {opset}]>
DenseAttention <scale> (query, key, value, key_mask) => (attended)
{{
    scale_value = Constant <value_float: float = @scale> ()
    scale_typed = CastLike(scale_value, query)
    scaled_query = Mul(query, scale_typed)
    key_transposed = Transpose <perm = [0, 1, 3, 2]> (key)
    products = MatMul(scaled_query, key_transposed)
    scores = Cast <to = 1> (products)
    mask_axes = Constant <value_ints = [1, 2]> ()
    mask = Unsqueeze(key_mask, mask_axes)
    masked_score = Constant <value_float = -1.0e30> ()
    masked_scores = Where(mask, scores, masked_score)
    weights = Softmax <axis = -1> (masked_scores)
    weights_typed = CastLike(weights, query)
    sums = MatMul(weights_typed, value)
    mask_number = Cast <to = 1> (mask)
    key_axis = Constant <value_ints = [3]> ()
    any_key = ReduceMax <keepdims = 1> (mask_number, key_axis)
    any_key_typed = CastLike(any_key, query)
    attended = Mul(sums, any_key_typed)
}}
"""


def function_of_node(*, inputs: int, attributes: Mapping[str, object]) -> onnx.FunctionProto:
    """The body for a node of the portable graph.

    Args:
        inputs: of the node: 4.
        attributes: of the node; the body reads them itself.

    Raises:
        ValueError: there is no body for that arity.
    """
    if inputs != 4:
        raise ValueError(f"DenseAttention has 4 inputs, not {inputs}.")
    return onnx.parser.parse_function(_BODY.format(domain=ONNX_DOMAIN, opset=ONNX_OPSET))
