"""How the server writes the parameters of an error: as keys of the request, or as flags of ``hdexport serve``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum

from hdruntime.errors import HdexportError, Setting, joined, write
from hdruntime.text.encoding import Overflow

_TRUNCATE: Mapping[object, str] = {Overflow.TRUNCATE: "end", Overflow.SPLIT: "split", Overflow.ERROR: "error"}
"""Values of ``truncate`` in a request, by values of `overflow`."""

_KEYS = {"overflow": "truncate", "normalize_embeddings": "normalize"}
"""Keys of a request that are not named as their parameter is."""

_LOAD_PARAMETERS = ("backend", "device", "max_seq_length", "precision", "threads")
"""Parameters of `hdruntime.load`, which no request has: the operator sets them."""


def request_key(setting: Setting) -> str:
    """A setting as a request's JSON has it: ``"truncate": "end"``, or the operator's flag: ``--max-seq-length 512``."""
    value = setting.value.value if isinstance(setting.value, Enum) else setting.value
    if setting.command or setting.name in _LOAD_PARAMETERS:
        return f"--{setting.name.replace('_', '-')}" + ("" if value is ... or value is True else f" {value}")
    key = json.dumps(_KEYS.get(setting.name, setting.name))
    if value is ...:
        return key
    return f"{key}: {json.dumps(_TRUNCATE.get(value, value) if setting.name == 'overflow' else value)}"


def request_message(error: HdexportError) -> str:
    """The message of an error to a client, without a hint at parameters that neither requests nor the operator have."""
    settings = [part for part in joined(error.hint) if isinstance(part, Setting)]
    is_known = all(each.command or each.name in (*_LOAD_PARAMETERS, *_KEYS, *_KEYS.values()) for each in settings)
    return error.message(request_key) if is_known else write(error.problem, request_key)
