"""Reading a value of ``--attention``: parts with names, and numbers with bounds."""

from __future__ import annotations

from collections.abc import Mapping

from hdruntime.errors import InputError


class NotUnderstoodError(ValueError):
    """A value of ``--attention`` is of no form; the message is the part that is not understood."""


class SpecReader:
    """The parts of a value, separated by commas, each a name, a sign and a value.

    Args:
        spec: the whole value of ``--attention``, for messages.
        parts: the parts of it that are read; None for no part.
        names: that a part may have.
        sign: between a part's name and its value.
        example: a whole value, for messages.

    Raises:
        NotUnderstoodError: a part has no such name, is repeated, or has no value.
    """

    def __init__(self, spec: str, parts: str | None, *, names: tuple[str, ...], sign: str, example: str) -> None:
        self.spec, self._example, self._sign = spec, example, sign
        self.given: dict[str, str] = {}
        for part in [] if parts is None else parts.split(","):
            name, found, value = part.partition(sign)
            if not found or not value or name in self.given or name not in names:
                raise NotUnderstoodError(part)
            self.given[name] = value

    def required(self, name: str) -> str:
        """A part's value, without which `NotUnderstoodError` is raised."""
        if name not in self.given:
            raise NotUnderstoodError(self.spec)
        return self.given[name]

    def optional(self, name: str, *, least: int, most: int | None = None) -> int | None:
        """A part as `number` reads it; None where it was not given."""
        return self.number(name, self.given[name], least=least, most=most) if name in self.given else None

    def numbers(self, ranges: Mapping[str, tuple[int, int]]) -> dict[str, int]:
        """The parts of these names that were given, each a number within its range, both ends included."""
        return {
            name: self.number(name, self.given[name], least=least, most=most)
            for name, (least, most) in ranges.items()
            if name in self.given
        }

    def number(self, name: str, text: str, *, least: int, most: int | None = None) -> int:
        """A whole number that is a part's value, or one of several in it; an InputError says what its range is."""
        try:
            number = int(text)
        except ValueError:
            raise NotUnderstoodError(f"{name}{self._sign}{text}") from None
        if number < least or (most is not None and number > most):
            range_ = f"{least} or more" if most is None else f"{least} to {most}"
            raise InputError(
                f"--attention {self.spec} asks for {name} {number}; it must be {range_}.",
                hint=f"For example: --attention {self._example}",
            )
        return number
