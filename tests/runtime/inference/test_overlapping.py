"""Items that are made ahead, and results that are done behind: their order, their errors, and what runs when."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest

from hdruntime.inference.overlapping import prefetched, run_behind


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(("prefetch", "run-behind"))]


@pytest.mark.parametrize("is_ahead", [False, True])
def test_the_next_item_is_made_while_the_last_is_used(is_ahead: bool) -> None:
    made: list[int] = []
    began = {number: threading.Event() for number in range(4)}

    def items() -> Iterator[int]:
        for number in range(3):
            made.append(number)
            began[number].set()
            yield number
        began[3].set()

    found = []
    with prefetched(items(), is_ahead=is_ahead) as ahead:
        for number in ahead:
            # Waits for ever if the next one is not begun by another thread.
            assert not is_ahead or began[number + 1].wait(timeout=60)
            assert is_ahead or made == [*found, number]
            found.append(number)
    assert found == [0, 1, 2]
    assert threads() == []


def test_an_error_comes_where_its_item_is_asked_for_and_none_is_left_over() -> None:
    def items() -> Iterator[int]:
        yield 0
        raise ValueError("no item 1")

    with prefetched(items(), is_ahead=True) as ahead:
        assert next(ahead) == 0
        with pytest.raises(ValueError, match="no item 1"):
            next(ahead)
    with prefetched(items(), is_ahead=True) as ahead:
        assert next(ahead) == 0
    assert threads() == []


def test_results_are_done_behind_in_order_while_the_next_item_is_made() -> None:
    running, going_on = threading.Event(), threading.Event()

    def items() -> Iterator[int]:
        yield 0
        assert running.wait(timeout=60), "item 0 is done by another thread"
        going_on.set()
        yield 1

    def function(item: int) -> int:
        if item == 0:
            running.set()
            assert going_on.wait(timeout=60), "item 1 is made meanwhile"
        return item * 10

    assert list(run_behind(function, items())) == [0, 10]
    assert threads() == []


def test_what_was_given_is_done_when_an_item_fails_and_a_failure_ends_the_rest() -> None:
    done = []

    def items() -> Iterator[int]:
        yield 0
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(run_behind(done.append, items()))
    assert done == [0]

    def failing(item: int) -> int:
        done.append(item)
        raise OSError(f"no space for {item}")

    made = iter(range(1, 9))
    with pytest.raises(OSError, match="no space for 1"):
        list(run_behind(failing, made))
    assert done == [0, 1]
    assert next(made) == 3, "one item more was made, and no other"
    assert threads() == []


def test_a_wait_for_the_next_item_ends_with_the_block() -> None:
    """As where an interrupt comes while nothing comes on the standard input."""
    items: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    items.put(1)
    waits = iter(items.get, None)
    with prefetched(waits, is_ahead=True, stop=lambda: items.put(None)) as ahead:
        assert next(ahead) == 1
    assert threads() == []
