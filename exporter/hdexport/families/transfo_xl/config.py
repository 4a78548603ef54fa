"""``config.json`` of a Transformer-XL, with the keys and defaults of transformers 4."""

# No postponed annotations in this module: `strict` checks values against them, and takes no strings.
from itertools import pairwise
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig


@strict
class TransfoXLConfig(PreTrainedConfig):
    """A Transformer-XL.

    Attributes:
        cutoffs: first ids of the clusters of rarer tokens, in ascending order.
        d_embed: width of the embeddings of the most frequent tokens.
        div_val: divisor of the width from one cluster to the next; 1 for one table of one width.
        pre_lnorm: whether layers normalise their inputs; else their outputs.
        mem_len: tokens of earlier calls that each layer remembers.
        clamp_len: distance from which on all are treated alike; 0 or less for none.
        same_length: whether all tokens see `mem_len` tokens, themselves included; else all that are there.
        proj_share_all_but_first: whether the clusters' projections are the embeddings' projections, where `tie_projs`
            does not say it for each.
        untie_r: whether each layer has its biases u and v; else all share them.
    """

    model_type = "transfo-xl"
    attribute_map = {  # noqa: RUF012 (as in transformers)
        "n_token": "vocab_size",
        "hidden_size": "d_model",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    }

    vocab_size: int = 267735
    cutoffs: list[int] | tuple[int, ...] = (20000, 40000, 200000)
    d_model: int = 1024
    d_embed: int = 1024
    n_head: int = 16
    d_head: int = 64
    d_inner: int = 4096
    div_val: int = 4
    pre_lnorm: bool = False
    n_layer: int = 18
    mem_len: int = 1600
    clamp_len: int = 1000
    same_length: bool = True
    proj_share_all_but_first: bool = True
    tie_projs: list[bool] | None = None
    attn_type: int = 0
    adaptive: bool = True
    untie_r: bool = True
    init_std: float = 0.02
    proj_init_std: float = 0.01
    layer_norm_epsilon: float = 1e-5
    eos_token_id: int | None = 0
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        """Fill in `tie_projs`."""
        self.cutoffs = list(self.cutoffs)
        if self.tie_projs is None:
            self.tie_projs = [False] + [self.proj_share_all_but_first] * len(self.cutoffs)
        super().__post_init__(**kwargs)

    @property
    def ends(self) -> list[int]:
        """0, and the id after the last of each cluster."""
        return [0, *self.cutoffs, self.vocab_size]

    def validate_architecture(self) -> None:
        """Refuse, by a ValueError, configurations of no Transformer-XL, or of one that its code never computed."""
        for name in ("d_embed", "d_head", "d_inner", "div_val"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if self.d_model % 2:
            raise ValueError(f"d_model is {self.d_model}; it must be even: positions are sines and as many cosines")
        if any(first >= second for first, second in pairwise(self.ends)):
            raise ValueError(
                f"cutoffs is {self.cutoffs}; it must ascend within 1 to vocab_size - 1 ({self.vocab_size - 1})"
            )
        if self.d_embed // self.div_val ** len(self.cutoffs) < 1:
            raise ValueError(
                f"d_embed {self.d_embed} divided by div_val {self.div_val} for each of {len(self.cutoffs)} cutoffs "
                "leaves no width"
            )
        if self.tie_projs is None or len(self.tie_projs) != len(self.cutoffs) + 1:
            raise ValueError(f"tie_projs is {self.tie_projs}; it must have {len(self.cutoffs) + 1} entries")
        if self.attn_type != 0:
            raise ValueError(f"attn_type is {self.attn_type}; relative attention, 0, is supported")
        if not self.adaptive:
            raise ValueError("adaptive is false; adaptive embeddings, true, are supported")
        if self.layer_norm_epsilon <= 0:
            raise ValueError(f"layer_norm_epsilon is {self.layer_norm_epsilon}; it must be above 0, e.g. 1e-05")
