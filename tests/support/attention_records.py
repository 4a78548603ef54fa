"""The manifest's record of an attention type."""

from __future__ import annotations

from typing import Any

from hdexport.attention.registry import attention_of
from hdruntime.bundle.manifest import Manifest


def recorded(manifest: Manifest, name: str) -> Any | None:
    """The record of the attention type of that name; None if the model has none."""
    records = [attention.record for attention in attention_of(manifest) if attention.type.name == name]
    assert len(records) <= 1
    return records[0] if records else None
