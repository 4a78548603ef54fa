"""Adapters that lie beside a checkpoint, a folder each, and their merging: LoRA as PEFT writes it.

A low-rank adapter adds ``scale * B A`` to a weight, for a few rows A [rank, inputs] and columns B [outputs, rank], and
is merged by that sum. Modules that were trained whole beside it (PEFT's ``modules_to_save``), such as a new head,
replace the model's. Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hdexport.checkpoint.weight_files import pickles_rejected, read_weights
from hdexport.support.json_files import read_object, shown
from hdruntime.errors import InputError, ModelError, Setting

if TYPE_CHECKING:
    import torch

ADAPTER_CONFIG = "adapter_config.json"
_WEIGHTS, _PICKLE = "adapter_model.safetensors", "adapter_model.bin"
_PREFIX = "base_model.model."
"""Precedes the name of the model's module in the names of an adapter's weights."""

_LORA = re.compile(r"(?P<module>.+)\.lora_(?:(?P<embedding>embedding)_)?(?P<factor>[AB])(?:\.weight)?")

_UNDERSTOOD = {
    *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights"),
    "modules_to_save",
    # About the training: the weights' names say them, too.
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout", "inference_mode"),
    *("auto_mapping", "base_model_name_or_path", "megatron_core", "peft_version", "revision", "task_type"),
    # How PEFT runs it.
    *("ephemeral_gpu_offload", "qalora_group_size", "runtime_config"),
}
"""Keys of an adapter's configuration with any value; others must be empty, false or "none"."""

_INITIALISATIONS = (True, False, None, "gaussian", "orthogonal", "eva")
"""Starts of a training that leave the model's weights as they are."""


def is_adapter(directory: Path) -> bool:
    """Whether a directory holds an adapter alone, without the weights of its model."""
    weights = (file for pattern in ("model*.safetensors", "pytorch_model*.bin") for file in directory.glob(pattern))
    return (directory / ADAPTER_CONFIG).is_file() and next(weights, None) is None


def adapters_of(directory: Path) -> tuple[str, ...]:
    """Names of a checkpoint's adapters: its folders with an ``adapter_config.json``."""
    return tuple(sorted(file.parent.name for file in directory.glob(f"*/{ADAPTER_CONFIG}")))


def adapter_named(directory: Path, name: str, names: Sequence[str]) -> str:
    """The adapter of that name, in which dots, hyphens and underscores are one: ``retrieval.passage`` is
    ``retrieval_passage``."""
    for known in names:
        if _plain(known) == _plain(name):
            return known
    if not names:
        raise InputError(
            Setting("adapter", name),
            f" names an adapter, and {directory} has none: no folder of it has an {ADAPTER_CONFIG}.",
            hint=("Leave ", Setting("adapter"), " out."),
        )
    raise InputError(
        Setting("adapter", name),
        f" is not among the adapters of {directory}.",
        hint=f"Choose from: {', '.join(names)}.",
    )


def saved_names(folder: Path, *, allow_pickle: bool = False) -> frozenset[str]:
    """Names of the weights by which an adapter replaces the model's, such as those of a head that the model lacks."""
    return frozenset(_read(folder, allow_pickle=allow_pickle)[2])


def merge_adapter(model: torch.nn.Module, folder: Path, *, allow_pickle: bool = False) -> None:
    """Adds an adapter to the weights of a float32 model, in place; weights that were trained whole replace
    the model's."""
    import torch

    config, factors, saved = _read(folder, allow_pickle=allow_pickle)
    with torch.no_grad():
        for (name, is_embedding), pair in factors.items():
            weight = _module(model, name, "weight", folder).weight
            if set(pair) != {"A", "B"}:
                raise ModelError(f"{folder} has one of two factors of {shown(name)}.", hint="Download the model again.")
            first, second = pair["A"].to(weight.dtype), pair["B"].to(weight.dtype)
            _check_shapes(folder, name, first, second, weight.T if is_embedding else weight)
            change = second @ first * _scale(folder, config, name, rank=len(first))
            weight += change.T if is_embedding else change
    for name, weight in saved.items():
        path, _, leaf = name.rpartition(".")
        module = _module(model, path, leaf, folder)
        own = getattr(module, leaf)
        if own.shape != weight.shape:
            raise ModelError(
                f"{folder} has {shown(name)} of shape {list(weight.shape)}, and the model's is {list(own.shape)}.",
                hint="Check that the adapter belongs to this model. The labels of a head are those of config.json "
                "(num_labels or id2label); a folder that holds an adapter alone takes a config.json of its own.",
            )
        # As in PEFT, a weight that was tied to it keeps the model's value.
        module.register_parameter(leaf, torch.nn.Parameter(weight.to(own.dtype)))


def _plain(name: str) -> str:
    return re.sub(r"[.-]", "_", name)


def _check(folder: Path, config: Mapping[str, Any]) -> None:
    """Rejects adapters that change weights in another way."""
    hint = "Merge it with PEFT first: merge_and_unload(), then save_pretrained()."
    if config.get("peft_type") != "LORA":
        raise ModelError(
            f"{folder / ADAPTER_CONFIG} has peft_type {shown(config.get('peft_type'))}; LORA fits.", hint=hint
        )
    start = config.get("init_lora_weights")
    others = {key: value for key, value in config.items() if key not in _UNDERSTOOD}
    unknown = {key: value for key, value in others.items() if value not in (None, False, "none", [], {})}
    if start not in _INITIALISATIONS:
        unknown["init_lora_weights"] = start
    saved = config.get("modules_to_save") or []
    if not (isinstance(saved, list) and all(isinstance(module, str) and module for module in saved)):
        unknown["modules_to_save"] = saved
    if unknown:
        key, value = next(iter(unknown.items()))
        raise ModelError(
            f"{folder / ADAPTER_CONFIG} has {shown(key)} {shown(value)}, which is not supported.", hint=hint
        )


def _weights_of(folder: Path, *, allow_pickle: bool) -> Path:
    for name in (_WEIGHTS, _PICKLE) if allow_pickle else (_WEIGHTS,):
        if (folder / name).is_file():
            return folder / name
    if (folder / _PICKLE).is_file():
        raise pickles_rejected(folder)
    raise ModelError(f"{folder} has no {_WEIGHTS}.", hint="Download the adapter again.")


def _read(
    folder: Path, *, allow_pickle: bool
) -> tuple[dict[str, Any], dict[tuple[str, bool], dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """An adapter's configuration; (name of a module, whether it is an embedding) -> factors; name -> whole weight."""
    config = read_object(folder / ADAPTER_CONFIG)
    _check(folder, config)
    file = _weights_of(folder, allow_pickle=allow_pickle)
    factors: dict[tuple[str, bool], dict[str, torch.Tensor]] = {}
    saved: dict[str, torch.Tensor] = {}
    for name, weight in read_weights(file).items():
        name = name.removeprefix(_PREFIX)
        match, is_finite = _LORA.fullmatch(name), weight.is_floating_point() and bool(weight.isfinite().all())
        if match is not None and weight.ndim == 2 and is_finite:
            factors.setdefault((match["module"], match["embedding"] is not None), {})[match["factor"]] = weight
        elif (
            match is None and is_finite and any(f"{module}." in name for module in config.get("modules_to_save") or ())
        ):
            saved[name] = weight
        else:
            raise ModelError(
                f"{file} holds {shown(name)}, which is no finite factor of a low-rank change, nor a finite weight of "
                "its modules_to_save.",
                hint="Merge the adapter with PEFT first: merge_and_unload(), then save_pretrained().",
            )
    if not factors:
        raise ModelError(f"{file} has no factors.", hint="Download the model again.")
    return config, factors, saved


def _module(model: Any, name: str, leaf: str, folder: Path) -> Any:
    """The module with a parameter, whose name may begin at the encoder or at the model with a head."""
    prefix = f"{model.base_model_prefix}."
    for root, path in ((model, name), (model.base_model, name), (model.base_model, name.removeprefix(prefix))):
        try:
            root.get_parameter(f"{path}.{leaf}")
        except AttributeError:
            continue
        return root.get_submodule(path)
    raise ModelError(
        f"{folder} changes {shown(name)}, which a {type(model).__name__} does not have.",
        hint=(
            "Check that the adapter belongs to this model, and that ",
            Setting("task"),
            " is the task that it was trained for.",
        ),
    )


def _check_shapes(folder: Path, name: str, first: torch.Tensor, second: torch.Tensor, weight: torch.Tensor) -> None:
    if len(first) != second.shape[1] or (len(second), first.shape[1]) != tuple(weight.shape):
        raise ModelError(
            f"{folder}: the factors of {shown(name)} are {list(second.shape)} and {list(first.shape)}, and its weight "
            f"is {list(weight.shape)}.",
            hint="Check that the adapter belongs to this model.",
        )


def _scale(folder: Path, config: Mapping[str, Any], name: str, *, rank: int) -> float:
    """Scale of a module's change: ``lora_alpha`` by the rank, or by the rank's root."""
    alpha = _of_module(config.get("alpha_pattern"), name, config.get("lora_alpha"))
    r = _of_module(config.get("rank_pattern"), name, config.get("r"))
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or r != rank:
        raise ModelError(
            f"{folder / ADAPTER_CONFIG} has lora_alpha {shown(alpha)} and r {shown(r)} for {shown(name)}, "
            f"whose factors have rank {rank}.",
            hint="Download the adapter again.",
        )
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _of_module(pattern: object, name: str, default: Any) -> Any:
    """The value of the first key that a module's name ends with, as PEFT reads it."""
    if isinstance(pattern, dict):
        for key, value in pattern.items():
            if re.fullmatch(rf"(.*\.)?({key})", name):
                return value
    return default
