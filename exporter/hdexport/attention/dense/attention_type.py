"""Dense attention, as a kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from hdexport.attention.attention_type import AttentionConversion, AttentionRecord, AttentionType, OperatorNode
from hdexport.attention.dense.lower import LOWERING
from hdruntime.bundle.checked_json import Size
from hdruntime.bundle.manifest import Manifest


@dataclass(frozen=True, kw_only=True)
class DenseAttention(AttentionRecord):
    """Layers in which every query sees every real token.

    Attributes:
        layers: how many.
    """

    score_copies: ClassVar = 3
    """Scores with the mask, the softmax, and a copy made of either."""
    type: Literal["dense"] = "dense"
    layers: Size

    def keys_of_layers(self, manifest: Manifest, tokens: int) -> list[int]:
        return [tokens] * self.layers

    def reference_copies(self, heads: int, *, has_sdpa: bool) -> int:
        """No copies where PyTorch's scaled_dot_product_attention slices the scores."""
        return 0 if has_sdpa else super().reference_copies(heads, has_sdpa=has_sdpa)


class DenseAttentionType(AttentionType):
    """Dense attention: transformers' attention interface gives it where no other kind is in the way."""

    name = "dense"
    rank = 0
    record_type = DenseAttention
    lowerings = (LOWERING,)

    def record(self, conversion: AttentionConversion | None, nodes: Sequence[OperatorNode]) -> DenseAttention | None:
        layers = sum(node.operator == "DenseAttention" for node in nodes)
        return DenseAttention(layers=layers) if layers else None

    def masked_tokens_attend(self, nodes: Sequence[OperatorNode]) -> bool:
        """Masked tokens attend as all others do, unless attention is causal."""
        return not any(node.operator == "DenseAttention" and node.attributes["causal"] for node in nodes)


ATTENTION_TYPE = DenseAttentionType()
