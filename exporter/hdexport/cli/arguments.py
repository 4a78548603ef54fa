"""Options that more than one command takes: how they are declared, and what values they have."""

from __future__ import annotations

__all__ = ["add_pickle_argument", "add_position_arguments", "decimal_number", "optional_number", "whole_number"]

import argparse

from hdruntime.errors import InputError


def add_pickle_argument(parser: argparse.ArgumentParser) -> None:
    """Declare ``--allow-pickle``."""
    parser.add_argument("--allow-pickle", action="store_true", help="also read weights stored as a pickle (.bin)")


def add_position_arguments(parser: argparse._ActionsContainer) -> None:
    """Declare ``--positions`` and ``--alpha``."""
    parser.add_argument(
        "--positions",
        default="hierarchical",
        metavar="SCHEME",
        help="where positions past the checkpoint's come from: hierarchical (default), tile or none",
    )
    parser.add_argument(
        "--alpha",
        default="0.4",
        metavar="A",
        help="weight of the coarse position, between 0 and 1 but not 0.5; hierarchical only (default: 0.4)",
    )


def whole_number(option: str, text: str, *, example: int = 4096) -> int:
    """The whole number, 1 or more, that an option was given.

    Args:
        option: its name, for the message.
        text: its value.
        example: a value that is of its usual size, for the message.

    Raises:
        InputError: it is none.
    """
    try:
        number = int(text)
    except ValueError:
        raise InputError(f"{option} {text} is not a whole number.\nGive a number like {option} {example}.") from None
    if number < 1:
        raise InputError(f"{option} {text} is not above zero.\nGive a number like {option} {example}.")
    return number


def optional_number(option: str, text: str | None, *, example: int) -> int | None:
    """The same, or None where the option was left out."""
    return None if text is None else whole_number(option, text, example=example)


def decimal_number(option: str, text: str) -> float:
    """The number that an option was given; what is allowed of it is for its user to say.

    Raises:
        InputError: it is none.
    """
    try:
        return float(text)
    except ValueError:
        raise InputError(f"{option} {text} is not a number.\nGive a number like {option} 0.4.") from None
