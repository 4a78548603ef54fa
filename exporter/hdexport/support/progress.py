"""How a long command says what it is doing; the library only calls, the command line shows."""

from __future__ import annotations

__all__ = ["Progress"]


class Progress:
    """Silent progress; the base of those that show something."""

    def step(self, title: str) -> None:
        """A new step begins, and the one before it ends."""

    def detail(self, text: str, done: int, total: int) -> None:
        """Within the step: `done` of `total` of something."""

    def result(self, line: str) -> None:
        """A line that belongs to the command's result, such as the outcome of a check."""
