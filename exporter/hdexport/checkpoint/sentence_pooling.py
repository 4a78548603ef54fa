"""The modules that sentence-transformers puts after an encoder, as one PyTorch module in float32."""

from __future__ import annotations

__all__ = [
    "PairScores",
    "SentencePooling",
    "TokenLayers",
    "late_interaction_layers",
    "pair_scores",
    "sentence_pooling",
    "token_layers",
]

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from hdexport.checkpoint.multi_vector import PROJECTION, late_interaction
from hdexport.checkpoint.sentence_modules import (
    SCORES,
    TOKENS,
    TOKENS_INSTEAD,
    SentenceModule,
    pooling_settings,
    scored_labels,
    token_modules,
)
from hdexport.checkpoint.weight_files import read_weights, weight_files
from hdexport.model.head import Head
from hdexport.support.json_files import read_object, shown
from hdruntime.errors import ModelError

_SENTENCE = "sentence_embedding"
"""sentence-transformers' name of a text's vector."""

_ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid")

_OTHER_LAYERS = "Choose a model whose layers are Dense and Normalize without that."
"""The remedy for a layer of token vectors that is not supported."""


class SentencePooling(Head):
    """Pools the tokens of each row to one vector, then applies the layers that follow."""

    def __init__(self, modes: tuple[str, ...], layers: list[torch.nn.Module]) -> None:
        super().__init__()
        self.modes = modes
        self.layers = torch.nn.ModuleList(layers)

    def forward(
        self, token_embeddings: torch.Tensor, attention_mask: torch.Tensor, pooled_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Pool.

        Args:
            token_embeddings: [batch, tokens, hidden_size], float32.
            attention_mask: [batch, tokens], int64, 1 for real tokens.
            pooled_mask: the same, 1 for tokens that are pooled; None for all real tokens.

        Returns:
            [batch, width], float32.
        """
        read = attention_mask if pooled_mask is None else pooled_mask
        pooled = torch.cat([_POOLS[mode](token_embeddings, read, attention_mask) for mode in self.modes], dim=-1)
        for layer in self.layers:
            pooled = layer(pooled)
        return pooled

    def outputs(
        self, states: torch.Tensor, attention_mask: torch.Tensor, pooled_mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        """The tokens' vectors and the sentence's; see `Head.outputs`."""
        tokens = states.float()
        return tokens, self(tokens, attention_mask, pooled_mask)


class PairScores(SentencePooling):
    """Pools the tokens of each pair to one vector; the last layer makes logits of the vector."""

    def outputs(
        self, states: torch.Tensor, attention_mask: torch.Tensor, pooled_mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        """The logits alone; see `Head.outputs`."""
        return super().outputs(states, attention_mask, pooled_mask)[1:]


class TokenLayers(Head):
    """Layers that are applied to the vector of each token, for late interaction.

    Args:
        layers: in their order.
        width: of the vectors that the last one makes.
    """

    def __init__(self, layers: list[torch.nn.Module], width: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)
        self.width = width

    def forward(self, token_embeddings: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Apply the layers.

        Args:
            token_embeddings: [batch, tokens, hidden_size], float32.
            attention_mask: [batch, tokens], int64, 1 for real tokens.

        Returns:
            [batch, tokens, width], float32; 0 for padding.
        """
        for layer in self.layers:
            token_embeddings = layer(token_embeddings)
        # A product would make NaN of a NaN in the padding.
        return torch.where(attention_mask.unsqueeze(-1) > 0, token_embeddings, 0.0)


class _Normalize(torch.nn.Module):
    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.normalize(pooled, p=2.0, dim=-1)


def _first(token_embeddings: torch.Tensor, read: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """The first token that is pooled, wherever padding is: [batch, width]."""
    return _token(token_embeddings, read.argmax(dim=1))


def _last(token_embeddings: torch.Tensor, read: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """The last token that is pooled, and 0 without one."""
    positions = torch.arange(read.shape[1], device=read.device)
    last = _token(token_embeddings, (read * positions).argmax(dim=1))
    return torch.where(read.sum(dim=1, keepdim=True) > 0, last, 0.0)


def _token(token_embeddings: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    index = number[:, None, None].expand(-1, 1, token_embeddings.shape[-1])
    return token_embeddings.gather(1, index).squeeze(1)


def _largest(token_embeddings: torch.Tensor, read: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    lowest = torch.finfo(token_embeddings.dtype).min
    return torch.where(read.unsqueeze(-1) > 0, token_embeddings, lowest).amax(dim=1)


def _mean(token_embeddings: torch.Tensor, read: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    return _weighted(token_embeddings, read.to(token_embeddings.dtype))


def _mean_by_root(token_embeddings: torch.Tensor, read: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """The sum of the tokens over the root of their number."""
    weights = read.to(token_embeddings.dtype)
    return _weighted(token_embeddings, weights) * weights.sum(dim=1, keepdim=True).sqrt()


def _by_position(token_embeddings: torch.Tensor, read: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """The mean with weights 1, 2, 3, ... from the first real token on, one that is pooled or not."""
    positions = torch.arange(1, read.shape[1] + 1, device=read.device) - attention_mask.argmax(dim=1, keepdim=True)
    return _weighted(token_embeddings, (read * positions).to(token_embeddings.dtype))


def _weighted(token_embeddings: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The mean of [batch, tokens, width] with weights [batch, tokens], no less than 1 in all, or 0."""
    total = (token_embeddings * weights.unsqueeze(-1)).sum(dim=1)
    return total / weights.sum(dim=1, keepdim=True).clamp(min=1.0)


_POOLS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cls": _first,
    "max": _largest,
    "mean": _mean,
    "mean_sqrt_len_tokens": _mean_by_root,
    "weightedmean": _by_position,
    "lasttoken": _last,
}
"""Mode -> (tokens' vectors [batch, tokens, width], mask of pooled tokens, mask of real tokens) -> vectors."""


def token_layers(path: Path, *, hidden_size: int, allow_pickle: bool = False) -> TokenLayers | None:
    """The modules of a chain that changes tokens' vectors and pools none, with their weights; None for other chains.

    Args:
        path: of the checkpoint.
        hidden_size: width of the encoder's tokens.
        allow_pickle: also read weights that are stored as a pickle.

    Raises:
        ModelError: as `sentence_pooling` does.
    """
    modules = token_modules(path)
    return _token_layers(path, modules, [], hidden_size, allow_pickle=allow_pickle) if modules else None


def late_interaction_layers(path: Path, *, hidden_size: int, allow_pickle: bool = False) -> TokenLayers:
    """The layers that a model of late interaction applies to each token, with its weights.

    Args:
        path: of the checkpoint.
        hidden_size: width of the encoder's tokens.
        allow_pickle: also read weights that are stored as a pickle.

    Raises:
        ModelError: as `late_interaction` and `sentence_pooling` do.
    """
    model = late_interaction(path)
    if not model.is_stanford:
        return _token_layers(path, model.layers, [], hidden_size, allow_pickle=allow_pickle)
    projection = _projection(path, hidden_size, allow_pickle=allow_pickle)
    return _token_layers(path, model.layers, [projection], projection.out_features, allow_pickle=allow_pickle)


def _token_layers(
    path: Path, modules: Sequence[SentenceModule], before: list[torch.nn.Module], width: int, *, allow_pickle: bool
) -> TokenLayers:
    layers = list(before)
    for module in modules:
        folder = path / module.folder
        layer, width = _layer(module.kind, folder, width, reads=TOKENS, writes=TOKENS, allow_pickle=allow_pickle)
        layers.append(layer)
    return TokenLayers(layers, width)


def _projection(path: Path, width: int, *, allow_pickle: bool) -> torch.nn.Linear:
    """The layer that Stanford's ColBERT has after BERT, stored among its weights."""
    files = weight_files(path, allow_pickle=allow_pickle)
    weight = next((weights[PROJECTION] for file in files if PROJECTION in (weights := read_weights(file))), None)
    if weight is None or weight.ndim != 2 or weight.shape[1] != width or not weight.is_floating_point():
        found = "no such weight" if weight is None else f"{weight.dtype} {list(weight.shape)}"
        raise ModelError(
            f"{path} needs the weight {PROJECTION}, floats [dimensions, {width}], and has {found}.\n"
            "Download the model again."
        )
    if not weight.isfinite().all():
        raise ModelError(f"{path} has a weight {PROJECTION} that is NaN or infinite.\nDownload the model again.")
    return _linear(weight.float())


def sentence_pooling(path: Path, *, hidden_size: int, allow_pickle: bool = False) -> SentencePooling:
    """The modules after the encoder, with their weights.

    Args:
        path: a sentence-transformers directory.
        hidden_size: width of the encoder's tokens.
        allow_pickle: also read weights that are stored as a pickle.

    Raises:
        ModelError: a module or a setting of one is not supported, a file is missing, or widths do not fit.
    """
    return SentencePooling(*_pooling_layers(path, hidden_size, _SENTENCE, allow_pickle=allow_pickle))


def pair_scores(path: Path, *, hidden_size: int, allow_pickle: bool = False) -> PairScores | None:
    """The modules after a cross-encoder's Transformer, with their weights; None where they give no scores.

    Args:
        path: of the checkpoint.
        hidden_size: width of the encoder's tokens.
        allow_pickle: also read weights that are stored as a pickle.

    Raises:
        ModelError: as `sentence_pooling` does.
    """
    if scored_labels(path) is None:
        return None
    return PairScores(*_pooling_layers(path, hidden_size, SCORES, allow_pickle=allow_pickle))


def _pooling_layers(
    path: Path, hidden_size: int, given: str, *, allow_pickle: bool
) -> tuple[tuple[str, ...], list[torch.nn.Module]]:
    """The modes of a pooling, and the layers after the pooling; the last layer's output is called `given`."""
    settings = pooling_settings(path)
    layers: list[torch.nn.Module] = []
    width = hidden_size * len(settings.modes)
    for place, module in enumerate(settings.following, 1):
        writes = given if place == len(settings.following) else _SENTENCE
        layer, width = _layer(module.kind, path / module.folder, width, writes=writes, allow_pickle=allow_pickle)
        layers.append(layer)
    return settings.modes, layers


def _layer(
    kind: str, folder: Path, width: int, *, reads: str = _SENTENCE, writes: str, allow_pickle: bool
) -> tuple[torch.nn.Module, int]:
    """A layer that takes vectors of a width, and the width of its results.

    Args:
        kind: ``Dense``, ``LayerNorm`` or ``Normalize``.
        folder: with its settings.
        width: of its inputs.
        reads, writes: sentence-transformers' names of the vectors that it takes and gives.
        allow_pickle: also read weights that are stored as a pickle.
    """
    file = folder / "config.json"
    # Vectors of tokens take the same layers in every task.
    instead = _OTHER_LAYERS if reads == TOKENS else TOKENS_INSTEAD
    # The layers of old versions that have no settings have no file.
    config = {} if kind == "Normalize" and not file.is_file() else read_object(file)
    found = config.get("module_input_name") or reads
    for name, value, fits in (
        ("module_input_name", found, reads),
        ("module_output_name", config.get("module_output_name") or found, writes),
    ):
        if value != fits:
            raise ModelError(f"{file} has {name} {shown(value)}; only {fits} is supported there.\n{instead}")
    if kind == "Normalize":
        return _Normalize(), width
    make = _layer_norm if kind == "LayerNorm" else _dense
    return make(folder, config, width, instead=instead, allow_pickle=allow_pickle)


def _layer_norm(
    folder: Path, config: dict[str, Any], width: int, *, instead: str, allow_pickle: bool
) -> tuple[torch.nn.Module, int]:
    weights = _weights(folder, "norm.", allow_pickle=allow_pickle)
    size = config.get("dimension")
    _check_weights(folder, weights, {"dimension": size}, {"weight": [size], "bias": [size]}, width=width)
    layer = torch.nn.LayerNorm(width, device="meta")
    layer.load_state_dict(weights, assign=True)
    return layer, width


def _dense(
    folder: Path, config: dict[str, Any], width: int, *, instead: str, allow_pickle: bool
) -> tuple[torch.nn.Module, int]:
    # sentence-transformers takes Tanh where none is named; code of the checkpoint's own is not run.
    named = str(config.get("activation_function", "torch.nn.Tanh"))
    activation = named.rpartition(".")[2]
    if activation not in _ACTIVATIONS or not named.startswith("torch."):
        raise ModelError(
            f"{folder / 'config.json'} has activation_function {shown(named)}; supported: {', '.join(_ACTIVATIONS)} "
            f"of torch.nn.\n{instead}"
        )
    weights = _weights(folder, "linear.", allow_pickle=allow_pickle)
    out_features, in_features = config.get("out_features"), config.get("in_features")
    expected = {"weight": [out_features, in_features]}
    if "bias" in weights:
        expected["bias"] = [out_features]
    if config.get("use_residual") and out_features != in_features:
        expected["residual.weight"] = [out_features, in_features]
    sizes = {"in_features": in_features, "out_features": out_features}
    _check_weights(folder, weights, sizes, expected, width=width)
    residual = weights.pop("residual.weight", None)
    layer = torch.nn.Sequential(_linear(**weights), getattr(torch.nn, activation)())
    if not config.get("use_residual"):
        return layer, len(weights["weight"])
    return _Sum(layer, torch.nn.Identity() if residual is None else _linear(residual)), len(weights["weight"])


class _Sum(torch.nn.Module):
    def __init__(self, *layers: torch.nn.Module) -> None:
        super().__init__()
        self.first, self.second = layers

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.first(vectors) + self.second(vectors)
        return added


def _linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.nn.Linear:
    # The file's own tensors: nothing of a size that only the configuration names is made.
    outputs, inputs = weight.shape
    linear = torch.nn.Linear(inputs, outputs, bias=bias is not None, device="meta")
    linear.load_state_dict({"weight": weight} | ({} if bias is None else {"bias": bias}), assign=True)
    return linear


def _weights(folder: Path, prefix: str, *, allow_pickle: bool) -> dict[str, torch.Tensor]:
    """A layer's weights by name, without the prefix that sentence-transformers gives them; floats are float32."""
    return {
        name.removeprefix(prefix): weight.float() if weight.is_floating_point() else weight
        for file in weight_files(folder, allow_pickle=allow_pickle)
        for name, weight in read_weights(file).items()
    }


def _check_weights(
    folder: Path,
    weights: dict[str, torch.Tensor],
    sizes: dict[str, Any],
    expected: dict[str, list[Any]],
    *,
    width: int,
) -> None:
    """Refuse a layer whose weights, configuration and input differ in width or are not floating-point.

    Args:
        folder: of the layer.
        weights: that were found.
        sizes: key of the configuration -> value; the first is the width of the layer's inputs.
        expected: name -> shape.
        width: of the layer's inputs.
    """
    if not all(type(size) is int and size > 0 for size in sizes.values()):
        said = " and ".join(f"{name} {shown(size)}" for name, size in sizes.items())
        raise ModelError(
            f"{folder / 'config.json'} has {said}; whole numbers from 1 up are needed.\n"
            "Set them to the widths of the weights."
        )
    there = {name: list(weight.shape) for name, weight in weights.items()}
    if there != expected:
        raise ModelError(
            f"The layer in {folder} cannot be read: its weights are {shown(there)}, and those of its config.json are "
            f"{shown(expected)}.\nDownload the model again."
        )
    takes = next(iter(sizes.values()))
    if takes != width:
        raise ModelError(
            f"The layer in {folder} takes vectors of width {takes}, and those before it are of width {width}.\n"
            "Check that modules.json, the pooling and the encoder belong together."
        )
    wrong = [name for name, weight in weights.items() if not (weight.is_floating_point() and weight.isfinite().all())]
    if wrong:
        raise ModelError(
            f"The layer in {folder} has weights that are integers, NaN or infinite: {', '.join(wrong)}.\n"
            "Download the model again, or build the checkpoint that was quantised."
        )
