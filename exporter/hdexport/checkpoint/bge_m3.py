"""BGE-M3's heads for sparse and token vectors, files beside the model that no bundle computes."""

from __future__ import annotations

from pathlib import Path

from hdruntime.bundle.manifest import Task
from hdruntime.errors import ModelError, Setting

HEADS = {Task.SPARSE_SIMILARITY: "sparse_linear.pt", Task.TOKEN_SIMILARITY: "colbert_linear.pt"}
"""Task -> the file of its head."""

HINT = (
    "Build the text embeddings (",
    Setting("task", Task.SENTENCE_SIMILARITY),
    "): examples/bge_m3.py (docs/examples.md) computes sparse and token embeddings from that bundle's outputs and "
    "these files.",
)


def reject_head(path: Path, task: Task) -> None:
    """Reject a checkpoint with BGE-M3's head for a task, since a bundle would have another head."""
    file = HEADS[task]
    if (path / file).is_file():
        raise ModelError(f"{path} has its head for {task} in {file}, which no bundle computes.", hint=HINT)
