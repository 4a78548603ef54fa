"""Keras' HDF5 files of weights: layers and their arrays, in both layouts.

In the older one, layers have the names that their program gave them. For names in ``.weights.h5``, Keras 2.12 and later
write another, in which layers are called by their class and counted in the model's order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hdexport.support.json_files import shown
from hdruntime.errors import ModelError
from hdruntime.optional import require

_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_NUMBERED = re.compile(r"(?P<kind>.+?)(?:_(?P<number>\d+))?")


@dataclass(frozen=True, kw_only=True)
class KerasLayers:
    """The content of a file.

    Attributes:
        named: name of a layer -> its arrays, in their order; layers without weights have none.
        counted: class of layers, in snake case -> their arrays, in the model's order. Empty in the older layout.
    """

    named: dict[str, list[np.ndarray]] = field(default_factory=dict)
    counted: dict[str, list[list[np.ndarray]]] = field(default_factory=dict)


def is_hdf5(file: Path) -> bool:
    """Whether a file begins as HDF5 does; Keras also writes it for names that end in ``.weights``."""
    try:
        with file.open("rb") as opened:
            return opened.read(len(_SIGNATURE)) == _SIGNATURE
    except OSError:
        return False


def read_keras_file(file: Path) -> KerasLayers:
    """All layers of a file.

    Raises:
        ModelError: the file is damaged, or was not written by Keras.
        MissingDependencyError: h5py is not installed.
    """
    h5py = require("h5py")
    try:
        with h5py.File(file, "r") as root:
            # A whole model, not its weights alone, has them in a group.
            weights = root.get("model_weights", root)
            if "layer_names" in weights.attrs or "layer_names0" in weights.attrs:
                return KerasLayers(named=dict(_named(weights)))
            if "layers" in root:
                return KerasLayers(counted=_counted(root["layers"]))
            held = ", ".join(shown(name) for name in list(root)[:3]) or "nothing"
    except (OSError, KeyError, RuntimeError, UnicodeDecodeError) as error:
        # h5py raises each of these for files that are cut off or changed.
        raise ModelError(
            f"{file} cannot be read as a Keras file of weights: {shown(error)}\nCopy or download it again."
        ) from error
    raise ModelError(
        f"{file} is HDF5 that Keras' save_weights() did not write: it holds {held}.\n"
        "Save the weights again: model.save_weights('model.h5')"
    )


def _named(weights: Any) -> Iterator[tuple[str, list[np.ndarray]]]:
    for name in _names(weights, "layer_names"):
        group = weights[name]
        yield name, [np.asarray(group[weight]) for weight in _names(group, "weight_names")]


def _names(group: Any, attribute: str) -> list[str]:
    """A list of names, which Keras cuts into several attributes where it is longer than 64 KiB."""
    values = [group.attrs[attribute]] if attribute in group.attrs else []
    while f"{attribute}{len(values)}" in group.attrs:
        values.append(group.attrs[f"{attribute}{len(values)}"])
    return [name.decode("utf-8") if isinstance(name, bytes) else str(name) for value in values for name in value]


def _counted(layers: Any) -> dict[str, list[list[np.ndarray]]]:
    found: dict[str, dict[int, list[np.ndarray]]] = {}
    for name, layer in layers.items():
        match = _NUMBERED.fullmatch(name)
        assert match is not None
        found.setdefault(match["kind"], {})[int(match["number"] or 0)] = list(_arrays(layer))
    return {kind: [arrays for _, arrays in sorted(members.items())] for kind, members in found.items()}


def _arrays(layer: Any) -> Iterator[np.ndarray]:
    """The arrays of a layer, before the arrays of layers within it, by their attributes' names."""
    own = layer.get("vars", {})
    for number in sorted(own, key=int):
        yield np.asarray(own[number])
    for name in sorted(layer, key=_attribute_order):
        if name != "vars":
            yield from _arrays(layer[name])


def _attribute_order(name: str) -> tuple[int, str]:
    # bert4keras' attention makes its layers in this order; a feed-forward network's are in alphabetical order.
    order = ("q_dense", "k_dense", "v_dense", "o_dense")
    return (order.index(name) if name in order else -1, name)
