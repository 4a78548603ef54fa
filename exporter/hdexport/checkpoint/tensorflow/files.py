"""Which files of a directory are a checkpoint of TensorFlow or bert4keras, and its configuration with Hugging Face's
keys."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hdexport.checkpoint.config import MOST_LAYERS, hierarchical_alpha
from hdexport.checkpoint.tensorflow.keras_file import is_hdf5
from hdexport.checkpoint.tensorflow.variables import MODEL_TYPES
from hdexport.support.json_files import listing, read_object, shown
from hdruntime.errors import ModelError

_HUGGING_FACE = ("*.safetensors", "*.safetensors.index.json", "*.bin", "adapter_config.json")
_CLASS_OF_TRANSFORMERS = "tf_model.h5"
_CONFIG = "config.json"
_CONFIGS = ("bert_config.json", "albert_config.json")
"""Google's names. ELECTRA's users have others that end in ``_config.json``."""

_NEEDED_KEYS = ("hidden_size", "num_hidden_layers")
"""Keys that tell a model's configuration from a tokenizer's."""

_NAMED_CHECKPOINT = re.compile(r'^\s*model_checkpoint_path:\s*"(?P<path>[^"]*)"', re.MULTILINE)

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
"""Layer of bert4keras -> the family that it indicates, the first that a file has; BERT has none of them."""


class CheckpointFiles(NamedTuple):
    """A configuration's file and its content, and the weights: the index of a TensorFlow checkpoint, or a
    Keras file."""

    config: Path
    values: dict[str, Any]
    weights: Path

    @property
    def is_tensorflow(self) -> bool:
        """Whether TensorFlow, and not Keras, wrote the weights."""
        return self.weights.suffix == ".index"


def is_tensorflow_checkpoint(directory: Path) -> bool:
    """Whether a directory has weights of TensorFlow or Keras, or Google's configuration, and none of Hugging Face's."""
    if any(next(directory.glob(pattern), None) for pattern in _HUGGING_FACE):
        return False
    if (directory / _CLASS_OF_TRANSFORMERS).is_file() or _tensorflow(directory) or _keras(directory):
        return True
    return not (directory / _CONFIG).exists() and has_google_config(directory)


def has_google_config(directory: Path) -> bool:
    """Whether a directory has a file of the names that Google's configurations have."""
    return any((directory / name).is_file() for name in _CONFIGS)


def google_config(directory: Path) -> Path:
    """The first file of these names, in a directory for which `has_google_config` holds."""
    return next(directory / name for name in _CONFIGS if (directory / name).is_file())


def find_files(directory: Path) -> CheckpointFiles:
    """The configuration and the weights; several of either are rejected."""
    weights = _weights(directory)
    config, values = _config(directory, weights)
    return CheckpointFiles(config=config, values=values, weights=weights)


def model_type_of(
    values: Mapping[str, Any], file: Path, *, variables: Collection[str] = (), layers: Collection[str] = ()
) -> str:
    """The family of a checkpoint, by its configuration or by the names of its TensorFlow variables or Keras layers."""
    named = values.get("model_type")
    if named is not None:
        # bert4keras' RoBERTa computes as BERT does, and its weights have BERT's names.
        named = "bert" if named == "roberta" else named
        if named not in MODEL_TYPES:
            raise ModelError(
                f"{file} has model_type {shown(named)}; checkpoints of TensorFlow and bert4keras are read of "
                f"{', '.join(MODEL_TYPES)}.",
                hint="Build a Hugging Face checkpoint of the model instead.",
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
            "which its names do not tell.",
            hint='Add to that file "model_type": "nezha" or "model_type": "roformer".',
        )
    some = ", ".join(sorted(variables)[:3]) or "nothing"
    raise ModelError(
        f"The checkpoint beside {file} is of no family that is known by its names ({shown(some)}); names begin with "
        f"bert/ or electra/ in those of {', '.join(MODEL_TYPES)}.",
        hint="Convert it to a Hugging Face checkpoint first.",
    )


def hugging_face_config(
    values: Mapping[str, Any], file: Path, *, model_type: str, is_tensorflow: bool
) -> dict[str, Any]:
    """The values of ``config.json``; variants that transformers does not compute are rejected."""
    config = {key: value for key, value in values.items() if key not in _RENAMED}
    config |= {_RENAMED[key]: values[key] for key in _RENAMED if values.get(key) is not None}
    for key, what in _UNSUPPORTED.items():
        if config.get(key):
            raise ModelError(
                f"{file} has {key}: {what}, which Hugging Face's {model_type} does not compute.",
                hint="Train or build a checkpoint without it.",
            )
    config = _DEFAULTS | {"embedding_size": config.get("hidden_size")} | config
    for key in (*_SIZES, "embedding_size", *_DEFAULTS):
        _check_size(config.get(key), key, file)
    if model_type in ("bert", "nezha") and config["embedding_size"] != config["hidden_size"]:
        raise ModelError(
            f"{file} has embedding_size {config['embedding_size']} and hidden_size {config['hidden_size']}; a "
            f"{model_type} of Hugging Face has embeddings as wide as its layers.",
            hint="Build a checkpoint of ALBERT, ELECTRA or RoFormer, which project them.",
        )
    head_size = config["hidden_size"] // config["num_attention_heads"]
    for key in ("attention_head_size", "attention_key_size"):
        if config.get(key) not in (None, head_size):
            raise ModelError(
                f"{file} has {key} {shown(config[key])}; a {model_type} of Hugging Face has hidden_size / "
                f"num_attention_heads = {head_size}.",
                hint="Build a checkpoint without that key.",
            )
    hierarchical_alpha(config, file)
    config.setdefault("hidden_act", "gelu")
    if model_type == "albert" and is_tensorflow and config["hidden_act"] == "gelu":
        # Google's program approximates GELU, which transformers calls gelu_new.
        config["hidden_act"] = "gelu_new"
    of_keras = model_type == "roformer" or (model_type == "nezha" and not is_tensorflow)
    config.setdefault("layer_norm_eps", _EPSILON_OF_KERAS if of_keras else _EPSILON)
    others = {key for key, owners in _OWNERS.items() if model_type not in owners}
    return {key: value for key, value in config.items() if key not in others} | {"model_type": model_type}


def _tensorflow(directory: Path) -> list[Path]:
    return sorted(file for file in directory.glob("*.index") if file.is_file())


def _keras(directory: Path) -> list[Path]:
    files = [file for pattern in ("*.h5", "*.hdf5") for file in directory.glob(pattern) if file.is_file()]
    files += [file for file in directory.glob("*.weights") if is_hdf5(file)]
    return sorted(file for file in files if file.name != _CLASS_OF_TRANSFORMERS)


def _weights(directory: Path) -> Path:
    tensorflow, keras = _tensorflow(directory), _keras(directory)
    if not tensorflow and not keras:
        if (directory / _CLASS_OF_TRANSFORMERS).is_file():
            raise ModelError(
                f"{directory / _CLASS_OF_TRANSFORMERS} holds the weights of a TensorFlow class of transformers, which "
                "is not read.",
                hint="Convert it with transformers 4: AutoModel.from_pretrained(DIRECTORY, from_tf=True), "
                "then save_pretrained().",
            )
        configs = ", ".join(name for name in _CONFIGS if (directory / name).is_file())
        raise ModelError(
            f"{directory} holds {configs} and no weights.",
            hint="It needs a TensorFlow checkpoint (NAME.ckpt.index and NAME.ckpt.data-00000-of-00001) or a Keras file "
            "(NAME.h5).",
        )
    if tensorflow and keras:
        raise ModelError(
            f"{directory} holds weights of TensorFlow ({_listed(tensorflow)}) and of Keras ({_listed(keras)}), and "
            "which of them are meant is open.",
            hint="Leave one of them in the directory.",
        )
    if len(keras) > 1:
        raise ModelError(
            f"{directory} holds several Keras files: {_listed(keras)}.", hint="Leave one of them in the directory."
        )
    return keras[0] if keras else _one_checkpoint(directory, tensorflow)


def _one_checkpoint(directory: Path, files: list[Path]) -> Path:
    """The checkpoint that the file ``checkpoint`` names, or the only one."""
    if len(files) == 1:
        return files[0]
    record = directory / "checkpoint"
    hint = f'Leave one in the directory, or write into {record}: model_checkpoint_path: "{files[-1].stem}"'
    if not record.is_file():
        raise ModelError(f"{directory} holds several checkpoints: {_listed(files)}.", hint=hint)
    try:
        match = _NAMED_CHECKPOINT.search(record.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        match = None
    # A checkpoint that was moved is still named by the path that it was saved at.
    name = None if match is None else re.split(r"[/\\]", match["path"])[-1]
    for file in files:
        if file.stem == name:
            return file
    named = "names none" if name is None else f"names {shown(name)}"
    raise ModelError(f"{record} {named}, and {directory} holds {_listed(files)}.", hint=hint)


def _config(directory: Path, weights: Path) -> tuple[Path, dict[str, Any]]:
    files = sorted({*directory.glob("*_config.json"), directory / _CONFIG})
    configs: dict[Path, dict[str, Any]] = {}
    for file in files:
        if not file.is_file():
            continue
        values = read_object(file)
        if file.name in (*_CONFIGS, _CONFIG) or all(key in values for key in _NEEDED_KEYS):
            configs[file] = values
    if not configs:
        raise ModelError(
            f"{directory} holds {weights.name} and no configuration of the model.",
            hint="Copy bert_config.json (or albert_config.json) beside it, as the checkpoint was published with it.",
        )
    (first, values), *others = configs.items()
    if any(other != values for _, other in others):
        raise ModelError(
            f"{directory} holds several configurations, and they differ: {_listed(list(configs))}.",
            hint="Leave the one in the directory that belongs to the weights.",
        )
    return first, values


def _listed(files: list[Path]) -> str:
    return listing([file.name for file in files], limit=5)


def _check_size(value: object, key: str, file: Path) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        actual = "no " + key if value is None else f"{key} {shown(value)}"
        raise ModelError(
            f"{file} has {actual}; it must be a whole number, 1 or more.", hint="Set it to the checkpoint's."
        )
    if key in _COUNTS and value > MOST_LAYERS:
        raise ModelError(f"{file} has {key} {value}; the maximum is {MOST_LAYERS}.", hint="Set it to the checkpoint's.")
