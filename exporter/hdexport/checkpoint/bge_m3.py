"""The files of BGE-M3's heads for sparse and token embeddings, beside the model's."""

from __future__ import annotations

from pathlib import Path

from hdruntime.bundle.manifest import Task
from hdruntime.errors import ModelError, Setting

SPARSE, COLBERT = "sparse_linear", "colbert_linear"
"""Names of the heads' files without their suffixes, as FlagEmbedding has them."""

SUFFIXES = (".safetensors", ".pt")
"""Suffixes of a head's file; FlagEmbedding writes the last one."""

_HEADS = {Task.SPARSE_SIMILARITY: SPARSE, Task.TOKEN_SIMILARITY: COLBERT}

HINT = ("Build the dense, sparse and token embeddings as one bundle: ", Setting("task", Task.HYBRID_SIMILARITY), ".")


def head_file(path: Path, name: str) -> Path | None:
    """The file of a checkpoint's head; None without one."""
    return next((file for suffix in SUFFIXES if (file := path / f"{name}{suffix}").is_file()), None)


def reject_head(path: Path, task: Task) -> None:
    """Reject a checkpoint with BGE-M3's head for a task, since a bundle of that task alone would have another head."""
    if (file := head_file(path, _HEADS[task])) is not None:
        raise ModelError(f"{path} has its head for {task} in {file.name}, beside two others.", hint=HINT)
