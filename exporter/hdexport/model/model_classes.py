"""Classes of models that the installed transformers does not know, where its Auto classes find them."""

from __future__ import annotations

__all__ = ["ModelClasses"]

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hdexport.model.tasks import AUTO_CLASS_OF_TASK, Task
from hdruntime.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


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
