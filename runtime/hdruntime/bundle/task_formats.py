"""The tasks' names, and what their bundles contain, as the class of each task says."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

from hdruntime.bundle.checked_json import Choice
from hdruntime.bundle.sentence_settings import Kind
from hdruntime.errors import BundleError
from hdruntime.optional import entry_points_of

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from hdruntime.bundle.manifest import Manifest

_ENTRY_POINTS = "hdexport.tasks"
"""Group in which other packages register the classes of theirs, by the tasks' names."""


class Task(Choice):
    """The task of a bundle, by the name in Hugging Face optimum, where it has one.

    The tasks of other packages are members, too, which `Task(name)` finds; they are not among those that are listed.
    """

    FEATURE_EXTRACTION = "feature-extraction"
    SENTENCE_SIMILARITY = "sentence-similarity"
    SPARSE_SIMILARITY = "sparse-similarity"
    """A weight for each token of the vocabulary, pooled of the logits of a text's tokens, as SPLADE has it."""
    TOKEN_SIMILARITY = "token-similarity"
    """A vector for each token, as ColBERT has it."""
    FILL_MASK = "fill-mask"
    TEXT_CLASSIFICATION = "text-classification"
    TOKEN_CLASSIFICATION = "token-classification"
    QUESTION_ANSWERING = "question-answering"
    TEXT_SCORING = "text-scoring"
    """The log-probability of each token after the tokens before it."""

    @classmethod
    def _missing_(cls, value: object) -> Task | None:
        if not isinstance(value, str) or value not in registered():
            return None
        member = str.__new__(cls, value)
        member._name_ = member._value_ = value
        return member


class TaskFormat:
    """The content of a task's bundles; every task's class, a `hdruntime.tasks.task.TextTask`, is one.

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


def format_of(task: Task) -> type[TaskFormat]:
    """The class of a task: `TASK` of the file of ``hdruntime/tasks`` with its name, or another package's entry point.

    It is loaded here and not imported, because it reads manifests, which lie below it.
    """
    point = registered().get(task)
    if point is None:
        module = importlib.import_module(f"hdruntime.tasks.{task.replace('-', '_')}")
        return module.TASK
    try:
        return point.load()
    except Exception as error:
        raise BundleError(
            f"The task {task} ({point.value}) cannot be loaded: {type(error).__name__}: {error}.\n"
            "Update the package that it comes from, or install it again."
        ) from error


@functools.cache
def registered() -> dict[str, EntryPoint]:
    """The tasks of other packages: name -> where their class is."""
    return {name: point for name, point in entry_points_of(_ENTRY_POINTS).items() if name not in list(Task)}
