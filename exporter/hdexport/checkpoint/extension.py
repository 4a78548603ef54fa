"""The note of `hdexport extend` and `hdexport tune` in ``config.json``: how the checkpoint's positions became more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hdruntime.bundle.checked_json import JsonMismatchError, from_values
from hdruntime.bundle.manifest import AttentionScale, Scheme
from hdruntime.bundle.value_types import Length
from hdruntime.errors import ModelError

EXTENSION_KEY = "hdexport"
"""Key of ``config.json``; transformers keeps it when it saves the model again."""


@dataclass(frozen=True, kw_only=True)
class Extension:
    """How a checkpoint's positions were extended.

    Attributes:
        base: positions that the original checkpoint was trained with.
        scheme: where the other rows came from, before any training.
        alpha: weight of the coarse position in the hierarchical scheme; None for other schemes.
        attention_scale: factor of the queries with which the rows were trained.
        attention: value of ``--attention`` with which the rows were trained; None for the model's own.
        tuned: whether `hdexport tune` trained the rows.
    """

    base: Length
    scheme: Scheme
    alpha: float | None = None
    attention_scale: AttentionScale = "none"
    attention: str | None = None
    tuned: bool = False


def read_extension(config: Mapping[str, Any], file: Path) -> Extension | None:
    """How a checkpoint was extended; None for one that was not.

    Args:
        config: content of the checkpoint's ``config.json``.
        file: that file, for messages.

    Raises:
        ModelError: the record is malformed.
    """
    values = config.get(EXTENSION_KEY)
    if values is None:
        return None
    try:
        return from_values(values, Extension, name=EXTENSION_KEY)
    except JsonMismatchError as error:
        raise ModelError(
            f"{file} has a malformed record of its extension: {error}.\n"
            f'Remove "{EXTENSION_KEY}" from it, or extend the original checkpoint again.'
        ) from None
