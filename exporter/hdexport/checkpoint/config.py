"""``config.json`` of a checkpoint, checked before anything is made of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hdexport.checkpoint.sentence_modules import sentence_modules
from hdexport.families import Family
from hdexport.model.positions import DEFAULT_ALPHA
from hdexport.support.json_files import read_object, shown
from hdruntime.errors import ModelError, Setting

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MOST_LAYERS = 1024
"""Layers of a stack; the deepest published transformer has 1000."""

_MOST_LABELS = 2**20

_LIMITS = {
    **dict.fromkeys(("num_hidden_layers", "n_layers", "encoder_layers", "decoder_layers"), MOST_LAYERS),
    **dict.fromkeys(("num_hidden_groups", "inner_group_num"), MOST_LAYERS),
    "num_labels": _MOST_LABELS,
}
"""Key of ``config.json`` -> most parts that transformers makes one by one, before it looks at any weight."""

_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
"""Attributes of every configuration in transformers, whatever their keys in the file."""

_EPSILONS = ("layer_norm_eps", "layer_norm_epsilon", "norm_eps")

QUANTIZED_HINT = (
    "Build the checkpoint that was quantised; ",
    Setting("precision", "float16", command="build"),
    " or ",
    Setting("precision", "bfloat16", command="build"),
    " makes the bundle half as large.",
)

HIERARCHICAL_KEY = "hierarchical_position"
"""An argument of bert4keras' ``build_transformer_model``, which also reads it from the configuration."""


def read_config(path: Path) -> dict[str, Any]:
    """The content of ``config.json`` in a checkpoint's directory, with the checks that all families share."""
    file = path / "config.json"
    if not file.exists() and not file.is_symlink():
        raise _no_config(path)
    config = read_object(file)
    if not isinstance(config.get("model_type"), str):
        raise ModelError(
            f"{file} names no model_type, so the model's family is unknown.", hint='Add it, e.g. "model_type": "bert".'
        )
    _check_values(file, config)
    return config


def _no_config(path: Path) -> ModelError:
    modules = sentence_modules(path)
    if not modules:
        return ModelError(
            f"{path} holds no config.json, so it is not a Hugging Face checkpoint.",
            hint="Name the directory that save_pretrained() wrote.",
        )
    # Other first modules, such as a Router, keep their parts in folders.
    parts = [file.parent for file in sorted(path.glob("*/config.json")) if "model_type" in read_object(file)]
    hint = "Choose a model that begins with a Transformer."
    if parts:
        folders = (str(path / shown(Path(part.name))) for part in parts)
        hint = f"Build the token embeddings of a part: {', '.join(folders)}"
    return ModelError(
        f"{path} is a model of sentence-transformers that begins with {shown(modules[0].kind)}, and not with a "
        "Transformer in the checkpoint's directory, which a bundle needs.",
        hint=hint,
    )


def settings_from(path: Path, config: dict[str, Any], *, family: Family) -> PreTrainedConfig:
    """The configuration in transformers, or of the family's own classes, with values that a model can be made of."""
    from transformers import AutoConfig

    file = path / "config.json"
    if config.get("quantization_config") is not None:
        raise ModelError(
            f"{file} has a quantization_config: the weights are integers, and floating-point ones are needed.",
            hint=QUANTIZED_HINT,
        )
    try:
        config_overrides = family.config_overrides(config)
        if family.classes is not None:
            settings = family.classes.config.from_pretrained(path, local_files_only=True, **config_overrides)
        else:
            settings = AutoConfig.from_pretrained(
                path, local_files_only=True, trust_remote_code=False, **config_overrides
            )
        for key, value in config_overrides.items():
            # Keys that a class does not declare are passed over.
            setattr(settings, key, value)
    except MemoryError:
        raise
    except Exception as error:
        # Each configuration has checks of its own; where it lacks one, its code fails somewhere.
        raise ModelError(
            f"{file} does not describe a {config['model_type']}: {shown(error)}",
            hint="Correct that value, or download the model's config.json again.",
        ) from error
    for name in _SIZES:
        _check_size(file, file_key(settings, name), getattr(settings, name, None))
    for name in _EPSILONS:
        epsilon = getattr(settings, name, 0.0)
        if epsilon < 0:
            raise ModelError(
                f"{file} has {name} {epsilon}, which is below zero.", hint="Set it to the model's, e.g. 1e-12."
            )
    if isinstance(settings.id2label, dict):
        settings.id2label = {
            number: str(label) if isinstance(label, (int, float)) else label
            for number, label in settings.id2label.items()
        }
    # These settings are about return values of transformers, not about the model.
    settings.return_dict, settings.output_attentions, settings.output_hidden_states = True, False, False
    return settings


def check_labels(settings: PreTrainedConfig, file: Path, *, are_keys: bool) -> None:
    """Rejects labels that do not name each number of a head; where scores are listed by label, two equal
    ones as well."""
    labels = settings.id2label or {}
    for number in range(len(labels)):
        if not isinstance(labels.get(number), str):
            problem = (
                f"gives {number} the label {shown(labels[number])}" if number in labels else f"has no label {number}"
            )
            raise ModelError(
                f"{file}: id2label {problem}; each number from 0 to {len(labels) - 1} needs a name.",
                hint=f'Give it one, e.g. "LABEL_{number}".',
            )
    for label, count in Counter(labels.values()).most_common(1):
        if are_keys and count > 1:
            raise ModelError(
                f"{file}: id2label gives {count} numbers the label {shown(label)}, and scores are listed by label.",
                hint="Give each number a label of its own.",
            )


def file_key(settings: PreTrainedConfig, name: str) -> str:
    """The key in ``config.json`` of an attribute of every configuration: DistilBERT's layers are ``n_layers``."""
    return str(settings.attribute_map.get(name, name))


def hierarchical_alpha(config: Mapping[str, Any], file: Path) -> float | None:
    """The alpha with which bert4keras decomposes a model's positions; None where the configuration asks for none.
    `file` is for messages."""
    value = config.get(HIERARCHICAL_KEY)
    if value is None or value is False:
        return None
    if value is True:
        return DEFAULT_ALPHA
    if not isinstance(value, (int, float)) or not 0 < value < 1 or value == 0.5:
        raise ModelError(
            f"{file} has {HIERARCHICAL_KEY} {shown(value)}; it is true, for an alpha of {DEFAULT_ALPHA:g}, or an alpha "
            "between 0 and 1 other than 0.5.",
            hint="Set it to the value that the model was trained with, or remove it.",
        )
    return float(value)


def _check_values(file: Path, config: dict[str, Any]) -> None:
    """Rejects values that would be misread, or read forever, before transformers has checked a type."""
    architectures = config.get("architectures")
    if architectures is not None and not (
        isinstance(architectures, list) and all(isinstance(name, str) for name in architectures)
    ):
        raise ModelError(
            f"{file} has architectures {shown(architectures)}, which is not a list of names.",
            hint='Set it to the name of the model\'s class, e.g. "architectures": ["BertModel"], or leave it out.',
        )
    if not isinstance(config.get("auto_map") or {}, dict):
        raise ModelError(
            f"{file} has auto_map {shown(config['auto_map'])}, which names no class for an Auto class.",
            hint="Remove it.",
        )
    for key, value in _values(config):
        if isinstance(value, float) and not math.isfinite(value):
            raise ModelError(
                f"{file} has {shown(key)} {value}, which is not finite.",
                hint="Set it to the model's, or download the file again.",
            )
        # JSON can name halves of characters, which no file can hold.
        if isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
            raise ModelError(
                f"{file} has {shown(key)} {shown(value)}, which is not valid Unicode.", hint="Download the model again."
            )
    for key, limit in _LIMITS.items():
        value = config.get(key)
        if isinstance(value, (int, float)) and value > limit:
            raise ModelError(
                f"{file} has {key} {value}; the maximum is {limit}.", hint="Set it to the number in the weights."
            )


def _values(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """All keys, and all values that hold no others, each with its key."""
    pending: list[tuple[str, Any]] = list(config.items())
    while pending:
        key, value = pending.pop()
        yield key, key
        if isinstance(value, dict):
            pending += value.items()
        elif isinstance(value, list):
            pending += [(key, item) for item in value]
        else:
            yield key, value


def _check_size(file: Path, key: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(
            f"{file} has {key} {shown(value)}; it must be a whole number, 1 or more.", hint="Set it to the model's."
        )


def reject_variants(file: Path, config: dict[str, Any], *, family: Family) -> None:
    """Rejects settings that no graph of ours would compute."""
    if config.get("is_decoder") and not family.honors_is_decoder:
        raise ModelError(
            f"{file} says is_decoder: a decoder attends to earlier tokens only, and encoders are supported.",
            hint='If it was trained as an encoder, set "is_decoder": false.',
        )
    if config.get("is_causal") and not family.is_causal:
        # transformers follows it in batches without padding, and not in others.
        raise ModelError(
            f"{file} has is_causal {shown(config['is_causal'])}: a token would see earlier tokens only, and a "
            f"{config['model_type']} sees both sides.",
            hint='If it was trained so, set "is_causal": false.',
        )
    # For most model types, current transformers ignores this key and would silently compute something else.
    kind, known = config.get("position_embedding_type") or "absolute", family.position_embedding_types
    if known is not None and kind not in known and config.get("lora_adaptations"):
        raise ModelError(
            f"{file} is that of jina-embeddings-v3's own code, which is not in transformers.",
            hint="Choose the same model for transformers: jinaai/jina-embeddings-v3-hf.",
        )
    if known is not None and kind not in known:
        raise ModelError(
            f"{file} asks for {shown(kind)} positions; only learned absolute ones are supported"
            + "".join(f", and {other}" for other in known[1:])
            + f".\nChoose a model whose position_embedding_type is {' or '.join(known)}."
        )
    weights = config.get("transformers_weights")
    if weights not in (None, "model.safetensors", "model.safetensors.index.json"):
        raise ModelError(
            f"{file} says that the weights are in {shown(weights)}; they are read from model.safetensors.",
            hint="Rename that file, and remove transformers_weights from config.json.",
        )
