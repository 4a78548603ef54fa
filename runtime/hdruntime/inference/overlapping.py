"""CPU work that overlaps with a device's computation: inputs are prefetched, and results are written behind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


@contextlib.contextmanager
def prefetched(
    items: Iterator[Item], *, is_ahead: bool, stop: Callable[[], None] | None = None
) -> Iterator[Iterator[Item]]:
    """Iterate over items; with `is_ahead` a thread makes the next item while the caller uses the current one.

    An exception of the iterator is raised at its item. The thread ends with the block; `stop` ends its wait for an
    item.
    """
    if not is_ahead:
        yield items
        return
    end = object()
    with ThreadPoolExecutor(1, "prefetch") as thread:

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


def run_behind(function: Callable[[Item], Result], items: Iterator[Item]) -> Iterator[Result]:
    """Map a function over items in order, in a thread that runs while the next item is made.

    An exception of the function is raised after the next item was made. No call is running while a result is yielded,
    or after an exception of the iterator.
    """
    running: Future[Result] | None = None
    with ThreadPoolExecutor(1, "run-behind") as thread:
        for item in items:
            if running is not None:
                yield running.result()
            running = thread.submit(function, item)
        if running is not None:
            yield running.result()
