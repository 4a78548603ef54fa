"""Which files of a directory are a checkpoint of TensorFlow or bert4keras: one configuration, one set of weights."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hdexport.checkpoint.foreign.keras_file import is_hdf5
from hdexport.support.json_files import read_object, several, shown
from hdruntime.errors import ModelError

_HUGGING_FACE = ("*.safetensors", "*.safetensors.index.json", "*.bin", "adapter_config.json")
_CLASS_OF_TRANSFORMERS = "tf_model.h5"
_CONFIG = "config.json"
_CONFIGS = ("bert_config.json", "albert_config.json")
"""Google's names. ELECTRA's users have others that end in ``_config.json``."""

_NEEDED_KEYS = ("hidden_size", "num_hidden_layers")
"""Keys that tell a model's configuration from a tokenizer's."""

_NAMED_CHECKPOINT = re.compile(r'^\s*model_checkpoint_path:\s*"(?P<path>[^"]*)"', re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class FoundFiles:
    """The files.

    Attributes:
        config: the configuration's.
        values: its content.
        weights: the index of a TensorFlow checkpoint, or a Keras file.
    """

    config: Path
    values: dict[str, Any]
    weights: Path

    @property
    def is_tensorflow(self) -> bool:
        """Whether TensorFlow wrote the weights; Keras did otherwise."""
        return self.weights.suffix == ".index"


def is_foreign(directory: Path) -> bool:
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
    """The first file of those names, in a directory for which `has_google_config` holds."""
    return next(directory / name for name in _CONFIGS if (directory / name).is_file())


def find_files(directory: Path) -> FoundFiles:
    """The configuration and the weights.

    Args:
        directory: for which `is_foreign` holds.

    Raises:
        ModelError: the configuration or the weights are missing, or there are several.
    """
    weights = _weights(directory)
    config, values = _config(directory, weights)
    return FoundFiles(config=config, values=values, weights=weights)


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
                "is not read.\nConvert it with transformers 4: AutoModel.from_pretrained(DIRECTORY, from_tf=True), "
                "then save_pretrained()."
            )
        configs = ", ".join(name for name in _CONFIGS if (directory / name).is_file())
        raise ModelError(
            f"{directory} holds {configs} and no weights.\n"
            "It needs a TensorFlow checkpoint (NAME.ckpt.index and NAME.ckpt.data-00000-of-00001) or a Keras file "
            "(NAME.h5)."
        )
    if tensorflow and keras:
        raise ModelError(
            f"{directory} holds weights of TensorFlow ({_listed(tensorflow)}) and of Keras ({_listed(keras)}), and "
            "which of them are meant is open.\nLeave one of them in the directory."
        )
    if len(keras) > 1:
        raise ModelError(
            f"{directory} holds several Keras files: {_listed(keras)}.\nLeave one of them in the directory."
        )
    return keras[0] if keras else _one_checkpoint(directory, tensorflow)


def _one_checkpoint(directory: Path, files: list[Path]) -> Path:
    """The checkpoint that the file ``checkpoint`` names, or the only one."""
    if len(files) == 1:
        return files[0]
    record = directory / "checkpoint"
    advice = f'Leave one in the directory, or write into {record}: model_checkpoint_path: "{files[-1].stem}"'
    if not record.is_file():
        raise ModelError(f"{directory} holds several checkpoints: {_listed(files)}.\n{advice}")
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
    raise ModelError(f"{record} {named}, and {directory} holds {_listed(files)}.\n{advice}")


def _config(directory: Path, weights: Path) -> tuple[Path, dict[str, Any]]:
    files = sorted({*directory.glob("*_config.json"), directory / _CONFIG})
    found: dict[Path, dict[str, Any]] = {}
    for file in files:
        if not file.is_file():
            continue
        values = read_object(file)
        if file.name in (*_CONFIGS, _CONFIG) or all(key in values for key in _NEEDED_KEYS):
            found[file] = values
    if not found:
        raise ModelError(
            f"{directory} holds {weights.name} and no configuration of the model.\n"
            "Copy bert_config.json (or albert_config.json) beside it, as the checkpoint was published with it."
        )
    (first, values), *others = found.items()
    if any(other != values for _, other in others):
        raise ModelError(
            f"{directory} holds several configurations, and they differ: {_listed(list(found))}.\n"
            "Leave the one in the directory that belongs to the weights."
        )
    return first, values


def _listed(files: list[Path]) -> str:
    return several([file.name for file in files], most=5)
