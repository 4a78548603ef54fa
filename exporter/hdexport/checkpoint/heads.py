"""Modules after the model of a task: the modules that sentence-transformers puts there, with their weights."""

from __future__ import annotations

__all__ = ["task_head"]

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from hdexport.checkpoint.sentence_pooling import late_interaction_layers, pair_scores, sentence_pooling, token_layers
from hdexport.checkpoint.splade_pooling import splade_pooling
from hdexport.model.task import Task

if TYPE_CHECKING:
    from hdexport.model.head import Head


class _ReadHead(Protocol):
    def __call__(self, path: Path, *, hidden_size: int, allow_pickle: bool) -> Head | None:
        """Read a checkpoint's head; None where it has none."""


_HEADS: dict[Task, _ReadHead] = {
    Task.FEATURE_EXTRACTION: token_layers,
    Task.SENTENCE_SIMILARITY: sentence_pooling,
    Task.SPARSE_SIMILARITY: splade_pooling,
    Task.TOKEN_SIMILARITY: late_interaction_layers,
    Task.TEXT_CLASSIFICATION: pair_scores,
}


def task_head(path: Path, task: Task, *, hidden_size: int, allow_pickle: bool = False) -> Head | None:
    """The modules after the model that a bundle for a task computes; None where its outputs are the task's.

    Sentences' vectors and scores of pairs take all modules. Tokens' vectors are given as they are where a pooling
    follows, and take the modules of a chain without one.

    Args:
        path: of the checkpoint.
        task: of the bundle.
        hidden_size: width of the encoder's tokens.
        allow_pickle: also read weights that are stored as a pickle.

    Raises:
        ModelError: a module or a setting of one is not supported, a file is missing, or widths do not fit.
    """
    read = _HEADS.get(task)
    return None if read is None else read(path, hidden_size=hidden_size, allow_pickle=allow_pickle)
