"""``hierarchical_position`` of a configuration: whether bert4keras decomposes positions, and with which alpha."""

from __future__ import annotations

__all__ = ["HIERARCHICAL_KEY", "hierarchical_alpha"]

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hdexport.model.positions import DEFAULT_ALPHA
from hdexport.support.json_files import shown
from hdruntime.errors import ModelError

HIERARCHICAL_KEY = "hierarchical_position"
"""An argument of bert4keras' ``build_transformer_model``, which also reads it from the configuration."""


def hierarchical_alpha(config: Mapping[str, Any], file: Path) -> float | None:
    """The alpha with which a model's positions are decomposed; None where the configuration does not ask for that.

    Args:
        config: content of the checkpoint's configuration.
        file: that file, for messages.

    Raises:
        ModelError: the value is neither true, false, null nor a number that can be an alpha.
    """
    value = config.get(HIERARCHICAL_KEY)
    if value is None or value is False:
        return None
    if value is True:
        return DEFAULT_ALPHA
    if not isinstance(value, (int, float)) or not 0 < value < 1 or value == 0.5:
        raise ModelError(
            f"{file} has {HIERARCHICAL_KEY} {shown(value)}; it is true, for an alpha of {DEFAULT_ALPHA:g}, or an alpha "
            "between 0 and 1 other than 0.5.\nSet it to the value that the model was trained with, or remove it."
        )
    return float(value)
