"""The tasks: the model and head that a checkpoint is loaded with, and the exporter's work for its answers."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from hdruntime.bundle.manifest import Task

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from hdexport.model.family import Family


@dataclass(frozen=True, kw_only=True)
class TaskTraits:
    """The exporter's facts about a task; the runtime has `hdruntime.bundle.task_formats`.

    Attributes:
        auto_class: class of ``transformers`` that loads a checkpoint for it; None where it is `made_of` another.
        made_of: the task whose model is run, before the modules of `hdexport.checkpoint.heads`; None for its own.
        architectures: endings of names of architectures that were made for it.
        has_labels: whether the checkpoint's ``id2label`` names its logits.
        vectors: whether texts or tokens have dense vectors, by which texts are compared; None for neither.
        reads_pairs: whether its texts are pairs (``must``), or may be (``may``); None for texts alone.
        pools_logits: whether its outputs are pooled of logits of all tokens, in graphs a block of tokens at a time:
            `hdexport.graph.passes.pool_in_blocks` has to find them.
    """

    auto_class: str | None = None
    made_of: Task | None = None
    architectures: tuple[str, ...] = ()
    has_labels: bool = False
    vectors: Literal["texts", "tokens"] | None = None
    reads_pairs: Literal["may", "must"] | None = None
    pools_logits: bool = False


TASKS: Mapping[Task, TaskTraits] = {
    Task.FEATURE_EXTRACTION: TaskTraits(
        auto_class="AutoModel",
        # A discriminator: it tells replaced tokens from real ones and fills no mask.
        architectures=("ElectraForPreTraining",),
        vectors="texts",
    ),
    Task.SENTENCE_SIMILARITY: TaskTraits(made_of=Task.FEATURE_EXTRACTION, vectors="texts"),
    Task.SPARSE_SIMILARITY: TaskTraits(made_of=Task.FILL_MASK, pools_logits=True),
    Task.TOKEN_SIMILARITY: TaskTraits(made_of=Task.FEATURE_EXTRACTION, vectors="tokens"),
    Task.HYBRID_SIMILARITY: TaskTraits(made_of=Task.FEATURE_EXTRACTION, vectors="texts"),
    Task.FILL_MASK: TaskTraits(
        auto_class="AutoModelForMaskedLM",
        architectures=("ForMaskedLM", "ForPreTraining"),
    ),
    Task.TEXT_CLASSIFICATION: TaskTraits(
        auto_class="AutoModelForSequenceClassification",
        architectures=("ForSequenceClassification",),
        has_labels=True,
        reads_pairs="may",
    ),
    Task.TOKEN_CLASSIFICATION: TaskTraits(
        auto_class="AutoModelForTokenClassification",
        architectures=("ForTokenClassification",),
        has_labels=True,
    ),
    Task.QUESTION_ANSWERING: TaskTraits(
        auto_class="AutoModelForQuestionAnswering",
        # XLNet's without a search of beams is named so.
        architectures=("ForQuestionAnswering", "ForQuestionAnsweringSimple"),
        reads_pairs="must",
    ),
    Task.TEXT_SCORING: TaskTraits(
        auto_class="AutoModelForCausalLM",
        architectures=("TransfoXLLMHeadModel",),
    ),
}

AUTO_CLASS_OF_TASK = {task: traits.auto_class for task, traits in TASKS.items() if traits.auto_class is not None}
"""Class of ``transformers`` that loads a checkpoint for a task; see `model_task` for the others."""

ENCODER_TASKS = tuple(task for task in AUTO_CLASS_OF_TASK if task is not Task.TEXT_SCORING)
"""The tasks of `AUTO_CLASS_OF_TASK` that encoders have, unless their family says otherwise."""

_ENCODER_CLASSES = {"longt5": "LongT5EncoderModel"}
"""Model type -> class that ``MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES`` lacks (transformers 5.23)."""

_HAS_HEAD = re.compile(r"For[A-Z]|LMHead|DoubleHeads")


def model_task(task: Task) -> Task:
    """The task of `AUTO_CLASS_OF_TASK` whose model of transformers is run for a task."""
    return TASKS[task].made_of or task


def infer_task(architectures: list[str], *, is_sentence_transformer: bool) -> Task:
    """The task that a checkpoint was made for.

    Args:
        architectures: the class names in its ``config.json``.
        is_sentence_transformer: whether it carries sentence-transformers' ``modules.json``.
    """
    if is_sentence_transformer:
        return Task.SENTENCE_SIMILARITY
    for architecture in architectures:
        for task, traits in TASKS.items():
            if architecture.endswith(traits.architectures):
                return task
    return Task.FEATURE_EXTRACTION


def unread_head(architectures: list[str]) -> str | None:
    """The class of a checkpoint that has a head from which no task is inferred, as a generator's; None for none.

    Args:
        architectures: see `infer_task`.
    """
    read = [suffix for traits in TASKS.values() for suffix in traits.architectures]
    if any(architecture.endswith(tuple(read)) for architecture in architectures):
        return None
    return next((name for name in architectures if _HAS_HEAD.search(name)), None)


def model_from_config(config: PreTrainedConfig, *, family: Family, task: Task, **options: Any) -> PreTrainedModel:
    """A model with random weights, of the class that loads checkpoints of a family for a task.

    The options are ``dtype`` and ``attn_implementation``, as ``AutoModel.from_config`` takes them.
    """
    # Classes of encoders change the configuration that they are given to an encoder's.
    config = copy.deepcopy(config)
    # A method that an Auto class calls of the class that it finds.
    return model_class(config, family=family, task=task)._from_config(config, **options)


def model_class(config: PreTrainedConfig, *, family: Family, task: Task) -> Any:
    """The class of transformers or hdexport that loads a family's checkpoints for a task; a KeyError if there is none.

    Encoders of models with a decoder have a class of their own, such as T5EncoderModel, if transformers has one.
    """
    import transformers
    from transformers.models.auto.auto_factory import _get_model_class

    task = model_task(task)
    if family.classes is not None and task in family.classes.models:
        return family.classes.models[task]
    if task is Task.FEATURE_EXTRACTION and not family.is_generic:
        name = _encoder_class(config.model_type)
        if name is not None:
            return getattr(transformers, name)
    return _get_model_class(config, getattr(transformers, AUTO_CLASS_OF_TASK[task])._model_mapping)


def _encoder_class(model_type: str) -> str | None:
    """Name of transformers' class that loads an encoder alone; None if there is none."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES

    return MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES.get(model_type, _ENCODER_CLASSES.get(model_type))


def tasks_with_class(config: PreTrainedConfig, *, family: Family) -> tuple[Task, ...]:
    """The tasks of `ENCODER_TASKS` that `model_class` has a class for."""
    tasks = []
    for task in ENCODER_TASKS:
        try:
            model_class(config, family=family, task=task)
        except KeyError:
            continue
        tasks.append(task)
    return tuple(tasks)


def supported_tasks(config: PreTrainedConfig, *, family: Family) -> tuple[Task, ...]:
    """The tasks that a model of a family can be built for."""
    with_model = tasks_with_class(config, family=family) if family.tasks is None else family.tasks
    return tuple(task for task in Task if model_task(task) in with_model)


def supports_sdpa(config: PreTrainedConfig, *, family: Family) -> bool:
    """Whether the model computes attention by PyTorch's scaled_dot_product_attention, or by its "eager" code."""
    kind = model_class(config, family=family, task=Task.FEATURE_EXTRACTION)
    # Only eager code caps scores.
    return bool(kind._supports_sdpa) and getattr(config, "attn_logit_softcapping", None) is None


def encoder_of(model: PreTrainedModel, task: Task) -> PreTrainedModel:
    """The encoder of a model with a decoder that was loaded for feature extraction; other models as they are."""
    config, is_encoder = model.config, type(model).__name__ == _encoder_class(model.config.model_type)
    if config.is_encoder_decoder and not is_encoder and model_task(task) is Task.FEATURE_EXTRACTION:
        return model.get_encoder()
    return model
