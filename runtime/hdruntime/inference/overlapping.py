"""Work of the CPU that is done while a device computes: texts are prepared ahead, and results are written behind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


@contextlib.contextmanager
def made_ahead(
    items: Iterator[Item], *, is_ahead: bool, stop: Callable[[], None] | None = None
) -> Iterator[Iterator[Item]]:
    """The items; if `is_ahead`, another thread makes the next one while the caller uses the last.

    What the iterator raises is raised where its item is asked for. The thread has ended when the block ends, for which
    `stop` ends a wait for an item.
    """
    if not is_ahead:
        yield items
        return
    end = object()
    with ThreadPoolExecutor(1, "made-ahead") as thread:

        def made() -> Iterator[Item]:
            following = thread.submit(next, items, end)
            while (item := following.result()) is not end:
                following = thread.submit(next, items, end)
                yield item  # type: ignore[misc]

        try:
            yield made()
        finally:
            if stop is not None:
                stop()


def done_behind(function: Callable[[Item], Result], items: Iterator[Item]) -> Iterator[Result]:
    """The function's result of each item, in order; another thread runs it while the caller makes the next item.

    What the function raises is raised after the next item was made. No call is running when a result is given, or when
    making an item has failed.
    """
    running: Future[Result] | None = None
    with ThreadPoolExecutor(1, "done-behind") as thread:
        for item in items:
            if running is not None:
                yield running.result()
            running = thread.submit(function, item)
        if running is not None:
            yield running.result()
