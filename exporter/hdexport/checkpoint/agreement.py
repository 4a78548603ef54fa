"""Whether the weights of a checkpoint and its ``config.json`` agree: by names and shapes, before any weight is read.

Names are compared without the prefix of the base model (``bert.``), which a file may have or not.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hdexport.checkpoint.config import QUANTIZED_HINT, file_key
from hdexport.checkpoint.weight_files import StoredWeight
from hdexport.support.json_files import listing, shown
from hdruntime.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_OLD_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
"""Names of a normalisation's weights in files of 2019."""

_BUFFERS = ("position_ids", "token_type_ids", "inv_freq")
"""Ends of the names of computed values, which older versions of transformers stored."""

_LAYER = re.compile(
    r"(?:\w+\.)?(?:encoder\.(?:layers?|block)|transformer\.layer)\.(\d{1,9})\."
    r"|(?:(?:(?!decoder\.)\w+|performer\.net)\.)?layers?\.(\d{1,9})\."
)
"""Begin of the name of an encoder layer's weight, with or without the prefix of the base model. A decoder beside it may
have another number of layers."""

_OPTIONAL_PARTS = ("embeddings_project",)
"""Parts of an encoder that only some configurations have: ELECTRA's, where embeddings are narrower than layers."""

_NUM_LABELS = "num_labels"
"""The number of labels, which transformers counts in ``id2label``, or reads here if the file has no ``id2label``."""


def check_layers(path: Path, names: Iterable[str], settings: PreTrainedConfig) -> None:
    """Rejects a configuration with fewer or more layers than the weights have. It runs before a model is made, because
    a model of a wrong number of layers may take forever to make."""
    numbers = {int(match[1] or match[2]) for name in names if (match := _LAYER.match(name))}
    layers = settings.num_hidden_layers
    if numbers and max(numbers) + 1 != layers:
        key, count = file_key(settings, "num_hidden_layers"), max(numbers) + 1
        raise ModelError(
            f"{path / 'config.json'} has {key} {layers}, and the weights are of the layers 0 to {count - 1}.",
            hint=f"Set {key} to {count}, or download the checkpoint again.",
        )


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """A checkpoint's weights beside the model that its configuration describes.

    Attributes:
        path: the checkpoint's directory, for messages.
        stored: name -> type and shape of each weight in the files.
        skeleton: the model that the configuration describes, on PyTorch's meta device.
        made: makes the model of another configuration, to try a correction before a hint names it.
        not_needed: prefixes of names, without the prefix of the base model, of weights that the task does not need.
    """

    path: Path
    stored: Mapping[str, StoredWeight]
    settings: PreTrainedConfig
    skeleton: PreTrainedModel
    made: Callable[[PreTrainedConfig], PreTrainedModel]
    not_needed: tuple[str, ...]

    def check(self) -> None:
        """Rejects weights whose type, shape or name the model does not have, and models that are too large
        for memory."""
        self._check_no_name_twice()
        wanted = self._shapes(self.skeleton)
        within = {name for name in self.stored if self._is_within(name)}
        self._check_types([name for name in self.stored if name in within or self._plain(name) in wanted])
        self._check_shapes(wanted)
        self._check_all_used(sorted(name for name in within if self._plain(name) not in wanted))

    def unused(self) -> str | None:
        """The weights that the task does not need, in groups such as ``cls (7 weights)``; None where it needs all."""
        wanted, names = self._shapes(self.skeleton), [self._plain(name) for name in self.stored]
        used = {name for name in names if name in wanted and not name.startswith(self.not_needed)}
        parts_used = {part for name in used for part in _beginnings(name)}
        groups = Counter(
            name.rpartition(".")[2]
            if name.endswith(_BUFFERS)
            else next((part for part in _beginnings(name) if part not in parts_used), name)
            for name in names
            if name not in used
        )
        counts = (f"{group} ({count} weight{'s' if count > 1 else ''})" for group, count in sorted(groups.items()))
        return ", ".join(counts) or None

    def _shapes(self, model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
        return {self._plain(name): tuple(value.shape) for name, value in model.state_dict().items()}

    def _plain(self, name: str) -> str:
        for old, new in _OLD_NAMES.items():
            if name.endswith(old):
                name = name.removesuffix(old) + new
        return name.removeprefix(f"{self.skeleton.base_model_prefix}.")

    def _is_within(self, name: str) -> bool:
        """Whether a weight is the encoder's, by its name."""
        plain = self._plain(name)
        if plain.endswith(_BUFFERS) or plain.startswith((*self.not_needed, "pooler.")):
            return False
        parts = {child for child, _ in self.skeleton.base_model.named_children()}
        return name.startswith(f"{self.skeleton.base_model_prefix}.") or plain.partition(".")[0] in (
            *parts,
            *_OPTIONAL_PARTS,
        )

    def _check_no_name_twice(self) -> None:
        names: dict[str, str] = {}
        for name in self.stored:
            other = names.setdefault(self._plain(name), name)
            if other != name:
                raise ModelError(
                    f"{self.path} holds one weight by two names, {shown(other)} and {shown(name)}.",
                    hint="Remove the one that the model was not trained with.",
                )

    def _check_types(self, names: list[str]) -> None:
        # Such as the number of batches that a normalisation has seen.
        counts = {
            self._plain(name) for name, value in self.skeleton.state_dict().items() if not value.is_floating_point()
        }
        wrong = [
            name
            for name in names
            if not self.stored[name].is_floating and not name.endswith(_BUFFERS) and self._plain(name) not in counts
        ]
        if wrong:
            raise ModelError(
                f"{self.path} has weights of type {self.stored[wrong[0]].dtype}: {listing(wrong)}. Such a model is "
                "quantised, and floating-point weights are needed.",
                hint=QUANTIZED_HINT,
            )

    def _check_shapes(self, wanted: Mapping[str, tuple[int, ...]]) -> None:
        for name, weight in self.stored.items():
            shape = wanted.get(self._plain(name), weight.shape)
            if shape == weight.shape:
                continue
            pairs = zip(shape, weight.shape, strict=False)
            expected, stored = next(
                ((expected, stored) for expected, stored in pairs if expected != stored), (None, None)
            )
            keys = [key for key in self._keys_of(expected) if self._fits(name, key, stored)]
            hint = f"Set {' or '.join(keys)} to {stored}" if keys else "Correct config.json"
            if keys == [_NUM_LABELS]:
                hint += f", without id2label and label2id of other labels, or give these {stored} names"
            raise ModelError(
                f"{self.path}: the shape of {name} is not what config.json says: {list(weight.shape)} in the file, "
                f"{list(shape)} by config.json{f' ({keys[0]} {expected})' if keys else ''}.",
                hint=f"{hint}, or download the checkpoint again.",
            )

    def _keys_of(self, size: int | None) -> list[str]:
        """Keys of the configuration with a value: a shape may follow one of them."""
        values = {**self.settings.to_dict(), _NUM_LABELS: self.settings.num_labels}
        return [key for key, value in values.items() if type(value) is int and value == size]

    def _fits(self, name: str, key: str, value: int | None) -> bool:
        """Whether a weight has the shape that the configuration gives it with another value."""
        settings = copy.deepcopy(self.settings)
        try:
            setattr(settings, key, value)
            model = self.made(settings)
        except Exception:
            # Many values describe no model, and each fails in its own way.
            return False
        return self._shapes(model).get(self._plain(name), ()) == self.stored[name].shape

    def _check_all_used(self, left: list[str]) -> None:
        if left:
            raise ModelError(
                f"{self.path} has weights within the encoder that the model of config.json does not use: "
                f"{listing(left)}.",
                hint="Check that config.json belongs to the weights; adapters have to be merged into them.",
            )


def _beginnings(name: str) -> Iterator[str]:
    """``cls.predictions.bias`` -> ``cls``, ``cls.predictions``, and itself."""
    parts = name.split(".")
    return (".".join(parts[: count + 1]) for count in range(len(parts)))
