"""Modules after the model of a task: the modules that sentence-transformers puts there, with their weights."""

from __future__ import annotations

__all__ = ["task_head"]

from typing import TYPE_CHECKING, Protocol

from hdexport.checkpoint.module_chain import late_interaction_layers, pair_scores, sentence_vectors, token_layers
from hdexport.checkpoint.splade_pooling import splade_pooling
from hdexport.model.task import Task

if TYPE_CHECKING:
    from pathlib import Path

    from hdexport.checkpoint import Checkpoint
    from hdexport.checkpoint.trust import Trust
    from hdexport.model.head import Head


class _ReadChain(Protocol):
    def __call__(self, path: Path, *, hidden_size: int, trust: Trust) -> Head | None:
        """Read a checkpoint's modules; None where it has none for the task."""


_CHAINS: dict[Task, _ReadChain] = {
    Task.FEATURE_EXTRACTION: token_layers,
    Task.SENTENCE_SIMILARITY: sentence_vectors,
    Task.TOKEN_SIMILARITY: late_interaction_layers,
    Task.TEXT_CLASSIFICATION: pair_scores,
}


def task_head(checkpoint: Checkpoint, task: Task) -> Head | None:
    """The modules after the model that a bundle for a task computes; None where its outputs are the task's.

    Sentences' vectors and scores of pairs take all modules. Tokens' vectors are given as they are where a pooling
    follows, and take the modules of a chain without one.

    Args:
        checkpoint: whose modules they are.
        task: of the bundle.

    Raises:
        ModelError: a module or a setting of one is not supported, a file is missing, or widths do not fit.
    """
    if task is Task.SPARSE_SIMILARITY:
        return splade_pooling(checkpoint.path)
    read = _CHAINS.get(task)
    if read is None:
        return None
    hidden_size = checkpoint.family.token_width(checkpoint.settings())
    return read(checkpoint.path, hidden_size=hidden_size, trust=checkpoint.trust)
