"""bert4keras' layers, and the variables of Google's checkpoints that it makes them of.

Source: the names in bert4keras 0.11.5, ``variable_mapping`` of its models.
"""

from __future__ import annotations

import numpy as np

from hdexport.checkpoint.foreign.keras_file import KerasLayers

_DENSE = ("kernel", "bias")
_NORM = ("beta", "gamma")
"""Parts of a normalisation, in the order of a layer's arrays."""

_NEXT_SENTENCE = "cls/seq_relationship/output_weights"
"""Google's name of a weight whose axes are exchanged in Google's checkpoints."""

_MAPPING = "bert/encoder/embedding_hidden_mapping_in"
_ATTENTION = ("self/query", "self/key", "self/value", "output/dense")

_KINDS_THAT_TELL = {
    "relative_position_embedding": "Embedding-Relative-Position",
    "sinusoidal_position_embedding": "Embedding-Rotary-Position",
}
"""Layers that tell a model's family, whose weights are not read."""


def named_layers(layers: KerasLayers) -> dict[str, list[np.ndarray]]:
    """Layers by their names, also where the file only counts them.

    Layers that cannot be told from others without their names keep the names of the file: the pooler, and layers that a
    user added.
    """
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
    take("embedding", "Embedding-Token")
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
    """Name in Google's checkpoints -> value, and the names of layers that have none there.

    Args:
        layers: by their names in bert4keras.
        model_type: ELECTRA's variables have names of their own, and all others BERT's or ALBERT's.
    """
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


def _in_electra(name: str) -> str:
    if name.startswith(_MAPPING):
        return name.replace(_MAPPING, "electra/embeddings_project")
    return f"electra/{name.removeprefix('bert/')}" if name.startswith("bert/") else name


_FIXED: dict[str, tuple[str, ...]] = {
    "Embedding-Token": ("bert/embeddings/word_embeddings",),
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
