"""Every error that hdexport raises on purpose.

::

    HdexportError
    ├── BundleError                 a bundle cannot be used
    │   ├── BundleNotFoundError     there is no bundle at that path
    │   ├── BundleCorruptError      a file is missing, changed, or lies outside the bundle
    │   └── BundleVersionError      the bundle has the format of another version of hdexport
    ├── InputError                  the caller's ids, masks, texts, rows or options do not fit
    │   └── InputChangedError       a job's input changed after the job began
    ├── OutputExistsError           the output already exists
    ├── DamagedJobError             the kept rows of an unfinished job cannot be continued
    ├── BackendError                a backend cannot run a bundle or a batch
    │   ├── BackendUnavailableError the backend, its package or its hardware is not available
    │   ├── NonFiniteOutputError    a result holds NaN or infinity
    │   └── OutOfMemoryError        the batch is too large for the free memory
    ├── MissingDependencyError      an optional package is not installed
    ├── ModelError                  a checkpoint cannot be read, or its family is not supported
    ├── ExportError                 a checkpoint cannot be exported as a graph
    ├── EngineError                 an engine could not be built
    └── VerificationError           a bundle's outputs differ from PyTorch's

A message states the problem; its hint says what to do. Both name a parameter by a `Setting`, which each interface
writes in its own words: Python ``stride=-1``, the command line ``--stride -1``, the server ``"stride": -1``. Nothing
parses a message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Self, TypeAlias

__all__ = [
    "BackendError",
    "BackendUnavailableError",
    "BundleCorruptError",
    "BundleError",
    "BundleNotFoundError",
    "BundleVersionError",
    "DamagedJobError",
    "EngineError",
    "ExportError",
    "HdexportError",
    "InputChangedError",
    "InputError",
    "MissingDependencyError",
    "ModelError",
    "NonFiniteOutputError",
    "OutOfMemoryError",
    "OutputExistsError",
    "Setting",
    "VerificationError",
]


@dataclass(frozen=True)
class Setting:
    """A parameter in a message, with or without a value.

    Attributes:
        name: the parameter's name in Python.
        value: its value; ``...`` names the parameter alone.
        command: the command that takes it, such as ``build``; empty for what the caller called.
    """

    name: str
    value: object = ...
    command: str = ""

    def __str__(self) -> str:
        """The setting as Python writes it: ``overflow='truncate'``."""
        value = self.value.value if isinstance(self.value, Enum) else self.value
        return self.name if value is ... else f"{self.name}={value!r}"


Message: TypeAlias = "str | Setting | tuple[str | Setting, ...]"
"""Text of which some parts are settings."""

Writer: TypeAlias = Callable[[Setting], str]
"""How an interface writes a setting."""


def joined(*messages: Message) -> tuple[str | Setting, ...]:
    """One message of several."""
    return tuple(part for each in messages for part in (each if isinstance(each, tuple) else (each,)))


def write(message: Message, writer: Writer = str) -> str:
    """The text of a message in the words of an interface."""
    parts = message if isinstance(message, tuple) else (message,)
    return "".join(part if isinstance(part, str) else writer(part) for part in parts)


class HdexportError(Exception):
    """Base of every error raised on purpose.

    Args:
        problem: what was given and what is accepted. Left out, it is made of the three fields below.
        hint: what to do about it.
        parameter: name of the parameter that has the value.
        value: the value that was given.
        accepted: the values that are accepted, such as ``0 to 511``.
    """

    def __init__(
        self,
        *problem: str | Setting,
        hint: Message = "",
        parameter: str = "",
        value: object = None,
        accepted: str = "",
    ) -> None:
        super().__init__(*problem)
        self.hint = hint
        self.parameter = parameter
        self.value = value
        self.accepted = accepted

    @property
    def problem(self) -> Message:
        """What was given and what is accepted."""
        if self.args or not self.parameter:
            return self.args
        return (Setting(self.parameter), f" is {self.value!r}; it must be {self.accepted}.")

    def names(self, setting: str) -> bool:
        """Whether the hint names a setting."""
        return any(isinstance(part, Setting) and part.name == setting for part in joined(self.hint))

    def prefixed(self, place: str) -> Self:
        """An error of this class whose problem begins with a place, such as ``texts[3]: ``."""
        return type(self)(place, *joined(self.problem), hint=self.hint)

    def message(self, writer: Writer = str) -> str:
        """The problem and, on a line of its own, the hint."""
        return "\n".join(filter(None, (write(self.problem, writer), write(self.hint, writer))))

    def __str__(self) -> str:
        return self.message()


class BundleError(HdexportError):
    """A bundle cannot be used."""


class BundleNotFoundError(BundleError):
    """There is no bundle at that path."""


class BundleCorruptError(BundleError):
    """A file of the bundle is missing, changed, or lies outside it."""


class BundleVersionError(BundleError):
    """The bundle has the format of another version of hdexport."""


class InputError(HdexportError, ValueError):
    """The caller's ids, masks, texts, rows or options do not fit."""


class InputChangedError(InputError):
    """A job's input changed after the job began."""


class OutputExistsError(HdexportError):
    """The output already exists."""


class DamagedJobError(HdexportError):
    """The kept rows of an unfinished job cannot be continued."""


class BackendError(HdexportError):
    """A backend cannot run a bundle or a batch."""


class BackendUnavailableError(BackendError):
    """The backend, its package or its hardware is not available."""


class NonFiniteOutputError(BackendError):
    """A result holds NaN or infinity."""


class OutOfMemoryError(BackendError):
    """The batch is too large for the free memory; a smaller one may run."""


class MissingDependencyError(HdexportError, ImportError):
    """An optional package is not installed."""


class ModelError(HdexportError):
    """A checkpoint cannot be read, or its family is not supported."""


class ExportError(HdexportError):
    """A checkpoint cannot be exported as a graph."""


class EngineError(HdexportError):
    """An engine could not be built."""


class VerificationError(HdexportError):
    """A bundle's outputs differ from PyTorch's.

    Attributes:
        failed: the checks that failed, `hdexport.verify.Check` each.
    """

    def __init__(self, *problem: str | Setting, hint: Message = "", failed: tuple[object, ...] = ()) -> None:
        super().__init__(*problem, hint=hint)
        self.failed = failed
