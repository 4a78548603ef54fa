"""The attention operators of hdexport: what each computes, and every face of it."""

from __future__ import annotations

__all__ = ["ONNX_DOMAIN", "ONNX_DOMAIN_VERSION", "ONNX_OPSET", "OPERATORS", "Operator"]

from hdplugins.attention.blocks.operator import OPERATOR as _BLOCK_SPARSE_ATTENTION
from hdplugins.attention.chunks.operator import OPERATOR as _CHUNK_ATTENTION
from hdplugins.attention.dense.operator import OPERATOR as _DENSE_ATTENTION
from hdplugins.attention.disentangled.operator import OPERATOR as _DISENTANGLED_ATTENTION
from hdplugins.attention.distance.operator import OPERATOR as _CLIPPED_DISTANCE_ATTENTION
from hdplugins.attention.favor.operator import OPERATOR as _FAVOR_ATTENTION
from hdplugins.attention.local_global.operator import OPERATOR as _LOCAL_GLOBAL_ATTENTION
from hdplugins.attention.lsh.operator import OPERATOR as _LSH_ATTENTION
from hdplugins.attention.operator import Operator
from hdplugins.attention.relative.operator import OPERATOR as _RELATIVE_ATTENTION
from hdplugins.attention.window.operator import OPERATOR as _SLIDING_WINDOW_ATTENTION
from hdplugins.constants import ONNX_DOMAIN, ONNX_DOMAIN_VERSION, ONNX_OPSET

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
