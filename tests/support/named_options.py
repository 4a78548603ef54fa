"""Options that a message names, and which of them the command lacks that it is about."""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Collection, Mapping

from hdexport.cli import COMMANDS, parser

_OPTION = re.compile(r"(?<![\w-])--[a-z][a-zA-Z0-9_-]*")
_NAMED = re.compile(r"\bhdexport (\w+)|\b([Rr]e)?[Bb]uil(?:d\b|t (?=with|by))")
"""A command by its name; rebuilding and building are commands, too."""

_CLAUSE_ENDS = re.compile(r",(?!\w)|[;()]|\.(?:\s|$)|\n|\bor\b")
_OTHER_PROGRAMS = re.compile(r"\b(?:pip|hf|ray|docker|gunicorn|python|tritonserver) .*")


def missing_options(message: str, *, command: str | None = None, given: Collection[str] = ()) -> list[str]:
    """The options of a message that the command lacks that its clause names, or else that printed it.

    Args:
        message: of any number of lines.
        command: that printed it; None if any command may.
        given: words of the command line, which a message may repeat.
    """
    options = _options()
    missing = []
    for clause in _CLAUSE_ENDS.split(_OTHER_PROGRAMS.sub("", message)):
        named = command
        start = 0
        for match in [*_NAMED.finditer(clause), None]:
            end = len(clause) if match is None else match.start()
            known = set().union(*options.values()) if named is None else options[named]
            missing += [each for each in _OPTION.findall(clause[start:end]) if each not in known and each not in given]
            if match is not None:
                start = match.end()
                named = match[1] or ("rebuild" if match[2] else "build")
                named = named if named in options else command
    return missing


@functools.cache
def _options() -> Mapping[str, Collection[str]]:
    """Command -> its options."""
    commands = parser(COMMANDS)._subparsers
    assert commands is not None
    (choices,) = (action.choices for action in commands._group_actions)
    found: dict[str, argparse.ArgumentParser] = dict(choices or {})
    return {name: found[name]._option_string_actions.keys() for name in found}
