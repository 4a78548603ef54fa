"""What the bundles of a task contain, as the task's class says."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import ClassVar

from hdruntime.bundle.manifest import Manifest, Task
from hdruntime.bundle.sentence_settings import Kind
from hdruntime.errors import BundleError
from hdruntime.optional import registered_tasks


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
    point = None if task in list(Task) else registered_tasks()[task]
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
