"""X-MOD: a RoBERTa with a small network per language in each layer, of which a bundle has one.

Source: Pfeiffer et al., "Lifting the Curse of Multilinguality by Pre-training Modular Transformers" (2022).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import PreTrainedModel

from hdexport.model.family import Family, NativeAdapters
from hdruntime.errors import ModelError, Setting


def _check_language(model: PreTrainedModel) -> None:
    """Make the language of a model that has one alone its default, in place.

    A ModelError says that there are several, and neither ``config.json`` nor ``--adapter`` chooses.
    """
    config = model.config
    languages = list(config.languages)
    if config.default_language is None and len(languages) == 1:
        config.default_language = languages[0]
    if config.default_language not in languages:
        raise ModelError(
            f"config.json has default_language {config.default_language!r}, and the model has networks for "
            f"{', '.join(languages)}: a bundle has one of them.",
            hint=("Choose one, for example: ", Setting("adapter", languages[0])),
        )


def _adapt(model: PreTrainedModel) -> None:
    for layer in model.base_model.encoder.layer:
        layer.output.lang_adapter = functools.partial(_adapted, layer.output, str(model.config.default_language))


def _adapted(output: Any, language: str, _: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """The original's sum of states and the language's adapter's, which finds the rows of each language."""
    residual = states
    if output.adapter_layer_norm is not None:
        states = output.adapter_layer_norm(states)
    elif output.adapter_reuse_layer_norm:
        states = output.LayerNorm(states)
    if output.ln_before_adapter:
        residual = states
    adapted: torch.Tensor = output.adapter_modules[language](states)
    return adapted + residual


FAMILY = Family(
    adapters=NativeAdapters(names_key="languages", default_key="default_language"),
    padding_row=lambda config: int(config.pad_token_id),
    prepare=_check_language,
    adapt=_adapt,
)
