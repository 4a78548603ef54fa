"""Options of a command from environment variables, for platforms that start a container without arguments."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hdruntime.errors import InputError

_PREFIX = "HDEXPORT_"


def take_defaults(
    parser: argparse.ArgumentParser, environ: Mapping[str, str], others: Mapping[str, Sequence[str]]
) -> None:
    """Set defaults of options from environment variables: a platform's, or ``HDEXPORT_`` and the option's name.

    An empty variable counts as absent. Spaces separate the values of a list.

    Args:
        parser: parser with all options.
        environ: the environment.
        others: option -> variables of platforms; the first variable that is set counts.

    Raises:
        InputError: a variable has a value that the option does not take.
    """
    for action in _options(parser):
        names = (*others.get(action.dest, ()), f"{_PREFIX}{action.dest.upper()}")
        name = next((each for each in names if environ.get(each)), None)
        if name is None:
            continue
        if isinstance(action.default, list):
            action.default = [_read(action, name, word) for word in environ[name].split()]
        else:
            action.default = _read(action, name, environ[name])


def _options(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """The options with a value."""
    return (action for action in parser._actions if action.option_strings and action.nargs != 0)


def _read(action: argparse.Action, name: str, text: str) -> Any:
    try:
        value = action.type(text) if callable(action.type) else text
    except (argparse.ArgumentTypeError, ValueError) as error:
        raise InputError(f"The variable {name} is {text!r:.60}: {error}.", hint="Change it, or unset it.") from None
    if action.choices is not None and value not in action.choices:
        accepted = ", ".join(map(str, action.choices))
        raise InputError(f"The variable {name} is {text!r:.60}; it must be one of {accepted}.")
    return value
