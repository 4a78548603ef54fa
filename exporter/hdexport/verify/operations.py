"""The floating-point operations that a model spends on a sequence, by which verification chooses lengths."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from hdexport.attention.registry import attention_of
from hdexport.graph.weights import initializer_of
from hdruntime.bundle.manifest import Manifest

if TYPE_CHECKING:
    import onnx_ir


def matmul_weights(graph: onnx_ir.Graph) -> int:
    """Number of weights that a graph multiplies with every token."""
    return sum(
        math.prod(value.shape.numpy())
        for node in graph
        if node.op_type in ("Gemm", "MatMul")
        for value in map(initializer_of, node.inputs)
        if value is not None and value.shape is not None
    )


def operations(manifest: Manifest, weights: int, tokens: int) -> float:
    """Operations of one sequence: two per weight and token, and those of the attention scores."""
    keys = sum(keys for item in attention_of(manifest) for keys in item.record.keys_of_layers(manifest, tokens))
    return 2 * weights * tokens + 4 * manifest.hidden_size * tokens * keys


def longest_within(max_len: int, share: Callable[[int], float]) -> int:
    """Longest sequence up to `max_len`, at least 1 token, of which the `share` of a limit is at most 1."""
    return max(1, bisect.bisect_right(range(1, max_len + 1), 1.0, key=share))
