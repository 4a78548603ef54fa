"""Forks of this process: they wait for ONNX Runtime, and leave the sessions of the parent untouched."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

from hdruntime.bundle.manifest import Backend

_listeners: weakref.WeakSet[Any] = weakref.WeakSet()

_changed = threading.Condition()
_computing: Counter[int] = Counter()
"""Thread -> blocks of `no_fork` that it is in."""

_forking = 0
"""Threads that fork, or wait to."""

_with_threads: set[Backend] = set()
"""Backends that have started threads in this process, or in one of which it is a fork."""

_lost: set[Backend] = set()
"""Backends whose threads a process started of which this process is a fork."""


@contextlib.contextmanager
def no_fork() -> Iterator[None]:
    """Let forks of this process wait until the block has ended; a fork that waits lets no other block begin.

    A fork copies the locks that a library's threads hold, and nothing opens them there. Forks that were taken while
    ONNX Runtime 1.31.1 computed waited for ever as they freed an output (3 of 180; with this, none of 210), and forks
    that were taken while a thread opened shared libraries did as they opened one (2 of 83).
    """
    thread = threading.get_ident()
    with _changed:
        _changed.wait_for(lambda: not _forking or thread in _computing)
        _computing[thread] += 1
    try:
        yield
    finally:
        with _changed:
            _computing[thread] -= 1
            if not _computing[thread]:
                del _computing[thread]
            _changed.notify_all()


def start_threads(backend: Backend) -> None:
    """Say that a backend is about to start threads that go on when its batches have ended; see `threads_are_lost`."""
    _with_threads.add(backend)


def threads_are_lost(backend: Backend) -> bool:
    """Whether a backend had threads in a process that this one was forked from: it must not be used here.

    Threads that look for work after a batch hold locks, which a fork copies, and nothing says when they sleep.
    """
    return backend in _lost


def tell_of_forks(listener: Any) -> None:
    """Call `listener.forked` in every fork of this process, as long as the listener is alive.

    `forked` runs before any other code of the fork, in its only thread.
    """
    _listeners.add(listener)


def keep_for_ever(value: object) -> None:
    """Never free an object, not even when the process ends.

    ONNX Runtime waits for its threads when it frees a session; a fork has no such threads, and would crash.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


def _before_fork() -> None:
    global _forking
    _changed.acquire()
    _forking += 1
    thread = threading.get_ident()
    _changed.wait_for(lambda: not _computing.keys() - {thread})


def _after_fork() -> None:
    global _forking
    _forking -= 1
    _changed.notify_all()
    _changed.release()


def _after_fork_in_child() -> None:
    global _changed, _forking
    # The parent's other threads are not here.
    _changed, _forking = threading.Condition(), 0
    for thread in _computing.keys() - {threading.get_ident()}:
        del _computing[thread]
    _lost.update(_with_threads)
    for listener in list(_listeners):
        listener.forked()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
