"""Dense attention: every query attends to every key that is not padding, or to every one up to itself.

Several heads of queries may share one of keys and values. A node without the attribute ``causal``, as in bundles
of old, is not causal.

It has no kernel and no plugin of ours: ONNX Runtime and TensorRT each have a fused operator for it, to which a
lowering maps it. Being one node in the portable graph, it is found without matching patterns.
"""

from __future__ import annotations

from hdplugins.attention.operator import Operator

OPERATOR = Operator(
    name="DenseAttention",
    version=1,
    package=__package__,
    inputs=("query", "key", "value", "key_mask"),
    attributes=("scale", "causal"),
    faster_in_openvino=("bfloat16",),
)
