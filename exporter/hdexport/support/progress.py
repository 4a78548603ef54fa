"""Progress of a long command, which the library reports and the command line shows."""

from __future__ import annotations


class Progress:
    """Silent progress; the base class of classes that show something."""

    def step(self, title: str) -> None:
        """A new step begins, and the one before it ends."""

    def detail(self, text: str, done: int, total: int) -> None:
        """Within the step, `done` of `total` units of something are done."""

    def result(self, line: str) -> None:
        """A line of the command's result."""

    def check(self, line: str) -> None:
        """The outcome of one of many checks, which the result sums up."""
