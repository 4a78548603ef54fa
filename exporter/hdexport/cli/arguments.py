"""Options that more than one command takes: how they are declared, and what values they have."""

from __future__ import annotations

__all__ = [
    "BACKENDS",
    "add_pickle_argument",
    "add_position_arguments",
    "add_revision_argument",
    "command_line",
    "decimal_number",
    "one_of",
    "optional_number",
    "whole_number",
]

import argparse
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from hdruntime.bundle.manifest import Backend
from hdruntime.errors import InputError

BACKENDS = ", ".join(backend.value for backend in Backend)
"""Their names, for a help text."""

_ABSOLUTE_PATH = re.compile(r"(?<=[=:,])/[^=:,]*?([^/=:,]*)/*(?=$|[=:,])")
"""An absolute path as a value in an argument; its last part is the group."""


def command_line(arguments: Sequence[str]) -> str:
    """The command for the record: a bundle goes to other machines, so of absolute paths only the last part stays.

    Args:
        arguments: what follows ``hdexport``.
    """
    return shlex.join(
        [
            "hdexport",
            *(
                Path(argument).name if argument.startswith("/") else _ABSOLUTE_PATH.sub(r"\1", argument)
                for argument in arguments
            ),
        ]
    )


def add_revision_argument(parser: argparse.ArgumentParser) -> None:
    """Declare ``--revision``."""
    parser.add_argument(
        "--revision",
        metavar="REV",
        help="branch, tag or commit of a MODEL on the hub (default: its main branch), as in organisation/name@REV",
    )


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


def one_of(option: str, text: str, choices: Iterable[str]) -> str:
    """The word that an option was given.

    Raises:
        InputError: it is none of the choices; the message lists them.
    """
    allowed = list(choices)
    if text not in allowed:
        raise InputError(f"{option} {text} is unknown.\nChoose one of: {', '.join(allowed)}.")
    return text
