"""The files of a Hugging Face checkpoint: which belong to it beside its weights, and how all are written."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from hdexport.checkpoint.sentence_modules import module_folders
from hdexport.support.json_files import read_object
from hdruntime.bundle.staging import DirectoryKind
from hdruntime.optional import require

if TYPE_CHECKING:
    import torch

_VOCABULARIES = ("vocab.txt", "merges.txt")
_LICENCES = ("LICENSE", "NOTICE")
_INDEX = "model.safetensors.index.json"

_NO_SPACE = f"os error {errno.ENOSPC}"
"""How safetensors, written in Rust, says that the disk is full."""


def is_copied(file: Path) -> bool:
    """Whether a file at the top of a checkpoint goes with it: settings, tokenizer, code and licence."""
    if not file.is_file() or file.name.endswith(".index.json"):
        return False
    suffixes = (".json", ".model", ".metadata", ".jinja", ".py")
    return file.suffix in suffixes or file.name in _VOCABULARIES or file.stem in _LICENCES


def write_weights(weights: Mapping[str, torch.Tensor], file: Path) -> None:
    """Write a safetensors file.

    Raises:
        OSError: the disk is full, or the file cannot be written for another reason.
    """
    safetensors = require("safetensors")
    from safetensors.torch import save_file

    file.touch()
    usual_mode = file.stat().st_mode
    try:
        save_file(dict(weights), file, metadata={"format": "pt"})
        # safetensors makes its files readable by the owner only.
        file.chmod(usual_mode)
    except safetensors.SafetensorError as error:
        if _NO_SPACE in str(error):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file)) from error
        raise OSError(errno.EIO, str(error), str(file)) from error


def write_index(file_of_weight: Mapping[str, str], total_bytes: int, directory: Path) -> None:
    """Write the index of a checkpoint whose weights are in several files."""
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(file_of_weight.items()))}
    (directory / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def rewrite_json(
    source: Path, target: Path, changes: Mapping[str, object], *, added: Mapping[str, object] | None = None
) -> None:
    """Write a JSON object with other values; values that are null or missing have no limit to raise and stay.

    Args:
        source: the file; where it is missing nothing is done.
        target: where to write it, if a value changes.
        changes: key -> value.
        added: key -> value, whether or not the file has the key.

    Raises:
        ModelError: the file holds no JSON object.
    """
    if not source.is_file():
        return
    values = read_object(source)
    changed = {key: value for key, value in changes.items() if values.get(key) is not None} | dict(added or {})
    if changed:
        target.write_text(json.dumps(values | changed, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _is_checkpoint(directory: Path) -> bool:
    try:
        config = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and isinstance(config.get("model_type"), str)


def _foreign_files(directory: Path) -> list[str]:
    """Files that no extended checkpoint has: a training's optimizer and logs, an ONNX graph, somebody's notes."""
    ours = {path for path in directory.iterdir() if is_copied(path) or path.suffix == ".safetensors"}
    ours.add(directory / _INDEX)
    for folder in module_folders(directory):
        ours.update((directory / folder).rglob("*"))
    files = {path for path in directory.rglob("*") if not path.is_dir()}
    return sorted(path.relative_to(directory).as_posix() for path in files - ours)


CHECKPOINT_DIRECTORY = DirectoryKind(
    name="Hugging Face checkpoint",
    marker="config.json",
    is_one=_is_checkpoint,
    foreign_files=_foreign_files,
)
"""The kind of directory that `hdexport extend` writes, and may replace."""
