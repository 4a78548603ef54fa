"""JSON files of a checkpoint, with any content, read with errors that name the file."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from hdruntime.bundle.checked_json import JsonMismatchError, from_values
from hdruntime.errors import ModelError
from hdruntime.os_errors import explained

_LONGEST_SHOWN = 300
"""Characters of a value from a file in a message: the file may hold a word of megabytes."""

_AGAIN = "Download the model again."

Settings = TypeVar("Settings")

_POINTER_BEGIN = b"version https://git-lfs.github.com/spec/"

_MOST_POINTER_BYTES = 1024
"""Most bytes of a pointer, by the specification of Git LFS."""


def read_json(path: Path) -> Any:
    """The content of a JSON file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reject_pointer(path)
        # A ValueError comes from invalid JSON or UTF-8, a path with a NUL, or a number of thousands of digits.
        if isinstance(error, OSError):
            raise ModelError(f"{shown(path)} cannot be read: {explained(error, otherwise=_AGAIN)}") from error
        raise ModelError(f"{shown(path)} cannot be read: {_reason(error)}", hint=_AGAIN) from error


def read_object(path: Path, *, missing_ok: bool = False) -> dict[str, Any]:
    """The content of a file that holds one JSON object; with `missing_ok`, a missing file is an empty one."""
    if missing_ok and not path.is_file():
        return {}
    content = read_json(path)
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds no JSON object.", hint="Download the model again.")
    return content


def read_settings(path: Path, kind: type[Settings], *, missing_ok: bool = False) -> Settings:
    """The content of a file as a dataclass of the keys that are read; other keys change nothing. See `read_object`."""
    try:
        return from_values(read_object(path, missing_ok=missing_ok), kind, name=shown(path))
    except JsonMismatchError as error:
        raise ModelError(f"{error}.", hint="Correct it, or download the model again.") from None


def shown(value: object) -> str:
    """A value from a file as a message shows it: a path or an error as it is, other things as Python writes them."""
    text = str(value) if isinstance(value, (Path, Exception)) else repr(value)
    text = "".join(character if character.isprintable() else "?" for character in text.replace("\n", " "))
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def listing(names: Sequence[str], *, limit: int = 3) -> str:
    """The first names, and how many there are besides."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def reject_pointer(file: Path) -> None:
    """Rejects a file of a clone without Git LFS, which has a pointer of three lines in place of each file's content.
    Missing or unreadable files are left to others."""
    try:
        with file.open("rb") as opened:
            begin = opened.read(_MOST_POINTER_BYTES)
    except OSError:
        return
    if begin.startswith(_POINTER_BEGIN):
        # In an arranged checkpoint the file is a link.
        file = file.resolve()
        raise ModelError(
            f"{file} is a pointer of Git LFS, and the file that it stands for was not fetched.",
            hint=f"Fetch it: cd {shlex.quote(str(file.parent))} && git lfs install && git lfs pull",
        )


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "its values are nested too deeply."
    if isinstance(error, (json.JSONDecodeError, UnicodeDecodeError)):
        return str(error)
    return "it holds a number of thousands of digits." if "digits" in str(error) else str(error)
