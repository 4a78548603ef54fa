"""Configurations of every family in base shape: hidden size 768, 12 heads of 64, feed-forward 3072, and few words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

VOCAB_SIZE = 1000

_SHAPE = {
    "hidden_size": 768,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "vocab_size": VOCAB_SIZE,
}

_T5 = {"d_ff": 3072, "d_kv": 64}
_SEQUENCES = {"encoder_ffn_dim": 3072, "decoder_layers": 1, "decoder_ffn_dim": 8, "decoder_attention_heads": 1}
_DEBERTA: dict[str, Any] = {
    "position_biased_input": False,
    "relative_attention": True,
    "pos_att_type": "p2c|c2p",
    "max_position_embeddings": 512,
    "type_vocab_size": 0,
}
_SPECIAL = dict.fromkeys(("pad_token_id", "eos_token_id", "bos_token_id", "cls_token_id", "sep_token_id"), 0)

_OF_MODEL_TYPE: dict[str, dict[str, Any]] = {
    "bigbird_pegasus": _SEQUENCES,
    "deberta": _DEBERTA,
    # As published: deberta-v3-base.
    "deberta-v2": {**_DEBERTA, "position_buckets": 256, "share_att_key": True, "norm_rel_ebd": "layer_norm"},
    # As published: esm2.
    "esm": {"position_embedding_type": "rotary", "token_dropout": True, "mask_token_id": 32, "pad_token_id": 1},
    "eurobert": _SPECIAL,
    "gemma3_text": {"use_bidirectional_attention": True},
    "led": _SEQUENCES,
    "longt5": {**_T5, "encoder_attention_type": "transient-global"},
    "luke": {"entity_vocab_size": 8},
    "modernbert": _SPECIAL,
    "modernbert-decoder": _SPECIAL,
    "mt5": _T5,
    "reformer": {
        "feed_forward_size": 3072,
        "axial_pos_shape": [32, 64],
        "axial_pos_embds_dim": [256, 512],
        "max_position_embeddings": 2048,
        "hash_seed": 0,
    },
    "qwen3": {"num_key_value_heads": 4, "head_dim": 64},
    "t5": _T5,
    "transfo-xl": {"d_inner": 3072, "cutoffs": [300, 600], "d_embed": 768, "mem_len": 0, "same_length": False},
    "ultrabert": {"num_key_value_heads": 12, "head_dim": 64},
    "umt5": _T5,
    "xlnet": {"d_inner": 3072, "mem_len": None},
    "xmod": {"default_language": "en_XX"},
}
"""Sizes that a family's configuration calls otherwise, or does not say by default."""


def base_config(
    model_type: str,
    *,
    layers: int,
    changes: Mapping[str, Any] | None = None,
    shape: Mapping[str, int] | None = None,
) -> PreTrainedConfig:
    """The configuration of a model type in base shape.

    Args:
        model_type: of a checkpoint.
        layers: how many.
        changes: of the configuration; a list is of layers in turn.
        shape: sizes in place of those of base shape, by the library's common names; a type may lack some.
    """
    from transformers import AutoConfig

    from hdexport.families import family_of

    family_of(model_type)  # from then on transformers knows the classes that it lacks
    default = AutoConfig.for_model(model_type)
    names, known = type(default).attribute_map, default.to_dict()
    asked = {**_SHAPE, **(shape or {}), "num_hidden_layers": layers}
    sizes: dict[str, Any] = {names.get(name, name): value for name, value in asked.items()}
    sizes = {name: value for name, value in sizes.items() if name in known}
    if model_type == "reformer":
        sizes["attn_layers"] = ["local", "lsh"] * -(-layers // 2)
        del sizes["num_hidden_layers"]
    changed = {name: value * layers if isinstance(value, list) else value for name, value in (changes or {}).items()}
    return AutoConfig.for_model(model_type, **{**sizes, **_OF_MODEL_TYPE.get(model_type, {}), **changed})
