"""Names of weights that are not the model's: with a prefix that a wrapper put before them, or of other code.

transformers renames and splits the weights of some model types while it loads them: NomicBERT's ``attn.Wqkv`` is three
projections there. Its own rules are applied to names and shapes alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hdexport.checkpoint.weight_files import StoredWeight
from hdruntime.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class Unwrapping:
    """How names in a file become the model's.

    Attributes:
        prefix: put before them by a wrapper; empty where it put nothing.
        instead: the prefix that a model with a head has in that place.
    """

    prefix: str = ""
    instead: str = ""

    def name(self, stored: str) -> str:
        """The model's name of a weight."""
        return self.instead + stored.removeprefix(self.prefix) if stored.startswith(self.prefix) else stored


def unwrapping(names: Collection[str], skeleton: PreTrainedModel, *, path: Path) -> Unwrapping:
    """How the names of weights become a model's, which changes nothing where one of the encoder's fits as it is.

    Args:
        names: of the weights in the files.
        skeleton: the model that loads them.
        path: of the checkpoint, for messages.

    Raises:
        ModelError: the files hold several such models.
    """
    own = f"{skeleton.base_model_prefix}."
    # A pooler is optional, and buffers were not always stored.
    keys = {name for name, _ in skeleton.base_model.named_parameters() if not name.startswith("pooler.")}
    if any(name.removeprefix(own) in keys for name in names):
        return Unwrapping()
    has_head = skeleton.base_model is not skeleton
    for keys_in_file, instead in (({own + key for key in keys}, ""), (keys, own)) if has_head else ((keys, ""),):
        prefixes = _prefixes(names, keys_in_file)
        if len(prefixes) > 1:
            raise ModelError(
                f"{path} holds the weights of several models, whose names begin with {' and '.join(prefixes)}.\n"
                "Keep one model's weights: load the file, select them, and save them with save_pretrained()."
            )
        if prefixes:
            return Unwrapping(prefix=prefixes[0], instead=instead)
    return Unwrapping()


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


def _prefixes(names: Collection[str], keys: Collection[str]) -> list[str]:
    """The prefixes, a dot left out, that the names have before every one of the keys."""
    first = min(keys)
    found = sorted(name.removesuffix(first) for name in names if name.endswith(f".{first}"))
    return [prefix for prefix in found if all(prefix + key in names for key in keys)]


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
