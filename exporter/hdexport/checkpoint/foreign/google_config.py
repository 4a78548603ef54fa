"""The configuration of a checkpoint of Google or bert4keras, with the keys of Hugging Face's ``config.json``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from hdexport.checkpoint.config import MOST_LAYERS, hierarchical_alpha
from hdexport.checkpoint.foreign.variables import MODEL_TYPES
from hdexport.support.json_files import shown
from hdruntime.errors import ModelError

_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
_DEFAULTS = {
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "num_hidden_groups": 1,
    "inner_group_num": 1,
    "max_relative_position": 64,
}
_OWNERS = {
    "num_hidden_groups": ("albert",),
    "inner_group_num": ("albert",),
    "max_relative_position": ("nezha",),
    "embedding_size": ("albert", "electra", "roformer"),
}
"""Keys that some families have."""

_RENAMED = {"max_position": "max_position_embeddings", "segment_vocab_size": "type_vocab_size"}
"""bert4keras' name of a value, which it prefers -> Google's."""

_COUNTS = frozenset({"num_hidden_layers", "num_hidden_groups", "inner_group_num"})

_UNSUPPORTED = {
    "keep_tokens": "a part of the vocabulary",
    "compound_tokens": "tokens that are averages of others",
    "residual_attention_scores": "attention scores that are added from layer to layer",
    "shared_segment_embeddings": "segments that share the tokens' embeddings",
}
"""Options of bert4keras that change the computation, in its configurations and as arguments."""

_EPSILON = 1e-12
_EPSILON_OF_KERAS = 1e-7
"""Epsilon that bert4keras adds to variances in RoFormer and NEZHA, Keras' own; Google adds less."""

_FAMILIES_OF_LAYERS = {
    "Embedding-Relative-Position": "nezha",
    "Embedding-Rotary-Position": "roformer",
    "Transformer-MultiHeadSelfAttention": "albert",
    # A BERT whose embeddings are projected is ELECTRA's encoder.
    "Embedding-Mapping": "electra",
    "Discriminator-Dense": "electra",
}
"""Layer of bert4keras -> the family that it tells, the first that a file has; BERT has none of them."""


def model_type_of(
    values: Mapping[str, Any], file: Path, *, variables: Collection[str] = (), layers: Collection[str] = ()
) -> str:
    """The family of a checkpoint: as its configuration says, or as the names in it tell.

    Args:
        values: the configuration.
        file: its file.
        variables: names in a checkpoint of TensorFlow.
        layers: names in a Keras file.

    Raises:
        ModelError: the configuration names a family that has no such checkpoints, or nothing tells.
    """
    named = values.get("model_type")
    if named is not None:
        # bert4keras' RoBERTa computes as BERT does, and its weights have BERT's names.
        named = "bert" if named == "roberta" else named
        if named not in MODEL_TYPES:
            raise ModelError(
                f"{file} has model_type {shown(named)}; checkpoints of TensorFlow and bert4keras are read of "
                f"{', '.join(MODEL_TYPES)}.\nBuild a Hugging Face checkpoint of the model instead."
            )
        return str(named)
    if layers:
        return next((family for layer, family in _FAMILIES_OF_LAYERS.items() if layer in layers), "bert")
    if any(name.startswith("electra/") for name in variables):
        return "electra"
    if any(name.startswith("bert/encoder/transformer/") for name in variables):
        return "albert"
    if values.get("use_relative_position"):
        return "nezha"
    if "bert/embeddings/position_embeddings" in variables:
        return "bert"
    if any(name.startswith("bert/") for name in variables):
        raise ModelError(
            f"The checkpoint beside {file} has no bert/embeddings/position_embeddings: it is a NEZHA or a RoFormer, "
            'which its names do not tell.\nAdd to that file "model_type": "nezha" or "model_type": "roformer".'
        )
    some = ", ".join(sorted(variables)[:3]) or "nothing"
    raise ModelError(
        f"The checkpoint beside {file} is of no family that is known by its names ({shown(some)}); names begin with "
        f"bert/ or electra/ in those of {', '.join(MODEL_TYPES)}.\nConvert it to a Hugging Face checkpoint first."
    )


def hugging_face_config(
    values: Mapping[str, Any], file: Path, *, model_type: str, is_tensorflow: bool
) -> dict[str, Any]:
    """The values of ``config.json``.

    Args:
        values: the configuration.
        file: its file, for messages.
        model_type: as `model_type_of` says.
        is_tensorflow: whether the weights are in a checkpoint of TensorFlow, not in a Keras file.

    Raises:
        ModelError: a value is missing, wrong, or of a variant that transformers does not compute.
    """
    config = {key: value for key, value in values.items() if key not in _RENAMED}
    config |= {_RENAMED[key]: values[key] for key in _RENAMED if values.get(key) is not None}
    for key, what in _UNSUPPORTED.items():
        if config.get(key):
            raise ModelError(
                f"{file} has {key}: {what}, which Hugging Face's {model_type} does not compute.\n"
                "Train or build a checkpoint without it."
            )
    config = _DEFAULTS | {"embedding_size": config.get("hidden_size")} | config
    for key in (*_SIZES, "embedding_size", *_DEFAULTS):
        _check_size(config.get(key), key, file)
    if model_type in ("bert", "nezha") and config["embedding_size"] != config["hidden_size"]:
        raise ModelError(
            f"{file} has embedding_size {config['embedding_size']} and hidden_size {config['hidden_size']}; a "
            f"{model_type} of Hugging Face has embeddings as wide as its layers.\n"
            "Build a checkpoint of ALBERT, ELECTRA or RoFormer, which project them."
        )
    head_size = config["hidden_size"] // config["num_attention_heads"]
    for key in ("attention_head_size", "attention_key_size"):
        if config.get(key) not in (None, head_size):
            raise ModelError(
                f"{file} has {key} {shown(config[key])}; a {model_type} of Hugging Face has hidden_size / "
                f"num_attention_heads = {head_size}.\nBuild a checkpoint without that key."
            )
    hierarchical_alpha(config, file)
    config.setdefault("hidden_act", "gelu")
    if model_type == "albert" and is_tensorflow and config["hidden_act"] == "gelu":
        # Google's program approximates it, which transformers calls so.
        config["hidden_act"] = "gelu_new"
    of_keras = model_type == "roformer" or (model_type == "nezha" and not is_tensorflow)
    config.setdefault("layer_norm_eps", _EPSILON_OF_KERAS if of_keras else _EPSILON)
    others = {key for key, owners in _OWNERS.items() if model_type not in owners}
    return {key: value for key, value in config.items() if key not in others} | {"model_type": model_type}


def _check_size(value: object, key: str, file: Path) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        found = "no " + key if value is None else f"{key} {shown(value)}"
        raise ModelError(f"{file} has {found}; it must be a whole number, 1 or more.\nSet it to the checkpoint's.")
    if key in _COUNTS and value > MOST_LAYERS:
        raise ModelError(f"{file} has {key} {value}; the most is {MOST_LAYERS}.\nSet it to the checkpoint's.")
