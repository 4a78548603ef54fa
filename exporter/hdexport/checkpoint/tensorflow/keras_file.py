"""Keras' HDF5 files of weights, and Google's variables in the layers of bert4keras.

In the older layout of files, layers have the names that their program gave them. For names in ``.weights.h5``, Keras
2.12 and later write another, in which groups are called by a layer's class and counted in the model's order; Keras 3
keeps the layer's name beside its arrays, as the attribute ``name`` of the group ``vars``. Source of the variables:
``variable_mapping`` of the models of bert4keras 0.11.5.
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

_DENSE = ("kernel", "bias")

_NORM = ("beta", "gamma")
"""Parts of a normalisation, in the order of a layer's arrays."""

_NEXT_SENTENCE = "cls/seq_relationship/output_weights"
"""Google's name of a weight whose axes are exchanged in Google's checkpoints."""

_MAPPING = "bert/encoder/embedding_hidden_mapping_in"

_TOKENS = "Embedding-Token"
"""Name of the layer that every model of bert4keras has."""

_ATTENTION = ("self/query", "self/key", "self/value", "output/dense")

_KINDS_THAT_TELL = {
    "relative_position_embedding": "Embedding-Relative-Position",
    "sinusoidal_position_embedding": "Embedding-Rotary-Position",
}
"""Layers that indicate a model's family, whose weights are not read."""


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
    h5py = require("h5py")
    try:
        with h5py.File(file, "r") as root:
            # The file of a whole model has the weights in a group.
            weights = root.get("model_weights", root)
            if "layer_names" in weights.attrs or "layer_names0" in weights.attrs:
                return KerasLayers(named=dict(_named(weights)))
            if "layers" in root:
                named = dict(_named_by_attribute(root["layers"]))
                # Names that Keras made up, such as dense_1, tell less than the order.
                is_named = _TOKENS in named
                return KerasLayers(named=named) if is_named else KerasLayers(counted=_counted(root["layers"]))
            held = ", ".join(shown(name) for name in list(root)[:3]) or "nothing"
    except (OSError, KeyError, RuntimeError, UnicodeDecodeError) as error:
        # h5py raises each of these for files that are cut off or changed.
        raise ModelError(
            f"{file} cannot be read as a Keras file of weights: {shown(error)}", hint="Copy or download it again."
        ) from error
    raise ModelError(
        f"{file} is HDF5 that Keras' save_weights() did not write: it holds {held}.",
        hint="Save the weights again: model.save_weights('model.h5')",
    )


def named_layers(layers: KerasLayers) -> dict[str, list[np.ndarray]]:
    """Layers by their names, also where the file only counts them. Counted layers that cannot be told from others by
    their order, such as the pooler, keep the names of the file."""
    if layers.named:
        return layers.named
    counted = {kind: list(members) for kind, members in layers.counted.items()}
    named: dict[str, list[np.ndarray]] = {}

    def take(kind: str, name: str) -> bool:
        members = counted.get(kind)
        if members:
            named[name] = members.pop(0)
        return bool(members is not None and name in named)

    for kind, name in _KINDS_THAT_TELL.items():
        if kind in counted:
            named[name] = []
    take("embedding", _TOKENS)
    take("embedding", "Embedding-Segment")
    take("position_embedding", "Embedding-Position")
    take("layer_normalization", "Embedding-Norm")
    embeddings = named.get("Embedding-Norm", [])
    attention = counted.get("multi_head_attention", [])
    if embeddings and attention and len(embeddings[0]) != len(attention[0][0]):
        take("dense", "Embedding-Mapping")
    is_shared = len(attention) == 1
    for layer in range(len(attention)):
        stem = "Transformer-" if is_shared else f"Transformer-{layer}-"
        for kind, name in (("multi_head_attention", "MultiHeadSelfAttention"), ("feed_forward", "FeedForward")):
            take(kind, f"{stem}{name}")
            take("layer_normalization", f"{stem}{name}-Norm")
    # Its activation comes last, and so do the layers that follow the pooler, which needs none of these.
    if take("scale_offset", "MLM-Bias"):
        take("dense", "MLM-Dense")
        take("layer_normalization", "MLM-Norm")
    others = {kind: members for kind, members in counted.items() if kind not in _KINDS_THAT_TELL}
    for kind, members in others.items():
        named |= {f"{kind}, number {number} from the end": arrays for number, arrays in enumerate(members[::-1], 1)}
    return named


def google_variables(
    layers: dict[str, list[np.ndarray]], *, model_type: str
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Name in Google's checkpoints -> value, and names of layers that have none there. ELECTRA's variables have names
    of their own, and all others BERT's or ALBERT's."""
    variables: dict[str, np.ndarray] = {}
    others = []
    for layer, arrays in layers.items():
        names = _variables_of(layer)
        if names is None:
            if arrays and layer not in _KINDS_THAT_TELL.values():
                others.append(layer)
            continue
        # Zipped as far as both go: missing parts are noticed where they are needed, by their names.
        variables.update(zip(names, arrays, strict=False))
    if _NEXT_SENTENCE in variables:
        variables[_NEXT_SENTENCE] = variables[_NEXT_SENTENCE].T
    if model_type == "electra":
        variables = {_in_electra(name): value for name, value in variables.items()}
    return variables, others


def _named(weights: Any) -> Iterator[tuple[str, list[np.ndarray]]]:
    for name in _names(weights, "layer_names"):
        group = weights[name]
        yield name, [np.asarray(group[weight]) for weight in _names(group, "weight_names")]


def _named_by_attribute(layers: Any) -> Iterator[tuple[str, list[np.ndarray]]]:
    """Yields each layer that has a name, also those of a model within the model."""
    for layer in layers.values():
        if "layers" in layer:
            yield from _named_by_attribute(layer["layers"])
        elif (name := layer["vars"].attrs.get("name") if "vars" in layer else None) is not None:
            yield str(name), list(_arrays(layer))


def _names(group: Any, attribute: str) -> list[str]:
    """A list of names, which Keras cuts into several attributes where it is longer than 64 KiB."""
    values = [group.attrs[attribute]] if attribute in group.attrs else []
    while f"{attribute}{len(values)}" in group.attrs:
        values.append(group.attrs[f"{attribute}{len(values)}"])
    return [name.decode("utf-8") if isinstance(name, bytes) else str(name) for value in values for name in value]


def _counted(layers: Any) -> dict[str, list[list[np.ndarray]]]:
    members_of_kind: dict[str, dict[int, list[np.ndarray]]] = {}
    for name, layer in layers.items():
        match = _NUMBERED.fullmatch(name)
        assert match is not None
        members_of_kind.setdefault(match["kind"], {})[int(match["number"] or 0)] = list(_arrays(layer))
    return {kind: [arrays for _, arrays in sorted(members.items())] for kind, members in members_of_kind.items()}


def _arrays(layer: Any) -> Iterator[np.ndarray]:
    """The arrays of a layer, before those of layers within it, by their attributes' names."""
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


def _in_electra(name: str) -> str:
    if name.startswith(_MAPPING):
        return name.replace(_MAPPING, "electra/embeddings_project")
    return f"electra/{name.removeprefix('bert/')}" if name.startswith("bert/") else name


_FIXED: dict[str, tuple[str, ...]] = {
    _TOKENS: ("bert/embeddings/word_embeddings",),
    "Embedding-Segment": ("bert/embeddings/token_type_embeddings",),
    "Embedding-Position": ("bert/embeddings/position_embeddings",),
    "Embedding-Norm": tuple(f"bert/embeddings/LayerNorm/{part}" for part in _NORM),
    "Embedding-Mapping": tuple(f"{_MAPPING}/{part}" for part in _DENSE),
    "Pooler-Dense": tuple(f"bert/pooler/dense/{part}" for part in _DENSE),
    "NSP-Proba": (_NEXT_SENTENCE, "cls/seq_relationship/output_bias"),
    "MLM-Dense": tuple(f"cls/predictions/transform/dense/{part}" for part in _DENSE),
    "MLM-Norm": tuple(f"cls/predictions/transform/LayerNorm/{part}" for part in _NORM),
    "MLM-Bias": ("cls/predictions/output_bias",),
    "Discriminator-Dense": tuple(f"discriminator_predictions/dense/{part}" for part in _DENSE),
    "Discriminator-Prediction": tuple(f"discriminator_predictions/dense_1/{part}" for part in _DENSE),
}
"""Name of a layer -> names of its arrays."""


_LAYER = {
    "MultiHeadSelfAttention": tuple(f"attention/{name}/{part}" for name in _ATTENTION for part in _DENSE),
    "MultiHeadSelfAttention-Norm": tuple(f"attention/output/LayerNorm/{part}" for part in _NORM),
    "FeedForward": tuple(f"{name}/dense/{part}" for name in ("intermediate", "output") for part in _DENSE),
    "FeedForward-Norm": tuple(f"output/LayerNorm/{part}" for part in _NORM),
}


_SHARED_LAYER = {
    "MultiHeadSelfAttention": tuple(f"attention_1/{name}/{part}" for name in _ATTENTION for part in _DENSE),
    "MultiHeadSelfAttention-Norm": tuple(f"LayerNorm/{part}" for part in _NORM),
    "FeedForward": tuple(
        f"ffn_1/{name}/dense/{part}" for name in ("intermediate", "intermediate/output") for part in _DENSE
    ),
    "FeedForward-Norm": tuple(f"LayerNorm_1/{part}" for part in _NORM),
}
"""Part of a layer's name -> names of its arrays, in a layer of BERT and in a layer of ALBERT."""


def _variables_of(layer: str) -> list[str] | None:
    if layer in _FIXED:
        return list(_FIXED[layer])
    stem, _, rest = layer.partition("-")
    if stem != "Transformer":
        return None
    number, _, part = rest.partition("-")
    if number.isdecimal():
        return [f"bert/encoder/layer_{number}/{name}" for name in _LAYER[part]] if part in _LAYER else None
    scope = "bert/encoder/transformer/group_0/inner_group_0"
    return [f"{scope}/{name}" for name in _SHARED_LAYER[rest]] if rest in _SHARED_LAYER else None
