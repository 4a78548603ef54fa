"""The modules that sentence-transformers puts after an encoder, as one PyTorch module in float32."""

from __future__ import annotations

__all__ = ["SentencePooling", "sentence_pooling"]

from pathlib import Path

import torch

from hdexport.checkpoint.all_files import sentence_modules
from hdexport.checkpoint.weight_files import read_weights
from hdexport.support.json_files import read_object, shown
from hdruntime.errors import ModelError

_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
}
"""Flag of ``1_Pooling/config.json`` -> the mode's name, in the order in which results are concatenated."""

_TOKENS_INSTEAD = "Build the tokens' embeddings instead: --task feature-extraction"


class SentencePooling(torch.nn.Module):
    """Pools the tokens of each row to one vector, then applies the layers that follow."""

    def __init__(self, modes: tuple[str, ...], layers: list[torch.nn.Module]) -> None:
        super().__init__()
        self.modes = modes
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, token_embeddings: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Pool.

        Args:
            token_embeddings: [batch, tokens, hidden_size], float32.
            attention_mask: [batch, tokens], int64, 1 for real tokens.

        Returns:
            [batch, width], float32.
        """
        mask = attention_mask.unsqueeze(-1).to(token_embeddings.dtype)  # [batch, tokens, 1]
        pooled = torch.cat([_pool(mode, token_embeddings, mask) for mode in self.modes], dim=-1)
        for layer in self.layers:
            pooled = layer(pooled)
        return pooled


class _Normalize(torch.nn.Module):
    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.normalize(pooled, p=2.0, dim=-1)


def _pool(mode: str, token_embeddings: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    if mode == "cls":
        # The first real token, wherever padding is.
        first = mask.squeeze(-1).argmax(dim=1)  # [batch]
        index = first[:, None, None].expand(-1, 1, token_embeddings.shape[-1])
        return token_embeddings.gather(1, index).squeeze(1)
    if mode == "max":
        lowest = torch.finfo(token_embeddings.dtype).min
        return torch.where(mask > 0, token_embeddings, lowest).amax(dim=1)
    count = mask.sum(dim=1).clamp(min=1.0)
    total = (token_embeddings * mask).sum(dim=1)
    return total / (count if mode == "mean" else count.sqrt())


def sentence_pooling(path: Path, *, hidden_size: int) -> SentencePooling:
    """Read ``modules.json`` and the folders it names.

    Args:
        path: a sentence-transformers directory.
        hidden_size: width of the encoder's tokens.

    Raises:
        ModelError: a module or a pooling mode is not supported, a file is missing, or widths do not fit.
    """
    modules = sentence_modules(path)
    kinds = [module.kind for module in modules]
    if len(kinds) < 2 or kinds[0] != "Transformer" or kinds[1] != "Pooling":
        raise ModelError(
            f"{path} chains the modules {', '.join(kinds) or '(none)'}; a Transformer followed by a Pooling is "
            f"supported.\n{_TOKENS_INSTEAD}"
        )
    modes = _pooling_modes(path / modules[1].folder / "config.json")
    layers: list[torch.nn.Module] = []
    width = hidden_size * len(modes)
    for module in modules[2:]:
        layer, width = _layer(module.kind, path / module.folder, width)
        layers.append(layer)
    return SentencePooling(modes, layers)


def _pooling_modes(config_path: Path) -> tuple[str, ...]:
    config = read_object(config_path)
    named = config.get("pooling_mode")
    if named:
        listed = named if isinstance(named, list) else [named]
        modes = tuple(named.split("+") if isinstance(named, str) else listed)
    else:
        modes = tuple(mode for flag, mode in _MODES.items() if config.get(flag))
        unknown = [
            flag for flag, on in config.items() if flag.startswith("pooling_mode_") and on and flag not in _MODES
        ]
        modes += tuple(flag.removeprefix("pooling_mode_") for flag in unknown)
    unsupported = [mode for mode in modes if mode not in list(_MODES.values())]
    if unsupported or not modes:
        asked = ", ".join(mode if isinstance(mode, str) else shown(mode) for mode in unsupported)
        raise ModelError(
            f"{config_path} asks for the pooling {asked or '(none)'}; supported: {', '.join(_MODES.values())}.\n"
            f"{_TOKENS_INSTEAD}"
        )
    return modes


def _layer(kind: str, folder: Path, width: int) -> tuple[torch.nn.Module, int]:
    """A layer that takes vectors of a width, and the width of what it gives."""
    if kind == "Normalize":
        return _Normalize(), width
    if kind == "Dense":
        return _dense(folder, width)
    raise ModelError(
        f"The sentence-transformers module {kind} is not supported; Pooling, Dense and Normalize are.\n"
        f"{_TOKENS_INSTEAD}"
    )


def _dense(folder: Path, width: int) -> tuple[torch.nn.Module, int]:
    config = read_object(folder / "config.json")
    # Tanh is what sentence-transformers takes where none is named.
    activation = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
    if activation not in ("Identity", "Tanh", "ReLU", "GELU"):
        raise ModelError(
            f"{folder / 'config.json'} asks for the activation {shown(activation)}; supported: Identity, Tanh, ReLU, "
            f"GELU.\n{_TOKENS_INSTEAD}"
        )
    if config.get("module_input_name", "sentence_embedding") != "sentence_embedding":
        raise ModelError(
            f"{folder / 'config.json'} applies the layer to {shown(config['module_input_name'])}; only "
            f"sentence_embedding is supported.\n{_TOKENS_INSTEAD}"
        )
    if not (folder / "model.safetensors").is_file():
        raise ModelError(f"{folder} holds no model.safetensors.\nConvert its weights to safetensors.")
    weights = {
        name.removeprefix("linear."): weight for name, weight in read_weights(folder / "model.safetensors").items()
    }
    _check_dense(folder, config, weights, width)
    # The file's own tensors: nothing of a size that only the configuration names is made.
    out_features, in_features = weights["weight"].shape
    linear = torch.nn.Linear(in_features, out_features, bias="bias" in weights, device="meta")
    linear.load_state_dict({name: weight.float() for name, weight in weights.items()}, assign=True)
    return torch.nn.Sequential(linear, getattr(torch.nn, activation)()), linear.out_features


def _check_dense(folder: Path, config: dict[str, object], weights: dict[str, torch.Tensor], width: int) -> None:
    """Refuse a layer whose weights, configuration and input differ in width, or are no numbers to compute with."""
    there = {name: list(weight.shape) for name, weight in weights.items()}
    sizes = config.get("out_features"), config.get("in_features")
    if not all(type(size) is int and size > 0 for size in sizes):
        raise ModelError(
            f"{folder / 'config.json'} has in_features {shown(sizes[1])} and out_features {shown(sizes[0])}; whole "
            "numbers from 1 up are needed.\nSet them to the widths of the weights."
        )
    if there not in ({"weight": list(sizes)}, {"weight": list(sizes), "bias": [sizes[0]]}):
        raise ModelError(
            f"The layer in {folder} cannot be read: its weights are {shown(there)}, and config.json says "
            f"in_features {sizes[1]} and out_features {sizes[0]}.\nDownload the model again."
        )
    if sizes[1] != width:
        raise ModelError(
            f"The layer in {folder} takes vectors of width {sizes[1]}, and those before it are of width {width}.\n"
            "Check that modules.json, the pooling and the encoder belong together."
        )
    wrong = [name for name, weight in weights.items() if not (weight.is_floating_point() and weight.isfinite().all())]
    if wrong:
        raise ModelError(
            f"The layer in {folder} has weights that are integers, NaN or infinite: {', '.join(wrong)}.\n"
            "Download the model again, or build the checkpoint that was quantised."
        )
