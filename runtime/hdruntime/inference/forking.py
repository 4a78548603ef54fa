"""What a forked process does with what its parent had open: it lets it alone."""

from __future__ import annotations

__all__ = ["keep_for_ever", "tell_of_forks"]

import ctypes
import os
import weakref
from typing import Protocol


class Listener(Protocol):
    """Something whose threads, or GPU contexts, a fork does not have."""

    def forked(self) -> None:
        """Called in the forked process before anything else there; the thread that calls is the only one."""


def tell_of_forks(listener: Listener) -> None:
    """Call `listener.forked` in every process that is forked of this one, as long as somebody has the listener."""
    _listeners.add(listener)


def keep_for_ever(value: object) -> None:
    """Never free an object, not even when the process ends.

    ONNX Runtime waits for its threads when a session is freed; in a fork there are none, and it crashes.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


_listeners: weakref.WeakSet[Listener] = weakref.WeakSet()


def _forked() -> None:
    for listener in list(_listeners):
        listener.forked()


os.register_at_fork(after_in_child=_forked)
