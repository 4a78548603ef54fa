"""The parser of a command: its errors are hdexport's, and options may stand anywhere and be misspelt."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NoReturn

from hdruntime.errors import InputError


class _Lines(argparse.HelpFormatter):
    """Begins a new line where the help of an option does."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return [line for part in text.splitlines() for line in super(_Lines, self)._split_lines(part, width)]


class CommandParser(argparse.ArgumentParser):
    """An argument parser whose errors raise `InputError`, suggest a spelling, and point to the command's own help.

    Positional arguments and options may be mixed. An option with an optional value takes the next word as its value
    only if the option's ``type`` accepts it.
    """

    _is_intermixing = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{"formatter_class": _Lines, **options})

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}", hint=f"See: {self.prog} --help")

    def print_help(self, file: Any = None) -> None:
        # argparse's own hides that the reader of a pipe is gone.
        print(self.format_help(), end="", file=file)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self._is_intermixing:
            return super().parse_known_args(args, namespace)
        words = sys.argv[1:] if args is None else list(args)
        self._reject_unknown_options(words)
        if self._subparsers is not None:
            return super().parse_known_args(words, namespace)
        words = list(self._with_values_attached(words))
        if "--" in words:  # which intermixing does not understand
            namespace, extras = super().parse_known_args(words, namespace)
        else:
            self._is_intermixing = True
            try:
                namespace, extras = self.parse_known_intermixed_args(words, namespace)
            finally:
                self._is_intermixing = False
        if extras:
            # Not left to the parser above, which would point to its own help.
            self.error(f"unrecognized arguments: {' '.join(extras)}{self._suggestion(extras[0])}")
        return namespace, extras

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            suggestion = _did_you_mean(str(value), [str(choice) for choice in action.choices or ()])
            raise argparse.ArgumentError(action, f"{error.message}{suggestion}") from None

    def _reject_unknown_options(self, words: Sequence[str]) -> None:
        """Before argparse complains of a required option that was misspelt."""
        for word in words:
            if word == "--" or (self._subparsers is not None and not word.startswith("-")):
                return
            name = word.partition("=")[0]
            # argparse takes a word with a space for a value, and a unique prefix for an option.
            if name.startswith("--") and " " not in word and not any(known.startswith(name) for known in self._options):
                self.error(f"unrecognized arguments: {name}{self._suggestion(name)}")

    def _suggestion(self, word: str) -> str:
        return _did_you_mean(word.partition("=")[0], self._options) if word.startswith("-") else ""

    def _with_values_attached(self, words: Sequence[str]) -> Iterator[str]:
        optional = {name: action for name, action in self._option_string_actions.items() if action.nargs == "?"}
        following = iter([*words[1:], ""])
        for word in words:
            after = next(following)
            action = optional.get(word)
            # "--name=" has the value "".
            yield word if action is None or (after and self._accepts(action, after)) else f"{word}="

    def _accepts(self, action: argparse.Action, word: str) -> bool:
        try:
            self._get_value(action, word)
        except argparse.ArgumentError:
            return False
        return True

    @property
    def _options(self) -> Collection[str]:
        return self._option_string_actions.keys()


def _did_you_mean(word: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(word.replace("_", "-"), known, n=1)
    return f"\nDid you mean {close[0]}?" if close else ""
