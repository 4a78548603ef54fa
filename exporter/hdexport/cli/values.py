"""Values of options that more than one command takes."""

from __future__ import annotations

__all__ = ["decimal_number", "whole_number"]

from hdruntime.errors import InputError


def whole_number(option: str, text: str) -> int:
    """The whole number, 1 or more, that an option was given.

    Raises:
        InputError: it is none.
    """
    try:
        number = int(text)
    except ValueError:
        raise InputError(f"{option} {text} is not a whole number.\nGive a number like {option} 4096.") from None
    if number < 1:
        raise InputError(f"{option} {text} is not above zero.\nGive a number like {option} 4096.")
    return number


def decimal_number(option: str, text: str) -> float:
    """The number that an option was given; what is allowed of it is for its user to say.

    Raises:
        InputError: it is none.
    """
    try:
        return float(text)
    except ValueError:
        raise InputError(f"{option} {text} is not a number.\nGive a number like {option} 0.4.") from None
