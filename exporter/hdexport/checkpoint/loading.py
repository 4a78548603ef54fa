"""Loading a checkpoint's weights into the model that its ``config.json`` describes, both checked first.

Names in the files may have a prefix that a wrapper put before them, or be those of other code: transformers renames and
splits the weights of some model types while it loads them, such as NomicBERT's ``attn.Wqkv`` of three projections. Its
own rules are applied to names and shapes alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hdexport.checkpoint.agreement import Agreement, check_layers
from hdexport.checkpoint.multi_vector import PROJECTION
from hdexport.checkpoint.weight_files import StoredWeight, read_weights, stored_weights
from hdexport.checkpoint.weight_sizes import WeightSizes, sizes_of
from hdexport.families import Family
from hdexport.model.task import model_from_config, supports_sdpa
from hdexport.support.json_files import listing, shown
from hdexport.support.memory import says_out_of_memory
from hdruntime.bundle.manifest import Task
from hdruntime.errors import Message, ModelError, Setting

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from hdexport.checkpoint import Checkpoint

_HEAD_WEIGHTS = {Task.TOKEN_SIMILARITY: (PROJECTION,)}
"""Task -> weights among the model's that belong to its head."""


def load_model(
    checkpoint: Checkpoint,
    files: tuple[Path, ...],
    *,
    settings: PreTrainedConfig,
    task: Task,
    is_generator: bool,
    brought: Set[str],
    keeps_half: bool,
    check: Callable[[WeightSizes], None],
    report: Callable[[str], None],
) -> PreTrainedModel:
    """The model for a task, all of it, in float32, from files with its weights.

    Args:
        is_generator: load the family's generator, of which the head is made afterwards.
        brought: names of weights that an adapter brings, which the checkpoint may lack.
        keeps_half: keep large weights in the files' half precision, mapped; see `hdexport.model.half_weights`.
        check: rejects weights that do not fit in memory, before they are read.
        report: takes a line that names the weights that the task does not need, if there are any.
    """
    import torch

    from hdexport.model.half_weights import MappedWeights, halve_experts, kept_in_half

    free_of_reports()
    # The head's own weights are read with the head.
    stored = {name: weight for name, weight in stored_weights(files).items() if name not in _HEAD_WEIGHTS.get(task, ())}
    path, family = checkpoint.path, checkpoint.family
    check_layers(path, stored, settings)
    made = functools.partial(_skeleton, checkpoint, task=Task.TEXT_SCORING if is_generator else task)
    skeleton = made(settings)
    names = _unwrapping(stored, skeleton, path=path)
    if names.prefix:
        report(
            f"The names of the weights begin with {names.prefix}, which a wrapper of the model left; it is taken off."
        )
    in_files = {names.name(name): weight for name, weight in stored.items()}
    stored, converted = _as_loaded(in_files, skeleton)
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
    as_stored = {name: weight for name, weight in in_files.items() if name not in converted}
    stacked = {name: weight for name, weight in stored.items() if name not in as_stored}
    half = {name: weight.shape for name, weight in {**as_stored, **stacked}.items() if weight.is_half}
    can_be_half = kept_in_half(half)
    in_half = can_be_half if keeps_half else frozenset[str]()
    kept = in_half & as_stored.keys()
    check(
        sizes_of(
            path,
            _used(in_files, converted, skeleton),
            converted=converted,
            can_stay=can_be_half & as_stored.keys(),
            keeps_half=keeps_half,
            is_mapped=all(file.suffix == ".safetensors" for file in files),
        )
    )
    state = {names.name(name): weight for file in files for name, weight in read_weights(file).items()}
    weights = MappedWeights(state, kept=kept)
    try:
        model, found = type(skeleton).from_pretrained(
            # No path: only checked files are read, and no adapter or other file that lies beside them.
            None,
            config=settings,
            state_dict=weights.state_dict,
            dtype=torch.float32,
            attn_implementation=_attention_implementation(settings, family),
            output_loading_info=True,
        )
    except (MemoryError, ModelError):
        raise
    except Exception as error:
        if says_out_of_memory(str(error)):
            raise MemoryError(str(error)) from error
        raise ModelError(
            f"The checkpoint {path} could not be loaded: {shown(error)}", hint="Download it again."
        ) from error
    weights.put_into(model)
    halve_experts(model, {name: getattr(torch, stacked[name].dtype) for name in in_half - kept})
    _check_missing(checkpoint, task, found["missing_keys"] - brought)
    _check_finite(path, model)
    if unused := agreement.unused():
        report(f"Left out of the bundle, because {task} does not use them: {unused}")
    return model


def _used(
    in_files: Mapping[str, StoredWeight], converted: Set[str], skeleton: PreTrainedModel
) -> dict[str, StoredWeight]:
    """The weights in files that a model takes, with or without the prefix of its encoder's names."""
    keys, own = skeleton.state_dict().keys(), f"{skeleton.base_model_prefix}."
    return {
        name: weight
        for name, weight in in_files.items()
        if name in converted or not keys.isdisjoint({name, own + name, name.removeprefix(own)})
    }


def free_of_reports() -> None:
    """Silence transformers' report of unused weights, because our checks report those that matter."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


class _Unwrapping(NamedTuple):
    """How names in a file become the model's: `prefix` was put before them by a wrapper, and `instead` is the prefix
    that a model with a head has there."""

    prefix: str = ""
    instead: str = ""

    def name(self, stored: str) -> str:
        """The model's name of a weight."""
        return self.instead + stored.removeprefix(self.prefix) if stored.startswith(self.prefix) else stored


def _unwrapping(names: Collection[str], skeleton: PreTrainedModel, *, path: Path) -> _Unwrapping:
    """How the names of weights become the skeleton's; nothing changes where one of the encoder's names fits
    as it is."""
    own = f"{skeleton.base_model_prefix}."
    # A pooler is optional, and buffers were not always stored.
    keys = {name for name, _ in skeleton.base_model.named_parameters() if not name.startswith("pooler.")}
    if any(name.removeprefix(own) in keys for name in names):
        return _Unwrapping()
    has_head = skeleton.base_model is not skeleton
    for keys_in_file, instead in (({own + key for key in keys}, ""), (keys, own)) if has_head else ((keys, ""),):
        prefixes = _prefixes(names, keys_in_file)
        if len(prefixes) > 1:
            raise ModelError(
                f"{path} holds the weights of several models, whose names begin with {' and '.join(prefixes)}.",
                hint="Keep one model's weights: load the file, select them, and save them with save_pretrained().",
            )
        if prefixes:
            return _Unwrapping(prefix=prefixes[0], instead=instead)
    return _Unwrapping()


def _as_loaded(
    stored: Mapping[str, StoredWeight], skeleton: PreTrainedModel
) -> tuple[dict[str, StoredWeight], frozenset[str]]:
    """The weights that transformers makes of the files' weights, name -> type and shape, and the names of the files'
    weights that it computes with; no weight is read.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    rules = get_model_conversion_mapping(skeleton, add_legacy=False)
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    renamings = [rule for rule in rules if not isinstance(rule, WeightConverter)]
    converter_of = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    loaded: dict[str, StoredWeight] = {}
    merged: dict[str, dict[str, dict[str, StoredWeight]]] = {}
    for name, weight in stored.items():
        renamed, pattern = rename_source_key(name, renamings, converters)
        if pattern is None:
            # A name that exists already is transformers' own; keeping this one shows that the weight is there twice.
            loaded[renamed if renamed not in loaded else name] = weight
        else:
            merged.setdefault(renamed, {}).setdefault(pattern, {})[name] = weight
    for renamed, sources in merged.items():
        names = [name for weights in sources.values() for name in weights]
        for part, made in _converted(renamed, sources, converter_of[next(iter(sources))], skeleton).items():
            loaded[part if part not in loaded else names[0]] = made
    return loaded, frozenset(name for sources in merged.values() for weights in sources.values() for name in weights)


def _not_needed(family: Family, task: Task, *, is_generator: bool) -> tuple[str, ...]:
    # A pooler is in no graph of ours but the classifier's, where BERT's head reads it. Families with a choice of tasks
    # are the encoders of larger models.
    pooler = () if task is Task.TEXT_CLASSIFICATION else ("pooler.",)
    others = () if family.tasks is None else ("decoder.",)
    return (*pooler, *others, *(() if is_generator else family.training_weights))


def _attention_implementation(settings: PreTrainedConfig, family: Family) -> str:
    return "sdpa" if supports_sdpa(settings, family=family) else "eager"


def _skeleton(checkpoint: Checkpoint, settings: PreTrainedConfig, *, task: Task) -> PreTrainedModel:
    """The model that the configuration describes, without memory for its weights."""
    import torch

    family = checkpoint.family
    try:
        with torch.device("meta"):
            return model_from_config(
                settings,
                family=family,
                task=task,
                dtype=torch.float32,
                attn_implementation=_attention_implementation(settings, family),
            )
    except MemoryError:
        raise
    except Exception as error:
        # Sizes that do not fit each other fail wherever a module is made of them.
        raise ModelError(
            f"No {settings.model_type} can be made of {checkpoint.path / 'config.json'}: {shown(error)}",
            hint="Correct that value, or download the model's config.json again.",
        ) from error


def _check_missing(checkpoint: Checkpoint, task: Task, keys: set[str]) -> None:
    optional = ("pooler.",) if task is not Task.TEXT_CLASSIFICATION else ()
    missing = sorted(key for key in keys if not any(part in key for part in optional))
    if missing:
        own = checkpoint.run_as(checkpoint.task())
        if own is task:
            # config.json names the task, and the weights lack its head.
            hint: Message = "Download the checkpoint again."
            if task is not Task.FEATURE_EXTRACTION:
                hint = ("Download the checkpoint again, or build its encoder: ", Setting("task", "feature-extraction"))
        else:
            hint = ("Choose the task it was made for (", Setting("task", own), "), or fine-tune it first.")
        raise ModelError(
            f"{checkpoint.path} has no weights for {listing(missing)}, which the task {task} needs.", hint=hint
        )


def _check_finite(path: Path, model: PreTrainedModel) -> None:
    # One pass for both ends, without a temporary of a weight's size; with a NaN both are NaN.
    extremes = {name: weight.detach().aminmax() for name, weight in model.named_parameters() if weight.numel()}
    wrong = [name for name, (low, high) in extremes.items() if not (low.isfinite() and high.isfinite())]
    if wrong:
        raise ModelError(
            f"{path} has weights that are NaN or infinite: {listing(wrong)}.",
            hint="The file is damaged, or its training diverged; use another checkpoint.",
        )


def _prefixes(names: Collection[str], keys: Collection[str]) -> list[str]:
    """Prefixes, without their dot, that the names have before every one of the keys."""
    first = min(keys)
    candidates = sorted(name.removesuffix(first) for name in names if name.endswith(f".{first}"))
    return [prefix for prefix in candidates if all(prefix + key in names for key in keys)]


def _converted(
    name: str, sources: Mapping[str, Mapping[str, StoredWeight]], converter: Any, skeleton: PreTrainedModel
) -> Mapping[str, StoredWeight]:
    """The weights that a converter makes of files' weights, by the converter's patterns and by name.

    `name` has the converter's first target already. Weights that lack some for the converter, or do not fit each other,
    stay as they are.
    """
    import torch

    targets = converter.target_patterns
    stored = {stored_name: weight for weights in sources.values() for stored_name, weight in weights.items()}
    tensors: dict[str, Any] = {
        pattern: [torch.empty(weight.shape, device="meta") for weight in weights.values()]
        for pattern, weights in sources.items()
    }
    if set(tensors) != set(converter.source_patterns):
        return stored
    try:
        for operation in converter.operations:
            tensors = operation.convert(
                tensors,
                source_patterns=converter.source_patterns,
                target_patterns=targets,
                full_layer_name=name,
                model=skeleton,
                config=skeleton.config,
            )
    except RuntimeError:
        return stored
    first = min(stored.values(), key=lambda weight: weight.is_floating)
    return {
        name.replace(targets[0], target, 1): replace(first, shape=tuple(tensor.shape))
        for target, tensor in tensors.items()
    }
