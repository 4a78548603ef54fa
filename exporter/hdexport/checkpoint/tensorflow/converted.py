"""A checkpoint of TensorFlow or bert4keras, converted to a Hugging Face directory that lasts as long as it is used."""

from __future__ import annotations

import errno
import functools
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hdexport.checkpoint.temporary_directory import Converted, written
from hdexport.checkpoint.tensorflow.files import (
    CheckpointFiles,
    find_files,
    google_config,
    hugging_face_config,
    model_type_of,
)
from hdexport.checkpoint.tensorflow.keras_file import google_variables, named_layers, read_keras_file
from hdexport.checkpoint.tensorflow.tensor_bundle import TensorBundle
from hdexport.checkpoint.tensorflow.variables import Variable, Variables, variables_of
from hdexport.checkpoint.tensorflow.vocabulary import Vocabulary, read_vocabulary
from hdexport.support.json_files import listing, read_object, reject_pointer, shown
from hdruntime.errors import ModelError
from hdruntime.optional import require

_OPTIMIZER = re.compile(
    r"(.*/)?(adam_[mv]|lamb_[mv]|Adam(_\d+)?|AdamWeightDecayOptimizer(_\d+)?|ExponentialMovingAverage|global_step|"
    r"beta[12]_power|loss_scale|good_steps|temperature)"
)
"""Names of variables that training keeps and a model does not need."""

_LABELS = "output_weights"


@dataclass(frozen=True, kw_only=True)
class _Stored:
    """The variables of a checkpoint, however it is stored.

    Attributes:
        file: their file, for messages.
        shapes: Google's name -> shape.
        floating: names of variables of floating-point numbers.
        read: gives one's value.
        others: names that are none of Google's.
    """

    file: Path
    shapes: Mapping[str, tuple[int, ...]]
    floating: frozenset[str]
    read: Callable[[str], np.ndarray]
    others: tuple[str, ...] = ()


def convert(directory: Path) -> Converted:
    """Converts a checkpoint for which `is_tensorflow_checkpoint` holds; nothing is written into its directory."""
    return _converted(directory, _state(directory))


def google_files(directory: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The files that a Hugging Face directory has beside its weights, made from Google's configuration: name -> text or
    JSON value; and the choices that were made, a line each."""
    file = google_config(directory)
    values = read_object(file)
    model_type = str(values.get("model_type") or file.name.partition("_")[0])
    config = hugging_face_config(values, file, model_type=model_type, is_tensorflow=True)
    vocabulary = read_vocabulary(directory, config=config, model_type=model_type)
    remarks = (f"Read {file.name} as the config.json of a {model_type}.", *vocabulary.remarks)
    return _files(config, vocabulary), remarks


def _state(directory: Path) -> object:
    stats = {file.name: file.stat() for file in directory.iterdir() if file.is_file()}
    return (
        directory.resolve(),
        frozenset((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats.items()),
    )


# The latest is kept: commands find a checkpoint several times.
@functools.lru_cache(maxsize=1)
def _converted(directory: Path, state: object) -> Converted:
    """A directory's checkpoint, converted again when the state of its files changed."""
    files = find_files(directory)
    for file in directory.glob(f"{files.weights.stem}.*"):
        reject_pointer(file)
    model_type, stored = _stored(files)
    config = hugging_face_config(files.values, files.config, model_type=model_type, is_tensorflow=files.is_tensorflow)
    if _LABELS in stored.shapes and len(stored.shapes[_LABELS]) == 2:
        config["num_labels"] = stored.shapes[_LABELS][0]
    layout = variables_of(model_type, config, generator="generator" in files.config.name)
    chosen, architecture = _chosen(layout, stored)
    _check_layers(layout, stored, config, files)
    for variable in chosen:
        _check_shape(variable, stored, config, files)
    weights = {variable.hugging_face: _weight(variable, stored, config) for variable in chosen} | layout.computed
    config["architectures"] = [architecture]
    vocabulary = read_vocabulary(directory, config=config, model_type=model_type)
    left_out = [name for name in stored.shapes if name not in {variable.google for variable in chosen}]
    left_out = [name for name in (*left_out, *stored.others) if not _OPTIMIZER.fullmatch(name)]
    remarks = [f"Read {files.weights.name} and {files.config.name} as {architecture}."]
    if left_out:
        remarks.append(f"Of {files.weights.name}, this is left out: {listing([*map(shown, sorted(left_out))])}.")
    return _with_weights(directory, config, weights, vocabulary, (*remarks, *vocabulary.remarks))


def _stored(files: CheckpointFiles) -> tuple[str, _Stored]:
    if files.is_tensorflow:
        bundle = TensorBundle(files.weights)
        model_type = model_type_of(files.values, files.config, variables=bundle.tensors)
        shapes = {name: tensor.shape for name, tensor in bundle.tensors.items()}
        floating = frozenset(name for name, tensor in bundle.tensors.items() if tensor.is_floating)
        return model_type, _Stored(file=files.weights, shapes=shapes, floating=floating, read=bundle.read)
    layers = named_layers(read_keras_file(files.weights))
    model_type = model_type_of(files.values, files.config, layers=layers or ("",))
    values, others = google_variables(layers, model_type=model_type)
    return model_type, _Stored(
        file=files.weights,
        shapes={name: value.shape for name, value in values.items()},
        floating=frozenset(name for name, value in values.items() if value.dtype.kind == "f"),
        read=values.__getitem__,
        others=tuple(others),
    )


def _chosen(layout: Variables, stored: _Stored) -> tuple[list[Variable], str]:
    """The variables that are converted, and the class that they make."""
    chosen = list(layout.encoder)
    suffix = "Model"
    for head, variables in layout.heads:
        if any(variable.google in stored.shapes for variable in variables):
            chosen += variables
            suffix = head if suffix == "Model" and head else suffix
    missing = [variable.google for variable in chosen if variable.google not in stored.shapes and not variable.identity]
    if missing:
        raise ModelError(
            f"{stored.file} lacks {listing([*map(shown, missing)])}, which a {layout.class_prefix}{suffix} needs.",
            hint="Check that the configuration belongs to it, or save the checkpoint again with all variables.",
        )
    return chosen, f"{layout.class_prefix}{suffix}"


def _check_layers(layout: Variables, stored: _Stored, config: Mapping[str, Any], files: CheckpointFiles) -> None:
    """Rejects more layers than the configuration has, which would be left out."""
    key = "num_hidden_groups" if layout.layer_scope.endswith("group_") else "num_hidden_layers"
    pattern = re.compile(re.escape(layout.layer_scope) + r"(\d+)/.*")
    numbers = {int(match[1]) for match in map(pattern.fullmatch, stored.shapes) if match is not None}
    if numbers and max(numbers) >= config[key]:
        raise ModelError(
            f"{files.config} has {key} {config[key]}, and {stored.file} has {max(numbers) + 1}.",
            hint="Set it to that, or use the configuration of this checkpoint.",
        )


def _check_shape(variable: Variable, stored: _Stored, config: Mapping[str, Any], files: CheckpointFiles) -> None:
    shape = stored.shapes.get(variable.google)
    expected = tuple(config[axis] if isinstance(axis, str) else axis for axis in variable.axes)
    if shape is None:
        return
    if variable.google not in stored.floating:
        raise ModelError(
            f"{stored.file} stores {variable.google} as something else than floating-point numbers.",
            hint="Save the checkpoint again in float32 or float16.",
        )
    if shape == expected:
        return
    sizes = ", ".join(f"{axis} {config[axis]}" for axis in dict.fromkeys(variable.axes) if isinstance(axis, str))
    raise ModelError(
        f"{stored.file} has {variable.google} of shape {list(shape)}, and {files.config.name} makes it "
        f"{list(expected)} ({sizes}).",
        hint="Use the configuration of this checkpoint.",
    )


def _weight(variable: Variable, stored: _Stored, config: Mapping[str, Any]) -> np.ndarray:
    if variable.google not in stored.shapes:
        width = int(config[str(variable.axes[0])])
        return np.eye(width, dtype=np.float32) if len(variable.axes) == 2 else np.zeros(width, np.float32)
    value = stored.read(variable.google)
    return np.ascontiguousarray(value.T if variable.transposed else value)


def _files(config: dict[str, Any], vocabulary: Vocabulary) -> dict[str, Any]:
    padding = {} if vocabulary.pad_token_id is None else {"pad_token_id": vocabulary.pad_token_id}
    return {"config.json": config | padding, **vocabulary.files}


def _with_weights(
    directory: Path,
    config: dict[str, Any],
    weights: dict[str, np.ndarray],
    vocabulary: Vocabulary,
    remarks: tuple[str, ...],
) -> Converted:
    require("safetensors")
    from safetensors.numpy import save_file

    try:
        converted = written(directory, vocabulary.links, _files(config, vocabulary), remarks=remarks)
        save_file(weights, converted.path / "model.safetensors", metadata={"format": "pt"})
    except Exception as error:
        # safetensors, written in Rust, has its own error for a full disk.
        if f"os error {errno.ENOSPC}" in str(error) or getattr(error, "errno", None) == errno.ENOSPC:
            raise ModelError(
                f"{tempfile.gettempdir()} has no space for the checkpoint {directory}, which is converted there.",
                hint="Free some, or set TMPDIR to a directory on a larger disk.",
            ) from error
        raise
    return converted
