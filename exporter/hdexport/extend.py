"""Writes a checkpoint with more positions as a Hugging Face directory, to be fine-tuned and then built.

The files are edited and the model is not loaded, so every weight but the position table keeps every bit, with any heads
and of any type.
"""

from __future__ import annotations

__all__ = ["ExtendOptions", "extend"]

import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hdexport.checkpoint import Checkpoint, find_checkpoint
from hdexport.checkpoint.all_files import (
    CHECKPOINT_DIRECTORY,
    is_copied,
    rewrite_json,
    write_index,
    write_weights,
)
from hdexport.checkpoint.sentence_modules import module_folders
from hdexport.checkpoint.weight_files import read_weights
from hdexport.model.positions import DEFAULT_ALPHA, Form, Scheme, check_options, extend_table
from hdexport.support.progress import Progress
from hdruntime.bundle.manifest import Positions
from hdruntime.bundle.staging import staged_directory
from hdruntime.errors import ModelError, OutputExistsError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_POSITION_IDS = "embeddings.position_ids"
_TOKEN_TYPE_IDS = "embeddings.token_type_ids"
"""Ends of the names of buffers in files of older versions of transformers."""


@dataclass(frozen=True, kw_only=True)
class ExtendOptions:
    """Which checkpoint is extended, and how.

    Attributes:
        model: a checkpoint's directory, or ``organisation/name`` on the Hugging Face hub, which ``@revision`` may
            follow.
        output: the directory to write.
        max_len: number of positions; fewer than the checkpoint's cut the table.
        scheme: source of the positions after the checkpoint's.
        alpha: weight of the coarse position in the hierarchical scheme.
        revision: on the hub: a branch, a tag or a commit.
        force: replace a checkpoint at `output`.
        allow_pickle: also read pickled weights.
    """

    model: str | Path
    output: Path
    max_len: int
    scheme: Scheme = Scheme.HIERARCHICAL
    alpha: float = DEFAULT_ALPHA
    revision: str | None = None
    force: bool = False
    allow_pickle: bool = False


def extend(options: ExtendOptions, progress: Progress | None = None) -> Positions:
    """Write a checkpoint with more positions.

    The table keeps the checkpoint's type, and its first rows every bit. The limits in the configuration, the
    tokenizer and the sentence-transformers files grow with it.

    Returns:
        The positions of the new checkpoint.

    Raises:
        HdexportError: one of `hdruntime.errors`; then nothing is written.
    """
    progress = progress or Progress()
    progress.step("Reading the checkpoint")
    checkpoint = find_checkpoint(options.model, revision=options.revision, allow_pickle=options.allow_pickle)
    if checkpoint.path == options.output.resolve():
        raise OutputExistsError(f"{options.output} is the checkpoint itself.\nChoose another directory with -o.")
    _refuse_computed_positions(checkpoint)
    base = checkpoint.base_positions
    check_options(scheme=options.scheme, alpha=options.alpha, max_len=options.max_len, base=base)
    positions = Positions(
        scheme=options.scheme.value,
        alpha=options.alpha if options.scheme is Scheme.HIERARCHICAL else None,
        base=base,
        rows=options.max_len,
        first_row=checkpoint.config[checkpoint.family.positions_key] - base,
        form=Form.FOLDED.value,
    )
    files = checkpoint.weight_files(allow_pickle=options.allow_pickle)
    with staged_directory(options.output, CHECKPOINT_DIRECTORY, force=options.force) as directory:
        progress.step(f"Extending positions to {options.max_len} ({options.scheme.value})")
        _write_weights(checkpoint, files, positions, directory)
        progress.step("Writing the configuration and the tokenizer")
        _write_rest(checkpoint, positions, directory)
    return positions


def _refuse_computed_positions(checkpoint: Checkpoint) -> None:
    if not checkpoint.family.learned_positions:
        raise ModelError(
            f"{checkpoint.path} is a {checkpoint.config['model_type']}: its positions are computed, not learned, so "
            "there is no table to extend.\n"
            f"Build it as it is, with the length that you need: hdexport build {checkpoint.path} --max-len 16384"
        )


def _write_weights(checkpoint: Checkpoint, files: tuple[Path, ...], positions: Positions, directory: Path) -> None:
    has_table = False
    file_of_weight: dict[str, str] = {}
    total_bytes = 0
    for file in files:
        name_stem = file.stem.replace("pytorch_model", "model") if len(files) > 1 else "model"
        weights = _read(file)
        for name, weight in weights.items():
            # A decoder may have a table, too, with as many rows by the same configuration key.
            if name.endswith(checkpoint.family.position_table):
                has_table = True
                _check_rows(checkpoint, name, weight)
                weights[name] = _extended(weight, positions)
            elif name.endswith((_POSITION_IDS, _TOKEN_TYPE_IDS)):
                weights[name] = _extended_ids(name, weight, positions)
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
        scheme=Scheme(positions.scheme),
        alpha=DEFAULT_ALPHA if positions.alpha is None else positions.alpha,
        first_row=positions.first_row,
    )
    return torch.from_numpy(extended.view("int16")).view(torch.bfloat16) if is_bfloat16 else torch.from_numpy(extended)


def _extended_ids(name: str, ids: torch.Tensor, positions: Positions) -> torch.Tensor:
    import torch

    rows = positions.first_row + positions.rows
    values = torch.arange(rows) if name.endswith(_POSITION_IDS) else torch.zeros(rows)
    return values.to(ids.dtype).expand(1, -1).contiguous()


def _write_rest(checkpoint: Checkpoint, positions: Positions, directory: Path) -> None:
    source, max_len = checkpoint.path, positions.rows
    for file in sorted(source.iterdir()):
        if is_copied(file):
            shutil.copyfile(file, directory / file.name)
    for folder in module_folders(source):
        shutil.copytree(source / folder, directory / folder)
    changes: dict[str, dict[str, object]] = {
        "config.json": {checkpoint.family.positions_key: positions.first_row + max_len},
        "tokenizer_config.json": {"model_max_length": max_len},
        "tokenizer.json": {"truncation": None},
        # One for each architecture: sentence_bert_config.json, sentence_roberta_config.json, ...
        **{file.name: {"max_seq_length": max_len} for file in source.glob("sentence_*_config.json")},
    }
    for name, values in changes.items():
        rewrite_json(source / name, directory / name, values)
