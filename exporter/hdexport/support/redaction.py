"""The filter of published results: they keep the kind of a machine, and nothing that identifies this machine."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, TypeVar

Value = TypeVar("Value")

_LEFT_OUT = "(left out)"

_PATH_IN_ARGUMENT = re.compile(r"(?:^|(?<=[=:,]))~?/(?!/)[^=:,]*?([^/=:,]*)/*(?=$|[=:,])")
"""An absolute path, which may have spaces, as a value in an argument; its last part is the group."""

_PATHS = (
    re.compile(r"(?<=['\"])~?/(?!/)[^'\"\n]*?([^/'\"\n]*)/*(?=['\"])"),
    re.compile(r"(?:(?<=file://)|(?<![\w./~<-]))~?(?:/[^\s/:;,'\"()<>|=]+)*/([^\s/:;,'\"()<>|=]+)/*"),
)
"""The same in a text: in quotes, or up to a space."""

_HOME = re.compile(r"/(?:home|Users)/[^/]+/*")
"""The last part of such a path is a user's name."""

_FORMS = (
    re.compile(r"\b(?:(?:GPU|MIG)-)?[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b"),
    re.compile(r"\b(?:GPU|MIG)-[0-9a-f]{8}[0-9a-f-]*"),
    re.compile(r"(?<![\w:-])[0-9a-fA-F]{2}([:-])[0-9a-fA-F]{2}(?:\1[0-9a-fA-F]{2}){4}(?![\w:-])"),
    re.compile(r"(?<![\w:.-])(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[01][0-9a-fA-F]\.[0-7](?![\w.])"),
)
"""UUIDs, their beginnings as ``CUDA_VISIBLE_DEVICES`` takes them, MAC addresses, and PCI addresses."""

_WORDS = "(?:serial|uuid|guid|pdi|host[ _]?name|host[ _]?id|user[ _]?name|mac[ _]address|bus[ _]?id)"
_CALLED = re.compile(rf"(?i)(\b{_WORDS}(?: number| no\.?)?['\"]?\s*[:=]\s*['\"]?)(?!N/A\b|\(left)[^\s,;'\"]+")
_KEY = re.compile(rf"(?i)(?:^|[_\W]){_WORDS}(?:$|[_\W])")
"""Identifiers by the word before them, in a text or as a key."""


def redact(value: Value) -> Value:
    """The value as others may see it: a text, or a list, mapping or dataclass of texts and other values. Absolute paths
    are cut to their last part. UUIDs, MAC and PCI addresses, and what is called a serial number or the name of a host
    or a user become "(left out)"."""
    redacted: Any = value
    if isinstance(value, str):
        text = _redact_text(value)
        redacted = value if text == value else text  # a value of an enumeration stays one
    elif isinstance(value, Mapping):
        redacted = {
            redact(key): _LEFT_OUT if _is_identifier(key, item) else redact(item) for key, item in value.items()
        }
    elif isinstance(value, (list, tuple)):
        redacted = type(value)(redact(each) for each in value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {each.name: redact(getattr(value, each.name)) for each in dataclasses.fields(value)}
        redacted = dataclasses.replace(value, **fields)
    return redacted


def redact_argument(argument: str) -> str:
    """A word of a command line as others may see it."""
    return redact(_PATH_IN_ARGUMENT.sub(_last_part, argument))


def _redact_text(text: str) -> str:
    for pattern in _FORMS:
        text = pattern.sub(_LEFT_OUT, text)
    text = _CALLED.sub(rf"\1{_LEFT_OUT}", text)
    for pattern in _PATHS:
        text = pattern.sub(_last_part, text)
    return text


def _last_part(path: re.Match[str]) -> str:
    return _LEFT_OUT if _HOME.fullmatch(path[0]) else path[1]


def _is_identifier(key: object, value: object) -> bool:
    return value is not None and isinstance(key, str) and _KEY.search(key) is not None
