"""How the server writes the parameters of an error: as keys of the request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum

from hdruntime.errors import Setting

_VALUES: Mapping[tuple[str, str], str] = {
    ("overflow", "truncate"): "end",
    ("overflow", "split"): "split",
    ("overflow", "error"): "error",
}
"""Values of ``truncate`` in a request, by those of `overflow`."""

_KEYS = {"overflow": "truncate", "normalize_embeddings": "normalize"}
"""Keys of a request that are not named as their parameter is."""


def request_key(setting: Setting) -> str:
    """A setting as a request's JSON has it: ``"truncate": "end"``. What only the operator sets keeps its flag."""
    value = setting.value.value if isinstance(setting.value, Enum) else setting.value
    if setting.command:
        return f"--{setting.name.replace('_', '-')}" + ("" if value in (None, True) else f" {value}")
    key = json.dumps(_KEYS.get(setting.name, setting.name))
    if value is None:
        return key
    return f"{key}: {json.dumps(_VALUES.get((setting.name, str(value)), value))}"
