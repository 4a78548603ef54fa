"""``config.json`` of a Performer: the arguments of performer-pytorch's ``PerformerLM``, with their defaults."""

# No postponed annotations in this module: `strict` checks values against them, and takes no strings.
import math
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

_NOT_COMPUTED = {
    "causal": "a causal Performer",
    "cross_attend": "attention to another text",
    "reversible": "reversible layers",
    "generalized_attention": "features of another kernel than the softmax's",
    "no_projection": "attention without features",
    "use_scalenorm": "a norm of scale only",
    "use_rezero": "layers without a norm",
    "shift_tokens": "shifted tokens",
    "axial_position_emb": "axial positions",
}
"""Flag -> the feature that it asks for."""


@strict
class PerformerConfig(PreTrainedConfig):
    """A Performer. Keys that the class does not name, such as rates of dropout, change no answer.

    Attributes:
        num_tokens: size of the vocabulary.
        max_seq_len: rows of the table of positions; with rotary positions, tokens that it was trained with.
        dim: width of a token.
        depth: layers.
        heads: number of attention heads of each layer.
        dim_head: size of a head.
        nb_features: random features; None for dim_head ln dim_head, rounded down.
        ff_mult: width of the feed-forward layers, in multiples of `dim`.
        ff_glu: whether their activation is a gate.
        tie_embed: whether the head for masked tokens is the table of tokens.
        qkv_bias: whether the projections to queries, keys and values have biases.
        attn_out_bias: whether the projection after the attention has.
        rotary_position_emb: whether tokens get sines of their positions, and queries and keys turn by them; else tokens
            get learned positions.
        local_attn_heads: has to be 0.
    """

    model_type = "performer"
    attribute_map = {  # noqa: RUF012 (as in transformers)
        "vocab_size": "num_tokens",
        "max_position_embeddings": "max_seq_len",
        "hidden_size": "dim",
        "num_attention_heads": "heads",
        "num_hidden_layers": "depth",
    }

    num_tokens: int = 30522
    max_seq_len: int = 512
    dim: int = 512
    depth: int = 6
    heads: int = 8
    dim_head: int = 64
    nb_features: int | None = None
    ff_mult: int = 4
    ff_glu: bool = False
    tie_embed: bool = False
    qkv_bias: bool = False
    attn_out_bias: bool = False
    rotary_position_emb: bool = True
    axial_position_emb: bool = False
    local_attn_heads: int | list[int] | tuple[int, ...] = 0
    causal: bool = False
    cross_attend: bool = False
    reversible: bool = False
    generalized_attention: bool = False
    no_projection: bool = False
    use_scalenorm: bool = False
    use_rezero: bool = False
    shift_tokens: bool = False
    initializer_range: float = 0.02

    @property
    def features(self) -> int:
        """Random features of a query or key."""
        return int(self.dim_head * math.log(self.dim_head)) if self.nb_features is None else self.nb_features

    def validate_architecture(self) -> None:
        """Reject settings that are not computed here, and configurations of no Performer.

        Raises:
            ValueError: the message says which value arrived and which fits.
        """
        for name in ("dim_head", "ff_mult"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if self.features < 1:
            raise ValueError(
                f"nb_features is {self.nb_features}, and dim_head {self.dim_head}: that is {self.features} features; "
                "it must be 1 or more"
            )
        for name, what in _NOT_COMPUTED.items():
            if getattr(self, name):
                raise ValueError(f"{name} is true: {what}; false is supported")
        if self.rotary_position_emb and (self.dim % 2 or self.dim_head % 2):
            raise ValueError(
                f"dim is {self.dim} and dim_head {self.dim_head}; with rotary_position_emb both must be even"
            )
        local = self.local_attn_heads
        if any(local) if isinstance(local, (list, tuple)) else local:
            raise ValueError(f"local_attn_heads is {local}; 0 is supported: all heads attend by features")

    def __post_init__(self, **kwargs: Any) -> None:
        """Say in transformers' words whether the head is tied."""
        if isinstance(self.local_attn_heads, tuple):
            self.local_attn_heads = list(self.local_attn_heads)
        self.tie_word_embeddings = self.tie_embed
        super().__post_init__(**kwargs)
