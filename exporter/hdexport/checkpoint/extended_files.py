"""The files of a checkpoint with more positions, which `hdexport extend` and `hdexport tune` write.

The original's files are edited, so every weight that was not trained keeps every bit, with any heads and of any type.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hdexport.checkpoint.all_files import is_copied, rewrite_json, write_index, write_weights
from hdexport.checkpoint.checkpoint import Checkpoint
from hdexport.checkpoint.extension import EXTENSION_KEY, Extension, read_extension
from hdexport.checkpoint.sentence_modules import module_folders
from hdexport.checkpoint.weight_files import read_weights
from hdexport.model.positions import DEFAULT_ALPHA, extend_table
from hdruntime.bundle.manifest import Positions
from hdruntime.errors import ModelError, OutputExistsError

if TYPE_CHECKING:
    import torch

_POSITION_IDS = "embeddings.position_ids"
_TOKEN_TYPE_IDS = "embeddings.token_type_ids"
"""Ends of the names of buffers in files of older versions of transformers."""


def check_extendable(checkpoint: Checkpoint, output: Path) -> None:
    """Refuse a checkpoint without a table of positions, and an output that is the checkpoint.

    Raises:
        OutputExistsError: the output is the checkpoint itself.
        ModelError: the checkpoint is an adapter, or its positions are computed, from nothing or from several tables.
    """
    if checkpoint.origin == output.resolve():
        raise OutputExistsError(f"{output} is the checkpoint itself.\nChoose another directory with -o.")
    if checkpoint.adapter is not None:
        raise ModelError(
            f"{checkpoint.origin} holds an adapter, which a build merges, and no weights whose positions grow.\n"
            "Merge it with PEFT first: merge_and_unload(), then save_pretrained()."
        )
    origin = shlex.quote(str(checkpoint.origin))
    if not checkpoint.family.learned_positions:
        raise ModelError(
            f"{checkpoint.origin} is a {checkpoint.config['model_type']}: its positions are computed, not learned, so "
            "there is no table to extend.\n"
            f"Build it as it is, with the length that you need: hdexport build {origin} --max-len 16384"
        )
    if not checkpoint.family.stores_table(checkpoint.config):
        raise ModelError(
            f"{checkpoint.origin} is a {checkpoint.config['model_type']} whose positions are computed from several "
            "tables, so there is no table to extend.\n"
            f"A build makes one of them and extends it: hdexport build {origin} --max-len 16384"
        )


def extension_of(checkpoint: Checkpoint, positions: Positions) -> Extension | None:
    """The record of an extension; the checkpoint's own, if any, where no position is added.

    Raises:
        ModelError: the checkpoint's own record is malformed.
    """
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
    """Write a checkpoint with more positions into an empty directory.

    The table keeps the original's type. The limits in the configuration, the tokenizer and the sentence-transformers
    files grow with it.

    Args:
        checkpoint: the original.
        files: that hold its weights.
        positions: of the new checkpoint.
        extension: its record; None for none.
        directory: where to write.
        trained: names of weights in the PyTorch model, with the values that replace the file's; a table of positions
            among them has all rows of the new checkpoint.

    Raises:
        ModelError: weights and configuration do not agree, or a trained weight is not in the files.
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
            f"{checkpoint.family.position_table} is needed.\n"
            "Check that config.json belongs to the weights."
        )
    if len(files) > 1:
        write_index(file_of_weight, total_bytes, directory)


def _trained(name: str, trained: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """The trained value of a weight of the files, in which a head's encoder has a prefix."""
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
            f"{name} has {table.shape[0]} rows, and config.json says {checkpoint.family.positions_key} {rows}.\n"
            "The checkpoint is inconsistent; download it again."
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
        # One module's folder may stand in another's.
        shutil.copytree(source / folder, directory / folder, dirs_exist_ok=True)
    changes: dict[str, dict[str, object]] = {
        "config.json": {checkpoint.family.positions_key: positions.first_row + max_len},
        "tokenizer_config.json": {"model_max_length": max_len},
        "tokenizer.json": {"truncation": None},
        # One for each architecture: sentence_bert_config.json, sentence_roberta_config.json, ...
        **{file.name: {"max_seq_length": max_len} for file in source.glob("sentence_*_config.json")},
    }
    added = {} if extension is None else {EXTENSION_KEY: msgspec.to_builtins(extension)}
    for name, values in changes.items():
        rewrite_json(source / name, directory / name, values, added=added if name == "config.json" else {})
