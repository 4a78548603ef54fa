"""Rotary positions whose base is multiplied, so that longer texts turn by no more than the trained ones (NTK-aware).

Position p turns the i-th pair of a head's numbers by p * theta^(-2i / head_dim). With a larger theta the slow pairs
turn less, and the fast ones, by which near tokens are told apart, nearly as before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hdexport.model.family import Family
from hdruntime.bundle.manifest import Positions
from hdruntime.errors import InputError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LAYERS = "full_attention"
"""Layers whose positions are stretched, where a model has several kinds of them.

Windowed layers see no further in a long text than in texts of training.
"""


def check_rope_factor(factor: float, family: Family, positions: Positions, *, model_type: str) -> None:
    """Refuse a factor, above 1, of the base of rotary positions that a model has no use for.

    An InputError says that positions are learned, or that no text is longer than the trained ones; a ModelError, that
    they are computed in a way that has no base here.
    """
    if family.learned_positions:
        raise InputError(
            f"--rope ntk:{factor:g} is for rotary positions, and those of {model_type} are learned.\n"
            "Leave it out; --positions says where positions after the checkpoint's come from."
        )
    if not family.stretches_rotary:
        raise ModelError(f"--rope ntk:{factor:g} cannot stretch the positions of {model_type}.\nLeave it out.")
    if positions.rows <= positions.base:
        raise InputError(
            f"--rope ntk:{factor:g} changes all answers, for texts longer than the {positions.base} tokens of "
            f"training; --max-len {positions.rows} allows none.\nLeave it out, or use a larger --max-len."
        )


def stretch_rotary(model: PreTrainedModel, factor: float) -> None:
    """Multiply the base of the rotary positions of layers that attend to the whole text, in place.

    A ModelError refuses positions that are scaled already.
    """
    rotary: Any = model.base_model.rotary_emb
    parameters = _parameters(model)
    name = f"{_LAYERS}_inv_freq" if hasattr(rotary, f"{_LAYERS}_inv_freq") else "inv_freq"
    frequencies = getattr(rotary, name)  # [head_dim / 2]
    head_dim = 2 * len(frequencies)
    theta = parameters["rope_theta"] * factor
    powers = torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim
    # Rounded as the library would: an error of 1e-7 is one of 1e-3 at position 10000.
    setattr(rotary, name, 1.0 / theta**powers)


def use_stretched_rotary(model: PreTrainedModel, factor: float) -> None:
    """Stretch rotary positions by the library's own code, from a changed configuration: the reference of a bundle."""
    base: Any = model.base_model
    _parameters(model)["rope_theta"] *= factor
    base.rotary_emb = type(base.rotary_emb)(model.config)


def _parameters(model: PreTrainedModel) -> dict[str, Any]:
    parameters: dict[str, Any] = model.config.rope_parameters
    parameters = parameters.get(_LAYERS, parameters)
    if parameters["rope_type"] != "default":
        raise ModelError(
            f"--rope ntk stretches rotary positions of the type 'default', and the checkpoint's rope_parameters have "
            f"the rope_type {parameters['rope_type']!r}, which scales them already.\nLeave it out."
        )
    return parameters
