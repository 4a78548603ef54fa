"""What the bundles of each task contain, which a manifest is checked against."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from hdruntime.bundle.manifest import Manifest, Task
from hdruntime.bundle.sentence_settings import Kind
from hdruntime.errors import BundleError
from hdruntime.optional import registered_tasks


class TaskFormat:
    """The content of a task's bundles; every task's class, a `hdruntime.tasks.task.TextTask`, is one, too.

    A built-in task has a subclass here, of which its class is made: reading a manifest must not load what runs it.

    Attributes:
        name: in the manifest.
        output_axes: name of each output that a graph needs -> its axes. All outputs are float32; a graph may have
            others beside these, which are inputs of the next call. An axis ``hidden_size`` is the manifest's.
        settings_kind: of its settings of sentence-transformers.
        needs_settings: whether nothing can be made of its outputs without them.
        instead_of_embeddings: advice to who asks for a vector for each text, where it has none.
    """

    name: ClassVar[str]
    output_axes: ClassVar[Mapping[str, tuple[str, ...]]]
    settings_kind: ClassVar[Kind] = "encoder"
    needs_settings: ClassVar[bool] = False
    instead_of_embeddings: ClassVar[str] = (
        "Build it again with --task feature-extraction or --task sentence-similarity."
    )

    @classmethod
    def problems(cls, manifest: Manifest) -> Iterator[str]:
        """Contradictions in a manifest that has the outputs, which the facts above do not show; begin with a key."""
        yield from ()


class FeatureExtractionFormat(TaskFormat):
    name = Task.FEATURE_EXTRACTION
    output_axes: ClassVar = {"last_hidden_state": ("batch", "tokens", "hidden_size")}


class SentenceSimilarityFormat(TaskFormat):
    name = Task.SENTENCE_SIMILARITY
    output_axes: ClassVar = {
        "last_hidden_state": ("batch", "tokens", "width"),
        "sentence_embedding": ("batch", "embedding_size"),
    }


class SparseSimilarityFormat(TaskFormat):
    name = Task.SPARSE_SIMILARITY
    output_axes: ClassVar = {"sparse_embedding": ("batch", "vocab_size")}
    settings_kind = "sparse-encoder"

    @classmethod
    def problems(cls, manifest: Manifest) -> Iterator[str]:
        output = next(spec for spec in manifest.outputs if spec.name in cls.output_axes)
        if output.shape[-1] != manifest.vocab_size:
            yield f"outputs: float32 [batch, {output.shape[-1]}] is not of the vocab_size {manifest.vocab_size}"


class TokenSimilarityFormat(TaskFormat):
    name = Task.TOKEN_SIMILARITY
    output_axes: ClassVar = {"token_embeddings": ("batch", "tokens", "embedding_size")}
    settings_kind = "multi-vector-encoder"
    needs_settings = True
    instead_of_embeddings = "A text has a vector for each token: hdruntime.MultiVectorEncoder gives them."


class FillMaskFormat(TaskFormat):
    name = Task.FILL_MASK
    output_axes: ClassVar = {"logits": ("batch", "tokens", "vocab_size")}


class TextClassificationFormat(TaskFormat):
    name = Task.TEXT_CLASSIFICATION
    output_axes: ClassVar = {"logits": ("batch", "labels")}
    settings_kind = "cross-encoder"


class TokenClassificationFormat(TaskFormat):
    name = Task.TOKEN_CLASSIFICATION
    output_axes: ClassVar = {"logits": ("batch", "tokens", "labels")}


class QuestionAnsweringFormat(TaskFormat):
    name = Task.QUESTION_ANSWERING
    output_axes: ClassVar = {"start_logits": ("batch", "tokens"), "end_logits": ("batch", "tokens")}


class TextScoringFormat(TaskFormat):
    name = Task.TEXT_SCORING
    output_axes: ClassVar = {"log_probabilities": ("batch", "tokens")}


_FORMATS = {kind.name: kind for kind in TaskFormat.__subclasses__()}


def format_of(task: Task) -> type[TaskFormat]:
    """The format of a task: one of those above, or the class that another package registers."""
    if task in _FORMATS:
        return _FORMATS[task]
    point = registered_tasks()[task]
    try:
        return point.load()
    except Exception as error:
        raise BundleError(
            f"The task {task} ({point.value}) cannot be loaded: {type(error).__name__}: {error}.",
            hint="Update the package that it comes from, or install it again.",
        ) from error
