"""Protocol Buffers' text format, written: https://protobuf.dev/reference/protobuf/textformat-spec/"""

from __future__ import annotations

__all__ = ["Message", "Name", "protobuf_text"]

from collections.abc import Iterator, Mapping
from typing import Any


class Name(str):
    """The name of an enum's value, which stands without quotes."""


Message = Mapping[str, Any]
"""Field name -> value: a string, a `Name`, an integer, a boolean, a message, or a list of one of these."""


def protobuf_text(message: Message) -> str:
    """The message as text, one field per line. An empty list is an absent field."""
    return "".join(f"{line}\n" for line in _lines(message))


def _lines(message: Message) -> Iterator[str]:
    for name, value in message.items():
        values = value if isinstance(value, list) else [value]
        if isinstance(value, list) and value and not isinstance(value[0], Mapping):
            yield f"{name}: [{', '.join(map(_scalar, value))}]"
            continue
        for item in values:
            if isinstance(item, Mapping):
                yield f"{name} {{"
                yield from (f"  {line}" for line in _lines(item))
                yield "}"
            else:
                yield f"{name}: {_scalar(item)}"


def _scalar(value: object) -> str:
    if isinstance(value, Name):
        return value
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    raise TypeError(f"the text format is not written for {type(value).__name__}")


def _quoted(text: str) -> str:
    """A string literal of printable ASCII; every other byte, the quote and the backslash as three octal digits."""
    plain = (chr(byte) if 0x20 <= byte < 0x7F and byte not in b'"\\' else f"\\{byte:03o}" for byte in text.encode())
    return f'"{"".join(plain)}"'
