"""Files of tensors beside a checkpoint's model that a build does not read, such as BGE-M3's heads."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from hdexport.checkpoint import Checkpoint, bge_m3
from hdexport.checkpoint.adapters import ADAPTER_CONFIG
from hdexport.checkpoint.sentence_modules import module_folders
from hdexport.checkpoint.weight_files import stored_weights
from hdexport.support.json_files import listing, read_object, shown
from hdruntime.bundle.manifest import Task
from hdruntime.errors import Message, ModelError

_TENSORS = frozenset({
    *(".bin", ".ckpt", ".h5", ".hdf5", ".joblib", ".msgpack", ".npy", ".npz", ".ot", ".pickle", ".pkl", ".pt", ".pth"),
    ".safetensors",
})  # fmt: skip
"""Suffixes of files that hold tensors."""

_OF_THE_MODEL = re.compile(
    r"(?:(?:pytorch|tf|flax|rust|openvino)_|ggml-)?model"
    r"(?:[._-](?:\d+|of|fp\d+|float\d+|bf16|bfloat16|u?int\d+|q\d\w*|quantized|qint8|dynamic|non_ema|ema))*\.\w+"
    r"|consolidated\.\d+\.\w+|adapter_model\.\w+"
)
"""Names of a model's own weights: formats, precisions and shards."""

_WITHOUT_WEIGHTS = re.compile(
    r"(?:training_args|optimizer|scheduler|scaler|rng_state|random_states|zero_pp_rank|mp_rank)\w*\.(?:bin|pth?)"
    r"|vocab\.\w+"
)
"""Names of files from which a training continues, and of vocabularies."""

_FOLDERS_OF_FORMATS = frozenset({"coreml", "flax", "gguf", "mlx", "onnx", "openvino", "original", "tf", "tflite"})
"""Folders that hold the same model for other programs."""

_MOST_NAMED = 6

_SETFIT = "model_head"
"""Stem of SetFit's classifier of a sentence's vector."""


def unread_weights(checkpoint: Checkpoint, task: Task | None = None) -> Iterator[Message]:
    """A line for each kind of files whose tensors a bundle of a task, or for None an extended checkpoint, lacks."""
    unread = [file.relative_to(checkpoint.path) for file in _unread(checkpoint)]
    heads = {f"{name}{suffix}" for name in (bge_m3.SPARSE, bge_m3.COLBERT) for suffix in bge_m3.SUFFIXES}
    of_bge_m3 = [file for file in unread if str(file) in heads]
    of_setfit = [file for file in unread if file.stem == _SETFIT]
    if of_bge_m3 and task is not Task.HYBRID_SIMILARITY:
        yield (f"{_listed(of_bge_m3)}: BGE-M3's heads for sparse and token embeddings are not read. ", *bge_m3.HINT)
    for file in of_setfit:
        yield f"{file} is left out: a bundle gives the embeddings that the classifier takes, and not its labels."
    others = [file for file in unread if file not in (*of_bge_m3, *of_setfit)]
    if others:
        yield (
            f"{_listed(others)}: files of tensors that are neither the model's weights nor of a module in modules.json "
            "are not read. The outputs are those of the model without them."
        )


def _listed(files: list[Path]) -> str:
    return listing([shown(file) for file in files], limit=_MOST_NAMED)


def _unread(checkpoint: Checkpoint) -> Iterator[Path]:
    path = checkpoint.path
    read = {*checkpoint.weight_files()}
    names: set[str] | None = None
    for file in _files_of_tensors(path):
        if file in read or _WITHOUT_WEIGHTS.fullmatch(file.name):
            continue
        if _OF_THE_MODEL.fullmatch(file.name) and (file.parent == path or _has_better(file)):
            continue
        if file.suffix == ".safetensors":
            # Another precision or another shard of the same weights may have any name.
            names = {*stored_weights(sorted(read))} if names is None else names
            if _names(file) <= names:
                continue
        yield file


def _names(file: Path) -> set[str]:
    """Names of a file's tensors, or the file's name if the file is damaged: no bundle needs it."""
    try:
        return {*stored_weights((file,))}
    except ModelError:
        return {file.name}


def _has_better(file: Path) -> bool:
    """Whether a folder beside the model has the same weights in safetensors."""
    return file.suffix != ".safetensors" and next(file.parent.glob("*.safetensors"), None) is not None


def _files_of_tensors(path: Path) -> Iterator[Path]:
    """Files at the top, and in folders that are no module's, no adapter's and no other copy of a model."""
    read = {folder.partition("/")[0] for folder in module_folders(path)}
    for entry in sorted(path.iterdir()):
        if entry.is_file() and entry.suffix in _TENSORS:
            yield entry
        elif entry.is_dir() and entry.name not in read and not _is_of_another(entry):
            yield from sorted(file for file in entry.iterdir() if file.is_file() and file.suffix in _TENSORS)


def _is_of_another(folder: Path) -> bool:
    """Whether a folder is hidden, may not be read, or is an adapter's or a whole model's."""
    if folder.name.startswith(".") or folder.name in _FOLDERS_OF_FORMATS or not os.access(folder, os.R_OK | os.X_OK):
        return True
    if (folder / ADAPTER_CONFIG).is_file():
        return True
    try:
        return "model_type" in read_object(folder / "config.json", missing_ok=True)
    except ModelError:
        # A damaged file of a folder that no bundle needs.
        return False
