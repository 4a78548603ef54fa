"""Long commands that are stopped put down what they have."""

from __future__ import annotations

__all__ = ["SIGNALLED", "terminated_like_interrupted"]

import contextlib
import signal
from collections.abc import Iterator
from typing import NoReturn

SIGNALLED = 128
"""Exit code of a command that a signal stopped, less the signal's number: what shells make of such a process."""


@contextlib.contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt, too, with its number."""

    def interrupt(number: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt(number)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
