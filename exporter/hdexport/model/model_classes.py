"""The classes of models: those that load a family's checkpoints for a task, and those that transformers lacks."""

from __future__ import annotations

__all__ = ["ModelClasses", "model_from_config"]

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hdexport.model.tasks import AUTO_CLASS_OF_TASK, Task, model_task
from hdruntime.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from hdexport.model.family import Family


@dataclass(frozen=True, kw_only=True)
class ModelClasses:
    """A model type's classes.

    Attributes:
        config: of its configuration, with the ``model_type``.
        models: task -> class of the model with the task's head.
    """

    config: type[PreTrainedConfig]
    models: Mapping[Task, type[PreTrainedModel]]

    def register(self) -> None:
        """Make transformers' Auto classes know them, so that checkpoints load as those of other types do.

        Raises:
            ModelError: transformers has classes for the type.
        """
        import transformers
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

        model_type = self.config.model_type
        if model_type in CONFIG_MAPPING_NAMES:
            raise ModelError(
                f"transformers {transformers.__version__} has the model type {model_type}, and this hdexport has "
                "classes of its own for it.\nUse a newer hdexport: pip install -U hdexport"
            )
        transformers.AutoConfig.register(model_type, self.config, exist_ok=True)
        for task, model in self.models.items():
            getattr(transformers, AUTO_CLASS_OF_TASK[task]).register(self.config, model, exist_ok=True)


def model_from_config(config: PreTrainedConfig, *, family: Family, task: Task, **options: Any) -> PreTrainedModel:
    """A model with random weights, of the class that loads checkpoints of a family for a task.

    Args:
        config: of the model.
        family: of the model.
        task: decides the head.
        options: ``dtype``, ``attn_implementation``, as ``AutoModel.from_config`` takes them.
    """
    import transformers

    # Classes of encoders change the configuration that they are given to that of an encoder.
    config = copy.deepcopy(config)
    model: PreTrainedModel
    task = model_task(task)
    alone = family.encoder_classes.get(config.model_type) if task is Task.FEATURE_EXTRACTION else None
    if alone is None:
        model = getattr(transformers, AUTO_CLASS_OF_TASK[task]).from_config(config, **options)
    else:
        # What an Auto class calls of the class that it finds.
        model = getattr(transformers, alone)._from_config(config, **options)
    return model
