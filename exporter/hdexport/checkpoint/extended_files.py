"""The files of a checkpoint with more positions, which `hdexport extend` and `hdexport tune` write.

The original's files are edited, so every weight that was not trained keeps every bit, with any heads and of any type. A
note in ``config.json`` says how the positions were added.
"""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from hdexport.checkpoint.checkpoint import Checkpoint
from hdexport.checkpoint.sentence_modules import module_folders
from hdexport.checkpoint.tokenizer_files import TOKENIZER_CONFIG, settings_of_file
from hdexport.checkpoint.weight_files import read_weights
from hdexport.model.family import UnsupportedReason
from hdexport.model.positions import DEFAULT_ALPHA, extend_table
from hdexport.support.json_files import read_object
from hdruntime.bundle.checked_json import JsonMismatchError, Length, from_values
from hdruntime.bundle.manifest import AttentionScale, Positions, Scheme
from hdruntime.bundle.staging import DirectoryKind
from hdruntime.errors import ModelError, OutputExistsError
from hdruntime.optional import require

if TYPE_CHECKING:
    import torch

EXTENSION_KEY = "hdexport"
"""Key of the note in ``config.json``; transformers keeps it when it saves the model again."""

_VOCABULARIES = ("vocab.txt", "merges.txt")

_LICENCES = ("LICENSE", "NOTICE")

_INDEX = "model.safetensors.index.json"

_NO_SPACE = f"os error {errno.ENOSPC}"
"""safetensors, written in Rust, reports a full disk by this text."""

_POSITION_IDS = "embeddings.position_ids"

_TOKEN_TYPE_IDS = "embeddings.token_type_ids"
"""Ends of the names of buffers in files of older versions of transformers."""


@dataclass(frozen=True, kw_only=True)
class Extension:
    """How a checkpoint's positions were extended.

    Attributes:
        base: positions that the original checkpoint was trained with.
        scheme: where the other rows came from, before any training.
        alpha: weight of the coarse position in the hierarchical scheme; None for other schemes.
        attention_scale: factor of the queries with which the rows were trained.
        attention: value of the option `attention` with which the rows were trained; None for the model's own.
        tuned: whether `hdexport tune` trained the rows.
    """

    base: Length
    scheme: Scheme
    alpha: float | None = None
    attention_scale: AttentionScale = "none"
    attention: str | None = None
    tuned: bool = False


def read_extension(config: Mapping[str, Any], file: Path) -> Extension | None:
    """How a checkpoint was extended; None for one that was not. `file` is its ``config.json``, for messages."""
    values = config.get(EXTENSION_KEY)
    if values is None:
        return None
    try:
        return from_values(values, Extension, name=EXTENSION_KEY)
    except JsonMismatchError as error:
        raise ModelError(
            f"{file} has a malformed record of its extension: {error}.",
            hint=f'Remove "{EXTENSION_KEY}" from it, or extend the original checkpoint again.',
        ) from None


def is_copied(file: Path) -> bool:
    """Whether a file at the top of a checkpoint goes with it: settings, tokenizer, code and licence."""
    if not file.is_file() or file.name.endswith(".index.json"):
        return False
    suffixes = (".json", ".model", ".metadata", ".jinja", ".py")
    return file.suffix in suffixes or file.name in _VOCABULARIES or file.stem in _LICENCES


def write_weights(weights: Mapping[str, torch.Tensor], file: Path) -> None:
    """Writes a safetensors file; a full disk is an OSError, as for other files."""
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


def rewrite_json(
    source: Path, target: Path, changes: Mapping[str, object], *, added: Mapping[str, object] | None = None
) -> None:
    """Writes the JSON object of `source` to `target` with other values, if a value changes. Values that are null or
    missing have no limit to raise and stay; those of `added` are written in any case."""
    values = read_object(source, missing_ok=True)
    changed = {key: value for key, value in changes.items() if values.get(key) is not None} | dict(added or {})
    if changed:
        target.write_text(json.dumps(values | changed, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _is_checkpoint(directory: Path) -> bool:
    try:
        config = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and isinstance(config.get("model_type"), str)


def _other_files(directory: Path) -> list[str]:
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
    other_files=_other_files,
)
"""The kind of directory that `hdexport extend` writes, and may replace."""


def check_extendable(checkpoint: Checkpoint, output: Path) -> None:
    """Rejects a checkpoint without weights or table whose positions could grow, and an output that is the
    checkpoint."""
    if checkpoint.origin == output.resolve():
        raise OutputExistsError(f"{output} is the checkpoint itself.", hint="Choose another directory with -o.")
    if checkpoint.adapter is not None:
        raise ModelError(
            f"{checkpoint.origin} holds an adapter, which a build merges, and no weights whose positions grow.",
            hint="Merge it with PEFT first: merge_and_unload(), then save_pretrained().",
        )
    origin = shlex.quote(str(checkpoint.origin))
    if checkpoint.family.is_generic:
        raise ModelError(
            f"The positions of {checkpoint.origin}, a {checkpoint.config['model_type']}, cannot be changed. "
            f"{UnsupportedReason.NO_FAMILY}",
            hint=f"Build it as it is: hdexport build {origin}",
        )
    if not checkpoint.family.learned_positions:
        raise ModelError(
            f"{checkpoint.origin} is a {checkpoint.config['model_type']}: its positions are computed, not learned, so "
            "there is no table to extend.",
            hint=f"Build it as it is, with the length that you need: hdexport build {origin} --max-len 16384",
        )
    if not checkpoint.family.stores_table:
        raise ModelError(
            f"{checkpoint.origin} is a {checkpoint.config['model_type']} whose positions are computed from several "
            "tables, so there is no table to extend.",
            hint=f"A build makes one of them and extends it: hdexport build {origin} --max-len 16384",
        )


def extension_of(checkpoint: Checkpoint, positions: Positions) -> Extension | None:
    """The record of an extension; the checkpoint's own, if any, where no position is added."""
    before = read_extension(checkpoint.config, checkpoint.path / "config.json")
    if positions.rows <= positions.base:
        return before
    if before is not None:
        return replace(before, scheme=positions.scheme, alpha=positions.alpha)
    return Extension(base=positions.base, scheme=positions.scheme, alpha=positions.alpha)


def write_extended(
    checkpoint: Checkpoint,
    files: tuple[Path, ...],
    positions: Positions,
    extension: Extension | None,
    directory: Path,
    *,
    trained: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Writes a checkpoint with more positions into an empty directory. The table keeps its type, and limits in the
    files of the configuration, the tokenizer and sentence-transformers grow.

    `files` hold the original's weights. `trained` has values by the names of the PyTorch model's weights, which replace
    the files'; a table of positions among them has all rows of the new checkpoint.
    """
    _write_weights(checkpoint, files, positions, directory, trained or {})
    _write_rest(checkpoint, positions, extension, directory)


def _write_weights(
    checkpoint: Checkpoint,
    files: tuple[Path, ...],
    positions: Positions,
    directory: Path,
    trained: Mapping[str, torch.Tensor],
) -> None:
    has_table = False
    file_of_weight: dict[str, str] = {}
    total_bytes = 0
    for file in files:
        name_stem = file.stem.replace("pytorch_model", "model") if len(files) > 1 else "model"
        weights = _read(file)
        for name, weight in weights.items():
            of_training = _trained(name, trained)
            # A decoder may have a table, too, with as many rows by the same configuration key.
            if name.endswith(checkpoint.family.position_table):
                has_table = True
                _check_rows(checkpoint, name, weight)
                weights[name] = _extended(weight, positions) if of_training is None else of_training.to(weight.dtype)
            elif name.endswith((_POSITION_IDS, _TOKEN_TYPE_IDS)):
                weights[name] = _extended_ids(name, weight, positions)
            elif of_training is not None:
                weights[name] = of_training.to(weight.dtype)
        write_weights(weights, directory / f"{name_stem}.safetensors")
        file_of_weight |= dict.fromkeys(weights, f"{name_stem}.safetensors")
        total_bytes += sum(weight.nbytes for weight in weights.values())
    if not has_table:
        raise ModelError(
            f"{checkpoint.path} holds no position table; a weight whose name ends in "
            f"{checkpoint.family.position_table} is needed.",
            hint="Check that config.json belongs to the weights.",
        )
    if len(files) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(file_of_weight.items()))}
        (directory / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _trained(name: str, trained: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """The trained value of a weight of the files; names may have a prefix on either side."""
    for key, value in trained.items():
        if key == name or key.endswith(f".{name}") or name.endswith(f".{key}"):
            return value
    return None


def _read(file: Path) -> dict[str, torch.Tensor]:
    weights = read_weights(file)
    if file.suffix == ".safetensors":
        return weights
    import torch

    # A pickle shares tied weights; safetensors cannot, and needs each contiguous.
    return {name: weight.clone(memory_format=torch.contiguous_format) for name, weight in weights.items()}


def _check_rows(checkpoint: Checkpoint, name: str, table: torch.Tensor) -> None:
    rows = checkpoint.config[checkpoint.family.positions_key]
    if table.shape[0] != rows:
        raise ModelError(
            f"{name} has {table.shape[0]} rows, and config.json says {checkpoint.family.positions_key} {rows}.",
            hint="The checkpoint is inconsistent; download it again.",
        )


def _extended(table: torch.Tensor, positions: Positions) -> torch.Tensor:
    import ml_dtypes
    import torch

    # NumPy has no bfloat16; PyTorch can view it as integers.
    is_bfloat16 = table.dtype == torch.bfloat16
    rows = table.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if is_bfloat16 else table.numpy()
    extended = extend_table(
        rows,
        positions.rows,
        scheme=positions.scheme,
        alpha=DEFAULT_ALPHA if positions.alpha is None else positions.alpha,
        first_row=positions.first_row,
    )
    return torch.from_numpy(extended.view("int16")).view(torch.bfloat16) if is_bfloat16 else torch.from_numpy(extended)


def _extended_ids(name: str, ids: torch.Tensor, positions: Positions) -> torch.Tensor:
    import torch

    rows = positions.first_row + positions.rows
    values = torch.arange(rows) if name.endswith(_POSITION_IDS) else torch.zeros(rows)
    return values.to(ids.dtype).expand(1, -1).contiguous()


def _write_rest(checkpoint: Checkpoint, positions: Positions, extension: Extension | None, directory: Path) -> None:
    source, max_len = checkpoint.path, positions.rows
    for file in sorted(source.iterdir()):
        if is_copied(file):
            shutil.copyfile(file, directory / file.name)
    for folder in module_folders(source):
        # One module's folder may be inside another's.
        shutil.copytree(source / folder, directory / folder, dirs_exist_ok=True)
    changes: dict[str, dict[str, object]] = {
        "config.json": {checkpoint.family.positions_key: positions.first_row + max_len},
        TOKENIZER_CONFIG: {"model_max_length": max_len},
        "tokenizer.json": {"truncation": None},
        # One for each architecture: sentence_bert_config.json, sentence_roberta_config.json, ...
        **{file.name: {"max_seq_length": max_len} for file in source.glob("sentence_*_config.json")},
    }
    added: dict[str, dict[str, object]] = {}
    if extension is not None:
        added["config.json"] = {EXTENSION_KEY: msgspec.to_builtins(extension)}
    if checkpoint.tokenizer_source == "file":
        added[TOKENIZER_CONFIG] = settings_of_file(checkpoint.tokenizer)
    for name, values in changes.items():
        rewrite_json(source / name, directory / name, values, added=added.get(name))
