"""Progress of a long command, which hdexport reports and its command line shows."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from hdruntime.errors import Message

if TYPE_CHECKING:
    from hdexport.support.check import Check
    from hdruntime.bundle.manifest import Fp16Overflow
    from hdruntime.bundle.verification import Skip, VerificationRecord


class Progress:
    """Silent progress; the base class of classes that show something."""

    def step(self, title: str) -> None:
        """A new step begins, and the one before it ends."""

    def detail(self, text: str, done: int, total: int) -> None:
        """Within the step, `done` of `total` units of something are done."""

    def result(self, message: Message) -> None:
        """A line of the command's result."""

    def check(self, outcome: Check | Skip) -> None:
        """The outcome of one of many checks, or a skipped one; `verified` sums them up."""

    def verified(self, record: VerificationRecord, fp16_overflow: Fp16Overflow | None) -> None:
        """The outcome of a verification."""


def warn(logger: logging.Logger, message: Message) -> None:
    """Log a warning, whose settings a handler may write in the words of an interface."""
    parts = message if isinstance(message, tuple) else (message,)
    logger.warning("%s" * len(parts), *parts)
