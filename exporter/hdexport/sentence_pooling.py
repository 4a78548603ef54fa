"""The modules that sentence-transformers puts after an encoder, as one PyTorch module in float32."""

from __future__ import annotations

__all__ = ["SentencePooling", "sentence_pooling"]

import json
from pathlib import Path
from typing import Any

import torch

from hdruntime.errors import ModelError

_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
}
"""Flag of ``1_Pooling/config.json`` -> the mode's name, in the order in which results are concatenated."""


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


def sentence_pooling(path: Path) -> SentencePooling:
    """Read ``modules.json`` and the folders it names.

    Args:
        path: a sentence-transformers directory.

    Raises:
        ModelError: a module or a pooling mode is not supported, or a file is missing.
    """
    modules = _read_json(path / "modules.json")
    if not isinstance(modules, list) or not modules:
        raise ModelError(f"{path / 'modules.json'} lists no modules.\nDownload the model again.")
    if not all(isinstance(module, dict) and {"type", "path"} <= module.keys() for module in modules):
        raise ModelError(f"{path / 'modules.json'} lists a module without type or path.\nDownload the model again.")
    kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
    if len(kinds) < 2 or kinds[0] != "Transformer" or kinds[1] != "Pooling":
        raise ModelError(
            f"{path} chains the modules {', '.join(kinds)}; a Transformer followed by a Pooling is supported.\n"
            "Build the tokens' embeddings instead: --task feature-extraction"
        )
    layers = [_layer(kind, path / str(module["path"])) for kind, module in zip(kinds[2:], modules[2:], strict=True)]
    return SentencePooling(_pooling_modes(path / str(modules[1]["path"]) / "config.json"), layers)


def _pooling_modes(config_path: Path) -> tuple[str, ...]:
    config = _read_object(config_path)
    named = config.get("pooling_mode")
    if named:
        modes = tuple(named.split("+") if isinstance(named, str) else map(str, named))
    else:
        modes = tuple(mode for flag, mode in _MODES.items() if config.get(flag))
        unknown = [
            flag for flag, on in config.items() if flag.startswith("pooling_mode_") and on and flag not in _MODES
        ]
        modes += tuple(flag.removeprefix("pooling_mode_") for flag in unknown)
    unsupported = [mode for mode in modes if mode not in _MODES.values()]
    if unsupported or not modes:
        raise ModelError(
            f"{config_path} asks for the pooling {', '.join(unsupported) or '(none)'}; "
            f"supported: {', '.join(_MODES.values())}.\n"
            "Build the tokens' embeddings instead: --task feature-extraction"
        )
    return modes


def _layer(kind: str, folder: Path) -> torch.nn.Module:
    if kind == "Normalize":
        return _Normalize()
    if kind == "Dense":
        return _dense(folder)
    raise ModelError(
        f"The sentence-transformers module {kind} is not supported; Pooling, Dense and Normalize are.\n"
        "Build the tokens' embeddings instead: --task feature-extraction"
    )


def _dense(folder: Path) -> torch.nn.Module:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    config = _read_object(folder / "config.json")
    # Tanh is what sentence-transformers takes where none is named.
    activation = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
    if activation not in ("Identity", "Tanh", "ReLU", "GELU"):
        raise ModelError(
            f"{folder / 'config.json'} asks for the activation {activation}; supported: Identity, Tanh, ReLU, GELU.\n"
            "Build the tokens' embeddings instead: --task feature-extraction"
        )
    if config.get("module_input_name", "sentence_embedding") != "sentence_embedding":
        raise ModelError(
            f"{folder / 'config.json'} applies the layer to {config['module_input_name']}; only sentence_embedding is "
            "supported.\nBuild the tokens' embeddings instead: --task feature-extraction"
        )
    if not (folder / "model.safetensors").is_file():
        raise ModelError(f"{folder} holds no model.safetensors.\nConvert its weights to safetensors.")
    try:
        weights = load_file(folder / "model.safetensors")
        linear = torch.nn.Linear(config["in_features"], config["out_features"], bias="linear.bias" in weights)
        linear.load_state_dict({name.removeprefix("linear."): value for name, value in weights.items()})
    except (SafetensorError, KeyError, TypeError, RuntimeError) as error:
        raise ModelError(f"The layer in {folder} cannot be read: {error}\nDownload the model again.") from error
    return torch.nn.Sequential(linear.float(), getattr(torch.nn, activation)())


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}\nDownload the model again.") from error


def _read_object(path: Path) -> dict[str, Any]:
    content = _read_json(path)
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds no JSON object.\nDownload the model again.")
    return content
