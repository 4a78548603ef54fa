"""The Python code of a checkpoint's own model, which ``auto_map`` of ``config.json`` names, beside the class we build.

A bundle is made of a class of transformers or of hdexport, by the ``model_type``. Where the checkpoint's code may run,
both answer the same inputs, one after the other to save memory, and a difference is rejected.
"""

from __future__ import annotations

import copy
import gc
import inspect
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from hdexport.checkpoint.loading import free_of_reports
from hdexport.checkpoint.trust import Trust
from hdexport.families import SUPPORTED_MODEL_TYPES, Family, family_of, generic_family
from hdexport.model.family import ModelClasses
from hdexport.model.task import AUTO_CLASS_OF_TASK, model_class, model_task
from hdexport.support.json_files import shown
from hdruntime.bundle.manifest import Task
from hdruntime.errors import Message, ModelError, Setting, joined

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

    from hdexport.checkpoint import Checkpoint

logger = logging.getLogger(__package__)

_CONFIG_CLASS = "AutoConfig"

_SMALL_BYTES = 64 << 20
"""Weights of a model that may stay for a while if it refers to itself: a search for such takes a third of a second."""

_OUTPUTS = {
    Task.FEATURE_EXTRACTION: ("last_hidden_state",),
    Task.QUESTION_ANSWERING: ("start_logits", "end_logits"),
}
"""Task of a model -> its outputs that are compared, by their names in transformers; other tasks compare the logits."""

_LONGEST = 4096
"""Maximum tokens of the long text, which most windows and rotary scalings change: they begin at 512 or 2048 tokens.
BERT base takes 17 s of CPU time with PyTorch's attention, 32 s and 2.5 GB with eager code (AMD EPYC, 2026-11-28)."""

_MOST_VALUES = 2**25
"""Most values of a text's outputs, so logits of a vocabulary are compared for fewer tokens."""

_SHORT = (21, 8)
"""Tokens of two texts in one batch, with padding on either side."""

_SPECIAL_IDS = 4
"""Ids below this are in no text: in most vocabularies they are the special tokens."""

CODE_TOLERANCE = 1e-4
"""Largest difference, absolute or of the largest value; two programs of one model in float32 usually differ by 1e-6."""

CodeAnswers = list[list[np.ndarray[Any, Any]]]
"""The compared outputs of each batch of inputs."""

Padding = Literal["none", "right", "left"]


class _Texts(NamedTuple):
    """The texts of a batch: the tokens of each, and where the padding up to the longest one is."""

    lengths: tuple[int, ...]
    padding: Padding


@dataclass(frozen=True, kw_only=True)
class CodeCase:
    """A batch that the code and the class that a bundle is made of both answered.

    Attributes:
        lengths: tokens of each text.
        padding: where padding is in the batch.
        max_abs_error: largest difference; infinite for values that are not finite, and for other shapes.
        passed: whether the answers are the same.
        how: the difference, between "whose outputs" and the name of the class.
    """

    lengths: tuple[int, ...]
    padding: Padding
    max_abs_error: float
    passed: bool
    how: str


@dataclass(frozen=True, kw_only=True)
class ModelCode:
    """The code that ``auto_map`` names for a task.

    Attributes:
        key: the Auto class of transformers that it is named for: of the task's model, or ``AutoConfig``.
        reference: the class, as ``auto_map`` has it: ``module.Class``, after ``repository--`` where it is elsewhere.
        instead: name of the class that a bundle is made of, with its package.
        if_trusted: what happens where the code may run, as the end of a sentence.
    """

    key: str
    reference: str
    instead: str
    if_trusted: str

    @property
    def name(self) -> str:
        """The name of the class."""
        return self.reference.rpartition(".")[2]

    @property
    def named(self) -> str:
        """The class and where it is named, for messages."""
        return f"Python code for {self.key}: {shown(self.reference)} (auto_map of config.json)"

    @property
    def not_run(self) -> Message:
        """The sentences for a user who does not let the code run."""
        return (
            f"The checkpoint names {self.named}. It was not run: the outputs are those of {self.instead}. ",
            Setting("trust_remote_code", True),
            f" {self.if_trusted}.",
        )

    @property
    def hint(self) -> Message:
        """What a user may do where the answers differ, as a sentence."""
        return (
            f"For the outputs of {self.instead}, leave ",
            Setting("trust_remote_code"),
            f" out, or take {self.key} out of auto_map in config.json; for those of the code, choose a checkpoint "
            "whose model is in transformers.",
        )

    def _is_namesake(self) -> bool:
        """Whether the class has the name of the one that a bundle is made of, as code has that transformers adopted."""
        return self.name == self.instead.rpartition(" ")[2]

    def answers(self, checkpoint: Checkpoint, task: Task) -> CodeAnswers | None:
        """Loads the code's model, runs it, and forgets it. Code that cannot run is rejected; if it is a namesake of our
        class, this is None, with a warning. `task` is one of `AUTO_CLASS_OF_TASK`."""
        settings = checkpoint.settings()
        free_of_reports()
        model = None
        try:
            model = _loaded(checkpoint, task)
            return _answers(model, checkpoint, settings, task)
        except MemoryError:
            raise
        except Exception as error:
            # Code of the checkpoint's own, often of another version of transformers, fails in any way.
            failure = f"{checkpoint.path} names {self.named}, which cannot be run here: {shown(error)}"
            if self._is_namesake():
                logger.warning("%s. The outputs are those of %s, which was not compared.", failure, self.instead)
                return None
            raise ModelError(f"{failure}", hint=joined("Install what it needs. ", self.hint)) from error
        finally:
            is_small = model is not None and sum(weight.nbytes for weight in model.parameters()) < _SMALL_BYTES
            model = None
            if not is_small:
                gc.collect()

    def compare(self, answers: CodeAnswers, model: PreTrainedModel, checkpoint: Checkpoint, task: Task) -> str:
        """Compares the code's answers with those of the model that a bundle is made of, and rejects a difference; the
        result is a line that says that they are the same."""
        for case in self.cases(answers, model, checkpoint, task):
            if not case.passed:
                raise ModelError(
                    f"The checkpoint names {self.named}, whose outputs {case.how} of {self.instead}, which a bundle is "
                    f"made of.",
                    hint=self.hint,
                )
        return f"The outputs of {shown(self.reference)} (auto_map) are those of {self.instead}, as the bundle's are."

    def cases(
        self, answers: CodeAnswers, model: PreTrainedModel, checkpoint: Checkpoint, task: Task
    ) -> tuple[CodeCase, ...]:
        """Compares the code's answers with those of the model that a bundle is made of."""
        settings = checkpoint.settings()
        ours = _answers(_with_the_same_weights(model), checkpoint, settings, task)
        batches = zip(_texts(checkpoint, settings, task), answers, ours, strict=True)
        return tuple(_case(texts, theirs, own) for texts, theirs, own in batches)


def family_of_checkpoint(path: Path, config: Mapping[str, Any], trust: Trust) -> Family:
    """The family of a checkpoint by the ``model_type`` of its ``config.json``. Without one, the classes of its own code
    are built if they are trusted, else those of transformers; a ModelError says that there are neither."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type, named = str(config["model_type"]), _auto_map(config)
    family = family_of(model_type)
    if not family.is_generic:
        return family
    codes = {task: named[key] for task, key in AUTO_CLASS_OF_TASK.items() if key in named}
    if trust.trust_remote_code and codes and (model_type in CONFIG_MAPPING or _CONFIG_CLASS in named):
        try:
            settings = (
                _named_class(path, named[_CONFIG_CLASS]) if _CONFIG_CLASS in named else CONFIG_MAPPING[model_type]
            )
            models = {task: _named_class(path, reference) for task, reference in codes.items()}
        except MemoryError:
            raise
        except Exception as error:
            # Code of the checkpoint's own, often of another version of transformers, fails in any way.
            raise ModelError(
                f"{path} names Python code of its own (auto_map of config.json), which cannot be loaded here: "
                f"{shown(error)}",
                hint="Install what it needs.",
            ) from error
        return generic_family(ModelClasses(config=settings, models=models))
    if model_type not in CONFIG_MAPPING:
        hint: Message = (
            "Install the version that config.json names (transformers_version), or correct the type. Types with a "
            f"family: {', '.join(SUPPORTED_MODEL_TYPES)}."
        )
        if codes:
            hint = (
                f"The checkpoint has Python code of its own: {', '.join(map(shown, codes.values()))} (auto_map of "
                "config.json). Read it, and use ",
                Setting("trust_remote_code", True),
                " if you trust it.",
            )
        raise ModelError(
            f"hdexport has no family for the model type {model_type!r}, and transformers {transformers.__version__} no "
            "class.",
            hint=hint,
        )
    return family


def model_code(checkpoint: Checkpoint, task: Task) -> ModelCode | None:
    """The code that a checkpoint names for a task of `AUTO_CLASS_OF_TASK`; None where its library runs the class that
    we build."""
    named = _auto_map(checkpoint.config)
    if checkpoint.family.is_generic and checkpoint.family.classes is not None:
        # It is what a bundle is made of.
        return None
    for key in (AUTO_CLASS_OF_TASK[task], _CONFIG_CLASS):
        if key in named:
            try:
                kind = model_class(checkpoint.settings(), family=checkpoint.family, task=task)
            except KeyError:
                # There is no class, which is rejected where it is needed.
                return None
            package = "transformers'" if kind.__module__.startswith("transformers.") else "hdexport's"
            return ModelCode(
                key=key,
                reference=named[key],
                instead=f"{package} {kind.__name__}",
                if_trusted=(
                    "builds a bundle of that code"
                    if checkpoint.family.is_generic
                    else "runs both, and rejects a difference"
                ),
            )
    return None


def _auto_map(config: Mapping[str, Any]) -> dict[str, str]:
    named = config.get("auto_map")
    items = named.items() if isinstance(named, dict) else ()
    return {key: reference for key, reference in items if isinstance(reference, str) and "." in reference}


def _loaded(checkpoint: Checkpoint, task: Task) -> Any:
    """The model by the classes that ``auto_map`` names, as transformers loads it where we have registered nothing."""
    import torch
    import transformers

    path, named = checkpoint.path, _auto_map(checkpoint.config)

    config_kind = _named_class(path, named[_CONFIG_CLASS]) if _CONFIG_CLASS in named else transformers.AutoConfig
    config = config_kind.from_pretrained(path, local_files_only=True)
    auto_class = AUTO_CLASS_OF_TASK[task]
    model_kind = _named_class(path, named[auto_class]) if auto_class in named else getattr(transformers, auto_class)
    return model_kind.from_pretrained(path, config=config, local_files_only=True, dtype=torch.float32).eval()


def _named_class(path: Path, reference: str) -> Any:
    """A class of the code that ``auto_map`` names."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    # Code of another repository is downloaded, as its user trusts it.
    return get_class_from_dynamic_module(reference, str(path), local_files_only="--" not in reference)


def _with_the_same_weights(model: PreTrainedModel) -> Any:
    """A copy that shares the weights: some models, such as BigBird, keep state of earlier calls."""
    shared = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(weight): weight for weight in shared})


def _case(texts: _Texts, theirs: list[np.ndarray[Any, Any]], own: list[np.ndarray[Any, Any]]) -> CodeCase:
    """The first output that differs, else the largest error."""
    worst, where = 0.0, "" if texts.padding == "none" else f" with padding on the {texts.padding}"
    for wanted, got in zip(theirs, own, strict=True):
        if wanted.shape != got.shape:
            how = f"have the shape {list(wanted.shape)}, and {list(got.shape)} those"
            return CodeCase(**texts._asdict(), max_abs_error=math.inf, passed=False, how=how)
        error = float(np.abs(wanted - got).max())
        # The negation, because NaN is not within any bound.
        if not error <= CODE_TOLERANCE * max(1.0, float(np.abs(got).max())):
            how = f"for {max(texts.lengths)} tokens{where} differ by {error:.2g} from those"
            error = error if math.isfinite(error) else math.inf
            return CodeCase(**texts._asdict(), max_abs_error=error, passed=False, how=how)
        worst = max(worst, error)
    return CodeCase(**texts._asdict(), max_abs_error=worst, passed=True, how="are those")


def _texts(checkpoint: Checkpoint, settings: PreTrainedConfig, task: Task) -> list[_Texts]:
    """The texts of each batch. The longest text comes first: if a model keeps something of it, the answers to later
    batches differ."""
    longest = min(_LONGEST, checkpoint.base_positions)
    if task in (Task.FILL_MASK, Task.TEXT_SCORING):
        longest = min(longest, max(1, _MOST_VALUES // settings.vocab_size))
    short = tuple(min(tokens, longest) for tokens in _SHORT)
    alone = [_Texts((tokens,), "none") for tokens in (longest, *short, 1)]
    if settings.pad_token_id is None:
        # Classifiers find the end of a text by its padding.
        return alone
    return [alone[0], _Texts(short, "right"), _Texts(short, "left"), alone[-1]]


def _batches(checkpoint: Checkpoint, settings: PreTrainedConfig, task: Task) -> Iterator[dict[str, torch.Tensor]]:
    import torch

    padding = settings.pad_token_id
    ids = [number for number in range(settings.vocab_size) if number >= _SPECIAL_IDS and number != padding] or [0]
    generator = torch.Generator().manual_seed(0)
    for lengths, side in _texts(checkpoint, settings, task):
        shape = (len(lengths), max(lengths))
        place = torch.arange(shape[1])
        is_real = place < torch.tensor(lengths)[:, None]
        is_real = is_real.flip(1) if side == "left" else is_real
        text = torch.tensor(ids)[torch.randint(len(ids), shape, generator=generator)]
        batch = {"input_ids": torch.where(is_real, text, padding or 0), "attention_mask": is_real.long()}
        types: int = checkpoint.family.token_types or getattr(settings, "type_vocab_size", 0) or 0
        if model_task(task) is task and types > 1:
            batch["token_type_ids"] = ((place >= shape[1] // 2) & is_real).long()
        yield batch


def _answers(model: Any, checkpoint: Checkpoint, settings: PreTrainedConfig, task: Task) -> CodeAnswers:
    """A model's outputs for each batch, without those of padding."""
    import torch

    if task is Task.FEATURE_EXTRACTION and model.config.is_encoder_decoder:
        model = model.get_encoder()
    takes = inspect.signature(model.forward).parameters
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in takes.values())
    answers = []
    for batch in _batches(checkpoint, settings, task):
        with torch.inference_mode():
            result = model(**{name: values for name, values in batch.items() if takes_all or name in takes})
        names = _OUTPUTS.get(task, ("logits",))
        has_names = isinstance(result, Mapping) and names[0] in result
        outputs = [result[name] if has_names else result[place] for place, name in enumerate(names)]
        is_real = batch["attention_mask"].bool()
        if task is not Task.TEXT_CLASSIFICATION:
            # These outputs have a value for each token.
            outputs = [output[is_real] for output in outputs]
        answers.append([output.float().numpy() for output in outputs])
    return answers
