"""Names of weights that begin with more than a model's own: a wrapper that trained the model saved its own names."""

from __future__ import annotations

__all__ = ["Unwrapping", "unwrapping"]

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

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


def _prefixes(names: Collection[str], keys: Collection[str]) -> list[str]:
    """The prefixes, a dot left out, that the names have before every one of the keys."""
    first = min(keys)
    found = sorted(name.removesuffix(first) for name in names if name.endswith(f".{first}"))
    return [prefix for prefix in found if all(prefix + key in names for key in keys)]
