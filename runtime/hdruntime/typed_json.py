"""Dataclasses as JSON and back, every value checked against its annotation."""

from __future__ import annotations

__all__ = ["JsonMismatchError", "MissingKeyError", "WrongValueError", "decoded", "json_from_dataclass"]

import dataclasses
import json
import sys
import types
import typing
from enum import Enum
from typing import Any

_LONGEST_SHOWN = 60
"""Characters of a wrong value that a message shows."""


class JsonMismatchError(ValueError):
    """JSON is not what the dataclasses say. The file's reader makes of it what its user should do.

    Attributes:
        where: the key, as ``manifest.outputs[0].dtype``.
    """

    def __init__(self, where: str, message: str) -> None:
        super().__init__(message)
        self.where = where


class MissingKeyError(JsonMismatchError):
    """A key without a default is not there."""

    def __init__(self, where: str) -> None:
        super().__init__(where, f"{where} is missing")


class WrongValueError(JsonMismatchError):
    """A value is not what fits; the message says ``where should be expected, not value``."""

    def __init__(self, where: str, expected: str, value: object) -> None:
        shown = json.dumps(value)
        shown = shown if len(shown) <= _LONGEST_SHOWN else shown[: _LONGEST_SHOWN - 3] + "..."
        super().__init__(where, f"{where} should be {expected}, not {shown}")


def json_from_dataclass(value: Any) -> str:
    """The text of a dataclass: indented, keys in the order of its fields, enums as their values.

    Raises:
        ValueError: a number is NaN or infinite, which JSON cannot hold.
    """
    return json.dumps(dataclasses.asdict(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def decoded(value: Any, hint: Any, where: str) -> Any:
    """What `json.loads` gave, as the annotated type; keys that a dataclass does not know are ignored.

    Args:
        value: lists, objects, strings, numbers, booleans and null.
        hint: a dataclass, or any annotation of one's fields: scalars, enums, tuples, dicts by string, unions with None,
            ``object`` for whatever comes.
        where: what the value is called in messages.

    Raises:
        MissingKeyError: a key that has no default is not there.
        WrongValueError: a value is of another type, not finite, or none of an enum's.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _dataclass(value, typing.cast(type, hint), where)
    if origin in (typing.Union, types.UnionType):
        return _union(value, arguments, where)
    if origin is tuple:
        return _tuple(value, arguments, where)
    if origin is dict:
        _require_type(value, dict, where)
        return {key: decoded(item, arguments[1], f"{where}[{key!r}]") for key, item in value.items()}
    if hint is object:
        return value
    if hint is float:
        return _float(value, where)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _enum(value, hint, where)
    _require_type(value, hint, where)
    return value


def _dataclass(value: Any, cls: type, where: str) -> Any:
    _require_type(value, dict, where)
    hints = typing.get_type_hints(cls)
    # A key that came later than the format has a default, so that older files stay readable.
    required = {field.name for field in dataclasses.fields(cls) if field.default is dataclasses.MISSING}
    missing = [name for name in hints if name in required and name not in value]
    if missing:
        raise MissingKeyError(f"{where}.{missing[0]}")
    given = {name: hint for name, hint in hints.items() if name in value}
    return cls(**{name: decoded(value[name], hint, f"{where}.{name}") for name, hint in given.items()})


def _union(value: Any, alternatives: tuple[Any, ...], where: str) -> Any:
    if value is None and types.NoneType in alternatives:
        return None
    kinds = [kind for kind in alternatives if kind is not types.NoneType]
    for kind in kinds:
        if type(value) is kind:
            return decoded(value, kind, where)
    return decoded(value, kinds[-1], where)


def _tuple(value: Any, arguments: tuple[Any, ...], where: str) -> tuple[Any, ...]:
    _require_type(value, list, where)
    if arguments[-1] is Ellipsis:
        return tuple(decoded(item, arguments[0], f"{where}[{i}]") for i, item in enumerate(value))
    if len(value) != len(arguments):
        raise WrongValueError(where, f"a list of {len(arguments)}", value)
    return tuple(
        decoded(item, hint, f"{where}[{i}]") for i, (item, hint) in enumerate(zip(value, arguments, strict=True))
    )


def _float(value: Any, where: str) -> float:
    if type(value) is not int:
        _require_type(value, float, where)
    # Python reads NaN, 1e999 as infinity, and integers of any size; no file of ours holds any of them.
    if not abs(value) <= sys.float_info.max:
        raise WrongValueError(where, "a finite number", value)
    return float(value)


def _enum(value: Any, kind: type[Enum], where: str) -> Enum:
    values = [member.value for member in kind]
    if value not in values:
        raise WrongValueError(where, f"one of {', '.join(map(repr, values))}", value)
    return kind(value)


_NAME_OF_TYPE = {
    dict: "an object",
    list: "a list",
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "a boolean",
}


def _require_type(value: Any, kind: type, where: str) -> None:
    # `type() is`, not isinstance: True is an int in Python, and is none in JSON.
    if type(value) is not kind:
        raise WrongValueError(where, _NAME_OF_TYPE[kind], value)
