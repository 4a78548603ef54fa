"""Whether the weights of a checkpoint and its ``config.json`` agree: checked by names and shapes, before any is read.

Names are compared without the prefix of the base model (``bert.``), which a file may have or not.
"""

from __future__ import annotations

__all__ = ["Agreement"]

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hdexport.checkpoint.config import file_key
from hdexport.checkpoint.weight_files import StoredWeight
from hdexport.support.json_files import several, shown
from hdexport.support.memory import free_bytes
from hdruntime.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_OLD_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
"""Names of a normalisation's weights in files of 2019."""

_BUFFERS = ("position_ids", "token_type_ids", "inv_freq")
"""Ends of names: values that are computed, and that older versions of transformers stored."""

_LAYER = re.compile(
    r"(?:\w+\.)?(?:encoder\.(?:layers?|block)|transformer\.layer)\.(\d{1,9})\."
    r"|(?:(?:\w+|performer\.net)\.)?layers?\.(\d{1,9})\."
)
"""Begin of the name of an encoder layer's weight, with or without the prefix of the base model."""

_OPTIONAL_PARTS = ("embeddings_project",)
"""Parts of an encoder that only some configurations have: ELECTRA's, where embeddings are narrower than layers."""

_NUM_LABELS = "num_labels"
"""The number of labels, which transformers counts in ``id2label``, and reads here if the file has no ``id2label``."""

_BYTES_PER_WEIGHT = 4  # float32, also where the file has another type


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """A checkpoint's weights beside the model that its configuration describes.

    Attributes:
        path: the checkpoint's directory, for messages.
        stored: name -> type and shape of each weight in the files.
        settings: the configuration in transformers.
        not_needed: begins of names, without the prefix of the base model, of weights that the task does not need.
    """

    path: Path
    stored: Mapping[str, StoredWeight]
    settings: PreTrainedConfig
    not_needed: tuple[str, ...]

    def check_layers(self) -> None:
        """Refuse a configuration of fewer or more layers than there are weights for.

        Without the model: of a wrong number of layers none can be made in reasonable time.

        Raises:
            ModelError: the numbers of layers differ.
        """
        numbers = {int(match[1] or match[2]) for name in self.stored if (match := _LAYER.match(name))}
        layers = self.settings.num_hidden_layers
        if numbers and max(numbers) + 1 != layers:
            key, count = file_key(self.settings, "num_hidden_layers"), max(numbers) + 1
            raise ModelError(
                f"{self.path / 'config.json'} has {key} {layers}, and the weights are of the layers 0 to {count - 1}.\n"
                f"Set {key} to {count}, or download the checkpoint again."
            )

    def check_weights(self, skeleton: PreTrainedModel, made: Callable[[PreTrainedConfig], PreTrainedModel]) -> None:
        """Refuse weights of another type or shape than the model's or without a place in it, and too large models.

        Args:
            skeleton: the model that the configuration describes, on PyTorch's meta device.
            made: makes the model of another configuration, by which a remedy is tried before it is named.

        Raises:
            ModelError: see above.
        """
        self._check_no_name_twice(skeleton)
        wanted = self._wanted(skeleton)
        within = {name for name in self.stored if self._is_within(name, skeleton)}
        self._check_types(name for name in self.stored if name in within or self._plain(name, skeleton) in wanted)
        self._check_shapes(wanted, skeleton, made)
        self._check_all_used(sorted(within - self._used(skeleton)))
        self._check_memory(sum(parameter.numel() for parameter in skeleton.parameters()))

    def unused(self, skeleton: PreTrainedModel) -> str | None:
        """The weights that the task does not need, in groups such as ``cls (7 weights)``; None where it needs all.

        Args:
            skeleton: as above.
        """
        used = {name for name in self._used(skeleton) if not self._plain(name, skeleton).startswith(self.not_needed)}
        parts_used = {part for name in used for part in _beginnings(self._plain(name, skeleton))}
        groups: dict[str, int] = {}
        for name in self.stored:
            if name in used:
                continue
            plain = self._plain(name, skeleton)
            group = (
                plain.rpartition(".")[2]
                if plain.endswith(_BUFFERS)
                else next((part for part in _beginnings(plain) if part not in parts_used), plain)
            )
            groups[group] = groups.get(group, 0) + 1
        counts = (f"{group} ({count} weight{'s' if count > 1 else ''})" for group, count in sorted(groups.items()))
        return ", ".join(counts) or None

    def _used(self, skeleton: PreTrainedModel) -> set[str]:
        places = {self._plain(name, skeleton) for name in skeleton.state_dict()}
        return {name for name in self.stored if self._plain(name, skeleton) in places}

    def _wanted(self, skeleton: PreTrainedModel) -> dict[str, Any]:
        return {self._plain(name, skeleton): value.shape for name, value in skeleton.state_dict().items()}

    def _plain(self, name: str, skeleton: PreTrainedModel) -> str:
        for old, new in _OLD_NAMES.items():
            if name.endswith(old):
                name = name.removesuffix(old) + new
        return name.removeprefix(f"{skeleton.base_model_prefix}.")

    def _is_within(self, name: str, skeleton: PreTrainedModel) -> bool:
        """Whether a weight is the encoder's, by its name."""
        plain = self._plain(name, skeleton)
        if plain.endswith(_BUFFERS) or plain.startswith((*self.not_needed, "pooler.")):
            return False
        parts = {child for child, _ in skeleton.base_model.named_children()}
        return name.startswith(f"{skeleton.base_model_prefix}.") or plain.partition(".")[0] in (
            *parts,
            *_OPTIONAL_PARTS,
        )

    def _check_no_name_twice(self, skeleton: PreTrainedModel) -> None:
        names: dict[str, str] = {}
        for name in self.stored:
            other = names.setdefault(self._plain(name, skeleton), name)
            if other != name:
                raise ModelError(
                    f"{self.path} holds one weight by two names, {shown(other)} and {shown(name)}.\n"
                    "Remove the one that the model was not trained with."
                )

    def _check_types(self, names: Iterable[str]) -> None:
        wrong = [name for name in names if not self.stored[name].is_floating and not name.endswith(_BUFFERS)]
        if wrong:
            raise ModelError(
                f"{self.path} has weights of type {self.stored[wrong[0]].dtype}: {several(wrong)}. Such a model is "
                "quantised, and floating-point weights are needed.\n"
                "Build the checkpoint that was quantised; --fp16 or --bf16 make the bundle half as large."
            )

    def _check_shapes(
        self,
        wanted: Mapping[str, Any],
        skeleton: PreTrainedModel,
        made: Callable[[PreTrainedConfig], PreTrainedModel],
    ) -> None:
        for name, weight in self.stored.items():
            shape = tuple(wanted.get(self._plain(name, skeleton), weight.shape))
            if shape == weight.shape:
                continue
            pairs = zip(shape, weight.shape, strict=False)
            asked, there = next(((asked, there) for asked, there in pairs if asked != there), (None, None))
            keys = [key for key in self._keys_of(asked) if self._fits(name, weight, {key: there}, made)]
            remedy = f"Set {' or '.join(keys)} to {there}" if keys else "Correct config.json"
            if keys == [_NUM_LABELS]:
                remedy += f", without id2label and label2id of other labels, or give these {there} names"
            raise ModelError(
                f"{self.path}: the shape of {name} is not what config.json says: {list(weight.shape)} in the file, "
                f"{list(shape)} by config.json{f' ({keys[0]} {asked})' if keys else ''}.\n"
                f"{remedy}, or download the checkpoint again."
            )

    def _keys_of(self, asked: int | None) -> list[str]:
        """The keys of the configuration with a value: a shape may follow one of them."""
        values = {**self.settings.to_dict(), _NUM_LABELS: self.settings.num_labels}
        return [key for key, value in values.items() if type(value) is int and value == asked]

    def _fits(
        self,
        name: str,
        weight: StoredWeight,
        changes: Mapping[str, Any],
        made: Callable[[PreTrainedConfig], PreTrainedModel],
    ) -> bool:
        """Whether a weight has the shape that a changed configuration gives it."""
        settings = copy.deepcopy(self.settings)
        try:
            for key, value in changes.items():
                setattr(settings, key, value)
            skeleton = made(settings)
        except Exception:
            # Many values are of no model, and each fails in its own way.
            return False
        return tuple(self._wanted(skeleton).get(self._plain(name, skeleton), ())) == weight.shape

    def _check_all_used(self, left: list[str]) -> None:
        if left:
            raise ModelError(
                f"{self.path} has weights within the encoder that the model of config.json does not use: "
                f"{several(left)}.\n"
                "Check that config.json belongs to the weights; adapters have to be merged into them."
            )

    def _check_memory(self, weights: int) -> None:
        needed, free = weights * _BYTES_PER_WEIGHT, free_bytes()
        if free is not None and needed > free:
            raise ModelError(
                f"The weights of {self.path} take {needed / 1e9:.1f} GB in float32, and {free / 1e9:.1f} GB of memory "
                "are free.\nFree some, or build it on a machine with more; the bundle runs on this one."
            )


def _beginnings(name: str) -> Iterator[str]:
    """``cls.predictions.bias`` -> ``cls``, ``cls.predictions``, and itself."""
    parts = name.split(".")
    return (".".join(parts[: count + 1]) for count in range(len(parts)))
