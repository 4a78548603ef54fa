"""NomicBERT: BERT with rotary positions, gated feed-forward networks and no biases.

Source: Nussbaum et al., "Nomic Embed: Training a Reproducible Long Context Text Embedder" (2024).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hdexport.families import gte
from hdexport.support.json_files import shown
from hdruntime.errors import ModelError

_KEYS = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_inner": "intermediate_size",
    "layer_norm_epsilon": "layer_norm_eps",
}
"""Keys of the code that NomicBERT was published with -> transformers' keys; transformers passes over the others."""

_POSITIONS, _BASE = 2048, 10000.0
"""The values of NomicBERT's own code, where a file does not say."""

_COMPUTED = {
    "activation_function": "swiglu",
    "causal": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "moe_every_n_layers": 0,
    "parallel_block": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "scale_attn_by_inverse_layer_idx": False,
    "use_rms_norm": False,
}
"""Setting of NomicBERT's own code -> the only value with which transformers' code computes the same."""


def _config_overrides(config: Mapping[str, Any]) -> dict[str, Any]:
    if "n_embd" not in config:
        return {}
    for key, value in _COMPUTED.items():
        configured = config.get(key, value)
        if configured != value and not (value in (0, False, None) and configured in (0, False, None)):
            raise ModelError(
                f"config.json has {key} {shown(configured)}; a nomic_bert of transformers has {shown(value)}.",
                hint="Choose a checkpoint such as nomic-ai/nomic-embed-text-v1.5.",
            )
    keys = {new: config[old] for old, new in _KEYS.items() if old in config}
    heads = config.get("n_head")
    width = (
        config["n_embd"] // heads if isinstance(config["n_embd"], int) and isinstance(heads, int) and heads else None
    )
    base = config.get("rotary_emb_base", _BASE)
    return keys | {
        "hidden_act": "silu",
        "head_dim": width,
        "max_position_embeddings": config.get("max_trained_positions", _POSITIONS),
        "rope_parameters": {"rope_type": "default", "rope_theta": base},
    }


_KNOWN_CONFIG_KEYS = frozenset({
    *_KEYS,
    *_COMPUTED,
    *("dense_seq_output", "fused_bias_fc", "parallel_block_tied_norm", "shared_expert"),
    *("last_layer_subset", "max_trained_positions", "n_positions", "num_experts", "moe_top_k", "expert_choice_router"),
    *("ffn_div", "moe_impl", "moe_normalize_expert_weights", "pad_vocab_to_multiple_of"),
    *("pad_vocab_size_multiple", "reorder_and_upcast_attn", "rotary_emb_base", "scale_attn_weights", "use_xentropy"),
})  # fmt: skip

FAMILY = dataclasses.replace(gte.FAMILY, config_overrides=_config_overrides, known_config_keys=_KNOWN_CONFIG_KEYS)
