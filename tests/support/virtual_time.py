"""An event loop whose time passes only when nothing is left to do, and in which threads' work takes a modelled time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any


class _Selector(selectors.DefaultSelector):
    """Waits for no file: the loop's time goes on instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "nothing will ever happen"
        self.now += max(0.0, timeout)
        return super().select(0)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """A loop that begins at 0; a function that is run in a thread takes `seconds_of(function, arguments)`."""

    def __init__(self, seconds_of: Callable[..., float]) -> None:
        self._virtual = _Selector()
        self._seconds_of = seconds_of
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now

    def run_in_executor(self, executor: Any, function: Callable[..., Any], *arguments: Any) -> Any:
        """The function's result, after its time."""
        future = self.create_future()

        def run() -> None:
            if not future.cancelled():
                future.set_result(function(*arguments))

        self.call_later(self._seconds_of(function, arguments), run)
        return future


def in_virtual_time(story: Coroutine[Any, Any, Any], seconds_of: Callable[..., float]) -> Any:
    """The result of a coroutine, in a loop of its own."""
    loop = VirtualTimeLoop(seconds_of)
    try:
        return loop.run_until_complete(story)
    finally:
        loop.close()
