"""Parsing a value of ``--attention``: named parts, and numbers within ranges."""

from __future__ import annotations

from collections.abc import Mapping

from hdruntime.errors import InputError, Setting


class InvalidSpecError(ValueError):
    """A value of ``--attention`` does not have the syntax of its first word.

    Attributes:
        part: the invalid part of the value.
    """

    def __init__(self, part: str) -> None:
        super().__init__(part)
        self.part = part


class SpecReader:
    """The parts of a value, separated by commas: name, sign, value.

    Attributes:
        spec: the whole value of ``--attention``.
        values: name of a part -> the part's value.

    Args:
        spec: the whole value of ``--attention``, for messages.
        parts: the parts to parse; None for none.
        names: the names that parts may have.
        sign: the character between a part's name and the part's value.
        example: a whole value, for messages.

    Raises:
        InvalidSpecError: the name of a part is unknown or repeated, or a part has no value.
    """

    def __init__(self, spec: str, parts: str | None, *, names: tuple[str, ...], sign: str, example: str) -> None:
        self.spec, self._example, self._sign = spec, example, sign
        self.values: dict[str, str] = {}
        for part in [] if parts is None else parts.split(","):
            name, separator, value = part.partition(sign)
            if not separator or not value or name in self.values or name not in names:
                raise InvalidSpecError(part)
            self.values[name] = value

    def required(self, name: str) -> str:
        """The value of a part; an InvalidSpecError if the part is missing."""
        if name not in self.values:
            raise InvalidSpecError(self.spec)
        return self.values[name]

    def optional(self, name: str, *, minimum: int, maximum: int | None = None) -> int | None:
        """A part's value as `number` parses it; None if the part is missing."""
        if name not in self.values:
            return None
        return self.number(name, self.values[name], minimum=minimum, maximum=maximum)

    def numbers(self, ranges: Mapping[str, tuple[int, int]]) -> dict[str, int]:
        """The parts of these names that are there, each a number within its range, both ends included."""
        return {
            name: self.number(name, self.values[name], minimum=minimum, maximum=maximum)
            for name, (minimum, maximum) in ranges.items()
            if name in self.values
        }

    def number(self, name: str, text: str, *, minimum: int, maximum: int | None = None) -> int:
        """An integer that is a part's value or one of several in it; an InputError if it is out of range."""
        try:
            number = int(text)
        except ValueError:
            raise InvalidSpecError(f"{name}{self._sign}{text}") from None
        if number < minimum or (maximum is not None and number > maximum):
            range_ = f"{minimum} or more" if maximum is None else f"{minimum} to {maximum}"
            raise InputError(
                Setting("attention", self.spec),
                f" has {name} {number}; it must be {range_}.",
                hint=("For example: ", Setting("attention", self._example)),
            )
        return number
