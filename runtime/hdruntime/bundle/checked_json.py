"""JSON as dataclasses, every value checked against its annotation; errors name place and value."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, inspect

_LONGEST_SHOWN = 60
"""Characters of a wrong value that a message shows."""

_ANY_KEY = "..."
"""msgspec's name for any key of a dict."""

_MOST_LEVELS = 16
"""Maximum nesting of lists and objects; hdexport's files have seven levels."""

_OTHER_SURROGATES = re.compile("[\ud800-\udc7f\udd00-\udfff]")
"""Surrogates that do not stand for a byte."""

Value = TypeVar("Value")


_MOST_TOKENS = 2**24
"""More than any model has positions for; up to here float32, in which graphs divide by lengths, has every integer."""

_INT32_MAX = 2**31 - 1
"""The largest axis, id or number of layers that the backends index with."""

Length = Annotated[int, Meta(ge=1, le=_MOST_TOKENS)]
TokenCount = Annotated[int, Meta(ge=0, le=_MOST_TOKENS)]
TokenId = Annotated[int, Meta(ge=0, le=_INT32_MAX)]
Size = Annotated[int, Meta(ge=1, le=_INT32_MAX)]
Count = Annotated[int, Meta(ge=0, le=_INT32_MAX)]
LargeCount = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Name = Annotated[str, Meta(min_length=1)]


class MalformedJsonError(ValueError):
    """A text is not JSON, not UTF-8, or nested too deeply."""


class JsonMismatchError(ValueError):
    """JSON does not match the dataclasses: ``manifest.max_len should be `int` >= 1, not 0``."""


class UnknownChoiceError(JsonMismatchError):
    """A string is not one of a closed choice."""


def from_json(text: str | bytes, kind: type[Value], *, name: str) -> Value:
    """Read a dataclass, whose annotations msgspec understands, from JSON: strictly, in UTF-8 without lone surrogates.

    Unknown keys are ignored, and keys with a default may be missing; `name` is the value's in messages. Another text is
    a MalformedJsonError, another value a JsonMismatchError or an UnknownChoiceError.
    """
    return from_values(values_of_json(text), kind, name=name)


def values_of_json(text: str | bytes) -> object:
    """The objects, lists, strings, numbers, booleans and None of a text; another text is a MalformedJsonError."""
    try:
        values: object = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise MalformedJsonError(str(error)) from None
    # Otherwise code that walks through it later, to show or copy it, might run out of stack.
    if not _is_shallow(values, _MOST_LEVELS):
        raise MalformedJsonError(f"more than {_MOST_LEVELS} lists and objects are inside each other")
    return values


def from_values(values: object, kind: type[Value], *, name: str, known_keys_only: bool = False) -> Value:
    """Like `from_json`, from the result of `values_of_json`; with `known_keys_only` unknown keys are rejected."""
    try:
        value = msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise _mismatch(str(error), copy.deepcopy(values), kind, name) from None
    if known_keys_only and (unknown := _unknown_key(values, msgspec.to_builtins(value), name)):
        raise JsonMismatchError(f"{unknown} is unknown")
    return value


def _unknown_key(values: object, known: object, name: str) -> str | None:
    """The place of the first key of `values` that `known` lacks."""
    pairs: list[tuple[str, object, object]] = []
    if isinstance(values, dict) and isinstance(known, dict):
        for key, value in values.items():
            where = f"{name}.{key}" if key.isidentifier() else f"{name}[{key!r}]"
            if key not in known:
                return where
            pairs.append((where, value, known[key]))
    elif isinstance(values, list) and isinstance(known, list | tuple):
        pairs = [(f"{name}[{index}]", *both) for index, both in enumerate(zip(values, known, strict=True))]
    unknown = (_unknown_key(value, other, where) for where, value, other in pairs)
    return next((place for place in unknown if place is not None), None)


def json_from_dataclass(value: Any) -> str:
    """The text of a dataclass: indented, keys in the order of its fields, enums as their values.

    The text is valid UTF-8, also where a string is not: Python keeps bytes of the command line and of paths that the
    locale cannot decode as lone surrogates, and most of the time they are UTF-8. A number that is NaN or infinite,
    which JSON cannot hold, is a ValueError.
    """
    text = json.dumps(dataclasses.asdict(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    return _OTHER_SURROGATES.sub("\ufffd", text).encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _mismatch(message: str, data: Any, kind: type, name: str) -> JsonMismatchError:
    """The error for a message of msgspec: "Expected `int`, got `str` - at `$.files[...].size_bytes`"."""
    problem, _, path = message.partition(" - at `$")
    keys, value = _followed(data, path.rstrip("`"), message, kind)
    where = name + "".join(f".{key}" if key.isidentifier() else f"[{key}]" for key in keys)
    if missing := re.fullmatch("Object missing required field `(.*)`", problem):
        return JsonMismatchError(f"{where}.{missing[1]} is missing")
    shown = json.dumps(value)
    shown = shown if len(shown) <= _LONGEST_SHOWN else shown[: _LONGEST_SHOWN - 3] + "..."
    if problem.startswith("Invalid enum value"):
        choices = ", ".join(map(repr, _choices(inspect.type_info(kind), keys)))
        return UnknownChoiceError(f"{where} should be one of {choices}, not {shown}")
    if problem.startswith("Expected "):
        expected = problem.removeprefix("Expected ").partition(", got ")[0]
        return JsonMismatchError(f"{where} should be {expected}, not {shown}")
    return JsonMismatchError(f"{where} is {shown}: {problem}")


def _followed(data: Any, path: str, message: str, kind: type) -> tuple[list[str], Any]:
    """The keys of a path of msgspec's, ".a[2][...].b" -> ["a", "2", "'x'", "b"], and the value there.

    msgspec does not name the key of a dict: this finds the first key that gives the same message on its own.
    """
    keys: list[str] = []
    value = data
    for key in re.findall(r"[^.\[\]]+|\.{3}", path):
        if key == _ANY_KEY:
            named = next((name for name in list(value) if _fails_alone(data, value, name, message, kind)), None)
            if named is None:
                return [*keys, _ANY_KEY], value
            key = named
            keys.append(repr(key))
        else:
            keys.append(key)
        value = value[int(key)] if isinstance(value, list) else value[key]
    return keys, value


def _fails_alone(data: Any, values: dict[str, Any], key: str, message: str, kind: type) -> bool:
    """Whether the data without the other keys gives the message; if so, the other keys stay removed."""
    others = dict(values)
    values.clear()
    values[key] = others[key]
    try:
        msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        if str(error) == message:
            return True
    values.update(others)
    return False


def _is_shallow(value: object, levels: int) -> bool:
    if not isinstance(value, (dict, list)):
        return True
    inner = value.values() if isinstance(value, dict) else value
    return levels > 0 and all(_is_shallow(item, levels - 1) for item in inner)


def _choices(kind: inspect.Type, keys: Sequence[str]) -> tuple[Any, ...]:
    """The values of the `Literal` or enum at a place."""
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    for kind in kinds:
        if isinstance(kind, inspect.LiteralType):
            return kind.values
        if isinstance(kind, inspect.EnumType):
            return tuple(member.value for member in kind.cls)
        if isinstance(kind, inspect.DataclassType):
            return _choices(next(field.type for field in kind.fields if field.name == keys[0]), keys[1:])
        if isinstance(kind, inspect.VarTupleType):
            return _choices(kind.item_type, keys[1:])
        if isinstance(kind, inspect.TupleType):
            return _choices(kind.item_types[int(keys[0])], keys[1:])
        if isinstance(kind, inspect.DictType):
            return _choices(kind.value_type, keys[1:])
    raise AssertionError(f"no choice at {keys}")
