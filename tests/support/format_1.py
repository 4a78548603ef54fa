"""Manifests as format version 1 had them: attention in five keys, inputs without roles."""

from __future__ import annotations

__all__ = ["format_1_of"]

from collections.abc import Mapping
from typing import Any

_NOT_THERE_YET = ("operators", "padding")
_OF_AN_INPUT = ("name", "dtype", "shape")


def format_1_of(manifest: Mapping[str, Any], **old: object) -> dict[str, Any]:
    """Today's manifest of a model with dense attention, in format version 1.

    Args:
        manifest: as JSON has it.
        old: values of the keys of that format: ``windows``, ``window``, ``block_sparse``, ``global_attention``,
            ``token_type_separator_id``, and others that are to differ.
    """
    return {
        **{key: value for key, value in manifest.items() if key not in _NOT_THERE_YET},
        "format_version": 1,
        "attention": manifest["operators"],
        "inputs": [{key: spec[key] for key in _OF_AN_INPUT} for spec in manifest["inputs"]],
        "windows": [],
        "window": None,
        "block_sparse": None,
        "global_attention": None,
        "token_type_separator_id": None,
        **old,
    }
