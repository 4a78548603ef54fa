"""Checks of texts' lengths and of options that name one of several choices."""

from __future__ import annotations

__all__ = ["check_text_lengths", "checked_choice", "length_error"]

import sys
from collections.abc import Sequence
from enum import Enum
from typing import TypeVar

from hdruntime.errors import InputError

Choice = TypeVar("Choice", bound=Enum)


def check_text_lengths(lengths: Sequence[int], max_len: int) -> None:
    """Refuse texts without tokens, and those of more tokens than the bundle accepts.

    Args:
        lengths: tokens of each text.
        max_len: most tokens that the bundle accepts.

    Raises:
        InputError: naming the first such text.
    """
    for index, tokens in enumerate(lengths):
        if not 1 <= tokens <= max_len:
            what = "The text" if len(lengths) == 1 else f"Text {index}"
            raise length_error(
                what, tokens, max_len, "Cut it (--overflow truncate), run it in pieces (--overflow split)"
            )


def checked_choice(choices: type[Choice], value: Choice | str, *, option: str) -> Choice:
    """The member of an enumeration that an option names.

    Raises:
        InputError: there is no such member.
    """
    try:
        return choices(value)
    except ValueError:
        valid = ", ".join(repr(choice.value) for choice in choices)
        raise InputError(f"{option} is {value!r}; it must be one of {valid}.") from None


def length_error(what: str, tokens: int, max_len: int, remedy: str) -> InputError:
    """The error for a text of that length, with its remedy."""
    advice = f"\n{remedy}, or rebuild with --max-len {tokens}." if tokens > max_len else ""
    fits = "1 or more" if max_len == sys.maxsize else f"1 to {max_len}"
    return InputError(f"{what} has {tokens} tokens; this bundle accepts {fits}.{advice}")
