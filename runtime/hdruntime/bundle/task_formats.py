"""The outputs and settings that the manifest of a task's bundles must have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from hdruntime.bundle.manifest import Manifest, Task
from hdruntime.bundle.sentence_settings import Kind
from hdruntime.errors import Message, Setting


@dataclass(frozen=True, kw_only=True)
class TaskFormat:
    """The content of a task's bundles. `hdruntime.tasks` has what runs them, which is not needed to read a manifest.

    Attributes:
        output_axes: name of each output that a graph needs -> its axes. All outputs are float32. A graph may have other
            outputs, which are inputs of the next call. The axis ``hidden_size`` has the manifest's size.
        settings_kind: kind of the settings of sentence-transformers.
        needs_settings: whether the outputs are of no use without these settings.
        instead_of_embeddings: hint for a caller that asks for one embedding per text, where the task has none.
        problems: contradictions in a manifest that has the outputs; each begins with a key of the manifest.
    """

    output_axes: Mapping[str, tuple[str, ...]]
    settings_kind: Kind = "encoder"
    needs_settings: bool = False
    instead_of_embeddings: Message = (
        "Build it again with ",
        Setting("task", "feature-extraction", command="build"),
        " or ",
        Setting("task", "sentence-similarity", command="build"),
        ".",
    )
    problems: Callable[[Manifest], Iterator[str]] = lambda manifest: iter(())


def _sparse_problems(manifest: Manifest) -> Iterator[str]:
    size = next(spec.shape[-1] for spec in manifest.outputs if spec.name == "sparse_embedding")
    if size != manifest.vocab_size:
        yield f"outputs: float32 [batch, {size}] is not of the vocab_size {manifest.vocab_size}"


def _hybrid_problems(manifest: Manifest) -> Iterator[str]:
    size = next(spec.shape[-1] for spec in manifest.outputs if spec.name == "token_weights")
    if size != 1:
        yield f"outputs: token_weights has {size} weights for each token, not one"


_FORMATS: Mapping[Task, TaskFormat] = {
    Task.FEATURE_EXTRACTION: TaskFormat(output_axes={"last_hidden_state": ("batch", "tokens", "hidden_size")}),
    Task.SENTENCE_SIMILARITY: TaskFormat(
        output_axes={
            "last_hidden_state": ("batch", "tokens", "width"),
            "sentence_embedding": ("batch", "embedding_size"),
        }
    ),
    Task.SPARSE_SIMILARITY: TaskFormat(
        output_axes={"sparse_embedding": ("batch", "vocab_size")},
        settings_kind="sparse-encoder",
        problems=_sparse_problems,
    ),
    Task.TOKEN_SIMILARITY: TaskFormat(
        output_axes={"token_embeddings": ("batch", "tokens", "embedding_size")},
        settings_kind="multi-vector-encoder",
        needs_settings=True,
        instead_of_embeddings="A text has an embedding for each token: hdruntime.MultiVectorEncoder returns them.",
    ),
    Task.HYBRID_SIMILARITY: TaskFormat(
        output_axes={
            "sentence_embedding": ("batch", "embedding_size"),
            "token_weights": ("batch", "tokens", "weights"),
            "token_embeddings": ("batch", "tokens", "token_embedding_size"),
        },
        needs_settings=True,
        problems=_hybrid_problems,
    ),
    Task.FILL_MASK: TaskFormat(output_axes={"logits": ("batch", "tokens", "vocab_size")}),
    Task.TEXT_CLASSIFICATION: TaskFormat(output_axes={"logits": ("batch", "labels")}, settings_kind="cross-encoder"),
    Task.TOKEN_CLASSIFICATION: TaskFormat(output_axes={"logits": ("batch", "tokens", "labels")}),
    Task.QUESTION_ANSWERING: TaskFormat(
        output_axes={"start_logits": ("batch", "tokens"), "end_logits": ("batch", "tokens")}
    ),
    Task.TEXT_SCORING: TaskFormat(output_axes={"log_probabilities": ("batch", "tokens")}),
}


def format_of(task: Task) -> TaskFormat:
    return _FORMATS[task]
