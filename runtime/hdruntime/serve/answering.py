"""The answers of a server: the task of its bundle, and the words of a request for texts of too many tokens."""

from __future__ import annotations

from typing import Any, Literal

from hdruntime.bundle.reader import Bundle
from hdruntime.errors import InputError
from hdruntime.tasks.embedding import Embedding
from hdruntime.tasks.sparse_similarity import SparseVectors
from hdruntime.tasks.task import TextTask
from hdruntime.tasks.text_classification import TextClassification, classification
from hdruntime.text.tokenization import Overflow

Truncate = Literal["error", "end", "split", "NONE", "END"]
"""The treatment of a text of too many tokens; the last two are Cohere's words for the first two."""

OVERFLOWS: dict[Truncate | bool, Overflow] = {
    "error": Overflow.ERROR,
    "end": Overflow.TRUNCATE,
    "split": Overflow.SPLIT,
    "NONE": Overflow.ERROR,
    "END": Overflow.TRUNCATE,
    False: Overflow.ERROR,
    True: Overflow.TRUNCATE,
}
"""The session's word for a request's."""


def served_task(bundle: Bundle) -> TextTask:
    """The task of a bundle that reads texts and answers with vectors, weights or scores.

    Raises:
        InputError: the bundle has no tokenizer, or another task.
    """
    manifest = bundle.manifest
    if manifest.tokenizer is None:
        raise InputError(f"The bundle {bundle.path} has no tokenizer.\nServe one that reads texts.")
    if manifest.task == "text-classification":
        return TextClassification(bundle)
    if manifest.task == "sparse-similarity":
        return SparseVectors(manifest)
    if manifest.task in ("sentence-similarity", "feature-extraction"):
        return Embedding(manifest)
    raise InputError(
        f"The bundle's task is {manifest.task}, which is not served.\n"
        "Serve embeddings, sparse vectors, or text-classification; or call hdruntime.load in a server of yours."
    )


def scores_of(logits: Any, task: TextClassification) -> list[float]:
    """The scores of the task's labels, in their order, by the model's own activation.

    Args:
        logits: float32 [labels], of a text.
        task: whose labels these are.
    """
    return list(classification(logits, task.labels, activation=task.activation).scores.values())
