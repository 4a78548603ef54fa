"""The attention operators of hdexport: what each computes, and every face of it."""

from __future__ import annotations

__all__ = ["ONNX_DOMAIN", "ONNX_DOMAIN_VERSION", "ONNX_OPSET", "OPERATORS", "Operator"]

from hdplugins.constants import ONNX_DOMAIN, ONNX_DOMAIN_VERSION, ONNX_OPSET
from hdplugins.operators.block_sparse_attention import OPERATOR as _BLOCK_SPARSE_ATTENTION
from hdplugins.operators.chunk_attention import OPERATOR as _CHUNK_ATTENTION
from hdplugins.operators.clipped_distance_attention import OPERATOR as _CLIPPED_DISTANCE_ATTENTION
from hdplugins.operators.dense_attention import OPERATOR as _DENSE_ATTENTION
from hdplugins.operators.disentangled_attention import OPERATOR as _DISENTANGLED_ATTENTION
from hdplugins.operators.favor_attention import OPERATOR as _FAVOR_ATTENTION
from hdplugins.operators.local_global_attention import OPERATOR as _LOCAL_GLOBAL_ATTENTION
from hdplugins.operators.lsh_attention import OPERATOR as _LSH_ATTENTION
from hdplugins.operators.operator import Operator
from hdplugins.operators.relative_attention import OPERATOR as _RELATIVE_ATTENTION
from hdplugins.operators.sliding_window_attention import OPERATOR as _SLIDING_WINDOW_ATTENTION

OPERATORS: dict[str, Operator] = {
    operator.name: operator
    for operator in (
        _BLOCK_SPARSE_ATTENTION,
        _CHUNK_ATTENTION,
        _CLIPPED_DISTANCE_ATTENTION,
        _DENSE_ATTENTION,
        _DISENTANGLED_ATTENTION,
        _FAVOR_ATTENTION,
        _LOCAL_GLOBAL_ATTENTION,
        _LSH_ATTENTION,
        _RELATIVE_ATTENTION,
        _SLIDING_WINDOW_ATTENTION,
    )
}
"""Every operator by its name. Conformance tests and the README's support table iterate over it."""
