"""Loading a checkpoint's weights into the model that its ``config.json`` describes, both checked first."""

from __future__ import annotations

import functools
from collections.abc import Callable, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hdexport.checkpoint.agreement import Agreement, check_layers
from hdexport.checkpoint.multi_vector import PROJECTION
from hdexport.checkpoint.weight_files import read_weights, stored_weights
from hdexport.checkpoint.weight_names import as_loaded, unwrapping
from hdexport.families import Family
from hdexport.model.model_classes import model_from_config
from hdexport.support.json_files import several, shown
from hdexport.support.memory import says_out_of_memory
from hdruntime.bundle.task_formats import Task
from hdruntime.errors import ModelError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

    from hdexport.checkpoint import Checkpoint
    from hdexport.checkpoint.sentence_modules import LogitScore


_HEAD_WEIGHTS = {Task.TOKEN_SIMILARITY: (PROJECTION,)}
"""Task -> weights beside the model's that its head has."""


def load_model(
    checkpoint: Checkpoint,
    files: tuple[Path, ...],
    *,
    settings: PreTrainedConfig,
    task: Task,
    is_generator: bool,
    brought: Set[str],
    report: Callable[[str], None],
) -> PreTrainedModel:
    """The model for a task, all of it, in float32.

    Args:
        checkpoint: whose model it is.
        files: that hold its weights.
        settings: decide the model.
        task: decides the head.
        is_generator: load the family's generator, of which the head is made afterwards.
        brought: names of weights that an adapter brings, which the checkpoint may lack.
        report: takes a line that names the weights that the task does not need, if there are any.

    Raises:
        ModelError: weights and configuration do not agree, the task's head is missing, or a weight is not finite.
    """
    import torch

    free_of_reports()
    # A head's own weights are read with it.
    stored = {name: weight for name, weight in stored_weights(files).items() if name not in _HEAD_WEIGHTS.get(task, ())}
    path, family = checkpoint.path, checkpoint.family
    check_layers(path, stored, settings)
    made = functools.partial(_skeleton, checkpoint, task=Task.TEXT_SCORING if is_generator else task)
    skeleton = made(settings)
    names = unwrapping(stored, skeleton, path=path)
    if names.prefix:
        report(
            f"The names of the weights begin with {names.prefix}, which a wrapper of the model left; it is taken off."
        )
    stored = as_loaded({names.name(name): weight for name, weight in stored.items()}, skeleton)
    check_layers(path, stored, settings)
    agreement = Agreement(
        path=path,
        stored=stored,
        settings=settings,
        skeleton=skeleton,
        made=made,
        not_needed=_not_needed(family, task, is_generator=is_generator),
    )
    agreement.check()
    try:
        model, found = type(skeleton).from_pretrained(
            # No path: only checked files are read, and no adapter or other file that lies beside them.
            None,
            config=settings,
            state_dict={names.name(name): weight for file in files for name, weight in read_weights(file).items()},
            dtype=torch.float32,
            attn_implementation=_attention(family),
            output_loading_info=True,
        )
    except (MemoryError, ModelError):
        raise
    except Exception as error:
        if says_out_of_memory(str(error)):
            raise MemoryError(str(error)) from error
        raise ModelError(f"The checkpoint {path} could not be loaded: {shown(error)}\nDownload it again.") from error
    _check_missing(checkpoint, task, found["missing_keys"] - brought)
    _check_finite(path, model)
    if unused := agreement.unused():
        report(f"Not needed for {task}, and left out: {unused}.")
    return model


def free_of_reports() -> None:
    """Silence the library's own report of unused weights: our checks report the weights that matter."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def folded_vocabulary(generator: PreTrainedModel, score: LogitScore) -> torch.Tensor:
    """The one row that stands for a generator's vocabulary in a score.

    Args:
        generator: in float32.
        score: which logits.

    Returns:
        float32 [hidden_size], whose product with a token's vector is the score.

    Raises:
        ModelError: the generator has no such token.
    """
    head: Any = generator.get_output_embeddings()
    rows = head.weight.detach()
    for token_id in (score.true_token_id, score.false_token_id):
        if token_id is not None and token_id >= len(rows):
            raise ModelError(
                f"The checkpoint's LogitScore reads the logit of the token {token_id}, and the model has {len(rows)} "
                "tokens.\nSet true_token_id and false_token_id to ids of its tokenizer, or download the model again."
            )
    row: torch.Tensor = rows[score.true_token_id].clone()
    return row if score.false_token_id is None else row - rows[score.false_token_id]


def _not_needed(family: Family, task: Task, *, is_generator: bool) -> tuple[str, ...]:
    # A pooler is in no graph of ours but the classifier's, where BERT's head reads it. Families with a choice of tasks
    # are the encoders of larger models.
    pooler = () if task is Task.TEXT_CLASSIFICATION else ("pooler.",)
    others = () if family.tasks is None else ("decoder.",)
    return (*pooler, *others, *(() if is_generator else family.training_weights))


def _attention(family: Family) -> str:
    return "sdpa" if family.has_sdpa else "eager"


def _skeleton(checkpoint: Checkpoint, settings: PreTrainedConfig, *, task: Task) -> PreTrainedModel:
    """The model that the configuration describes, without memory for its weights."""
    import torch

    family = checkpoint.family
    try:
        with torch.device("meta"):
            return model_from_config(
                settings, family=family, task=task, dtype=torch.float32, attn_implementation=_attention(family)
            )
    except MemoryError:
        raise
    except Exception as error:
        # Sizes that do not fit each other fail wherever a module is made of them.
        raise ModelError(
            f"No {settings.model_type} can be made of {checkpoint.path / 'config.json'}: {shown(error)}\n"
            "Correct that value, or download the model's config.json again."
        ) from error


def _check_missing(checkpoint: Checkpoint, task: Task, keys: set[str]) -> None:
    optional = ("pooler.",) if task is not Task.TEXT_CLASSIFICATION else ()
    missing = sorted(key for key in keys if not any(part in key for part in optional))
    if missing:
        own = checkpoint.run_as(checkpoint.task())
        if own is task:
            # By config.json; the weights are of less than it names.
            remedy = "Download the checkpoint again" + (
                "." if task is Task.FEATURE_EXTRACTION else ", or build its encoder: --task feature-extraction"
            )
        else:
            remedy = f"Choose the task it was made for (--task {own.value}), or fine-tune it first."
        raise ModelError(
            f"{checkpoint.path} has no weights for {several(missing)}, which the task {task} needs.\n{remedy}"
        )


def _check_finite(path: Path, model: PreTrainedModel) -> None:
    # Smallest and largest in one pass that makes no temporary of a weight's size; NaN is both of them.
    extremes = {name: weight.detach().aminmax() for name, weight in model.named_parameters() if weight.numel()}
    wrong = [name for name, (low, high) in extremes.items() if not (low.isfinite() and high.isfinite())]
    if wrong:
        raise ModelError(
            f"{path} has weights that are NaN or infinite: {several(wrong)}.\n"
            "The file is damaged, or its training diverged; use another checkpoint."
        )
