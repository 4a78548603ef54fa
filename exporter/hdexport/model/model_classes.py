"""Models with random weights, of the classes that load a family's checkpoints."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from hdexport.model.task import AUTO_CLASS_OF_TASK, model_task
from hdruntime.bundle.manifest import Task

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from hdexport.model.family import Family


def model_from_config(config: PreTrainedConfig, *, family: Family, task: Task, **options: Any) -> PreTrainedModel:
    """A model with random weights, of the class that loads checkpoints of a family for a task.

    The options are ``dtype`` and ``attn_implementation``, as ``AutoModel.from_config`` takes them.
    """
    # Classes of encoders change the configuration that they are given to an encoder's.
    config = copy.deepcopy(config)
    # A method that an Auto class calls of the class that it finds.
    model: PreTrainedModel = model_class(config, family=family, task=task)._from_config(config, **options)
    return model


def model_class(config: PreTrainedConfig, *, family: Family, task: Task) -> Any:
    """The class of transformers, or of ours, that loads a family's checkpoints for a task."""
    import transformers
    from transformers.models.auto.auto_factory import _get_model_class

    task = model_task(task)
    alone = family.encoder_classes.get(config.model_type) if task is Task.FEATURE_EXTRACTION else None
    if alone is not None:
        return getattr(transformers, alone)
    return _get_model_class(config, getattr(transformers, AUTO_CLASS_OF_TASK[task])._model_mapping)
