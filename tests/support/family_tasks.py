"""The tasks of a model type."""

from __future__ import annotations

from transformers import CONFIG_MAPPING

from hdexport.families import family_of
from hdexport.model.task import supported_tasks
from hdruntime.bundle.manifest import Task


def tasks_of(model_type: str) -> tuple[Task, ...]:
    """The tasks that models of a type can be built for."""
    family = family_of(model_type)
    return supported_tasks(CONFIG_MAPPING[model_type](), family=family)
