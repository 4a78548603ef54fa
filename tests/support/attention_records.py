"""The manifest's record of a kind of attention."""

from __future__ import annotations

from typing import Any

from hdexport.attention.kinds import attention_of
from hdruntime.bundle.manifest import Manifest


def recorded(manifest: Manifest, kind: str) -> Any | None:
    """The record of the kind of that name; None where the model has none of it."""
    found = [attention.record for attention in attention_of(manifest) if attention.kind.name == kind]
    assert len(found) <= 1
    return found[0] if found else None
