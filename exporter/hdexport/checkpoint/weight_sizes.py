"""Sizes of a model's weights in memory and on the disk, from the headers of their files."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path

from hdexport.checkpoint.weight_files import StoredWeight
from hdruntime.errors import OutOfMemoryError
from hdruntime.process_limits import free_bytes

FLOAT32_BYTES = 4

AS_SAFETENSORS = "Save the checkpoint as safetensors, whose weights are mapped from the file and not copied."
"""The hint for a pickle that does not fit in memory."""

_OF_A_LAYER = re.compile(r"\.\d+\.")


@dataclass(frozen=True, kw_only=True)
class WeightSizes:
    """The weights that a model takes from files, counted in values, before any is read.

    Attributes:
        path: the checkpoint.
        total: values of all weights.
        of_layers: values of matrices of numbered layers.
        half: values of weights that the files have in half precision.
        can_stay: dtype -> values of weights that can stay in the files in that half precision, mapped.
        copied: values that are copied to float32 in any case while the model is loaded.
        keeps_half: whether weights that can stay in the files do.
        is_mapped: whether the files are mapped: safetensors, and no pickle.
    """

    path: Path
    total: int
    of_layers: int
    half: int
    can_stay: Mapping[str, int]
    copied: int
    keeps_half: bool
    is_mapped: bool

    @property
    def copied_bytes(self) -> int:
        """Bytes of the float32 copies that are made while the model is loaded."""
        return FLOAT32_BYTES * (self.copied + (0 if self.keeps_half else sum(self.can_stay.values())))


def sizes_of(
    path: Path,
    used: Mapping[str, StoredWeight],
    *,
    converted: Set[str],
    can_stay: Set[str],
    keeps_half: bool,
    is_mapped: bool,
) -> WeightSizes:
    """The sizes of the weights that a model takes.

    Args:
        path: the checkpoint.
        used: name -> weight in the files.
        converted: names of the weights that transformers computes with.
        can_stay: names of the weights that can stay in the files in half precision.
        keeps_half: whether they do.
        is_mapped: whether the files are safetensors.
    """
    values = {name: math.prod(weight.shape) for name, weight in used.items()}
    stay: Counter[str] = Counter()
    for name in can_stay & used.keys():
        stay[used[name].dtype] += values[name]
    copied = [
        name
        for name, weight in used.items()
        if name not in can_stay and (weight.is_half or name in converted or not is_mapped)
    ]
    return WeightSizes(
        path=path,
        total=sum(values.values()),
        of_layers=sum(
            values[name] for name, weight in used.items() if len(weight.shape) > 1 and _OF_A_LAYER.search(name)
        ),
        half=sum(values[name] for name, weight in used.items() if weight.is_half),
        can_stay=stay,
        copied=sum(values[name] for name in copied),
        keeps_half=keeps_half,
        is_mapped=is_mapped,
    )


def require_memory(sizes: WeightSizes) -> None:
    """Reject weights whose float32 copies do not fit in memory.

    Raises:
        OutOfMemoryError: they take more than is free.
    """
    needed, free = sizes.copied_bytes, free_bytes()
    if free is not None and needed > free:
        raise OutOfMemoryError(
            f"The weights of {sizes.path} take {needed / 1e9:.1f} GB in float32, and {free / 1e9:.1f} GB are free.",
            hint="Use a machine with more memory." if sizes.is_mapped else AS_SAFETENSORS,
        )
