"""Weights by the names and shapes that transformers loads them with, where the files have other code's names.

transformers renames and splits the weights of some model types while it loads them: NomicBERT's ``attn.Wqkv`` is three
projections there. Its own rules are applied to names and shapes alone.
"""

from __future__ import annotations

__all__ = ["as_loaded"]

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hdexport.checkpoint.weight_files import StoredWeight

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def as_loaded(stored: Mapping[str, StoredWeight], skeleton: PreTrainedModel) -> dict[str, StoredWeight]:
    """The weights that transformers makes of the files' weights; no weight is read.

    Args:
        stored: name -> type and shape of each weight in the files.
        skeleton: the model that loads them.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    rules = get_model_conversion_mapping(skeleton, add_legacy=False)
    converters = [rule for rule in rules if isinstance(rule, WeightConverter) and len(rule.source_patterns) == 1]
    renamings = [rule for rule in rules if not isinstance(rule, WeightConverter)]
    converter_of = {rule.source_patterns[0]: rule for rule in converters}
    loaded: dict[str, StoredWeight] = {}
    for name, weight in stored.items():
        renamed, pattern = rename_source_key(name, renamings, converters)
        parts = {renamed: weight} if pattern is None else _converted(renamed, weight, converter_of[pattern])
        for part, made in parts.items():
            # A name that is there already is the library's own: kept as it is, so that it is seen to be there twice.
            loaded[part if part not in loaded else name] = made
    return loaded


def _converted(name: str, weight: StoredWeight, converter: Any) -> dict[str, StoredWeight]:
    """The weights that a converter makes of a weight.

    Args:
        name: with the converter's first target in the place of its source.
        weight: as stored.
        converter: with one source.
    """
    import torch

    targets = converter.target_patterns
    tensors: dict[str, Any] = {converter.source_patterns[0]: torch.empty(weight.shape, device="meta")}
    for operation in converter.operations:
        tensors = operation.convert(
            tensors, source_patterns=converter.source_patterns, target_patterns=targets, full_layer_name=name
        )
    return {
        name.replace(targets[0], target, 1): replace(weight, shape=tuple(tensor.shape))
        for target, tensor in tensors.items()
    }
