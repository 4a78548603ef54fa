"""Sessions of a parent process in its forks: left untouched."""

from __future__ import annotations

__all__ = ["keep_for_ever", "tell_of_forks"]

import ctypes
import os
import weakref
from typing import Any

_listeners: weakref.WeakSet[Any] = weakref.WeakSet()


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


def _notify_listeners() -> None:
    for listener in list(_listeners):
        listener.forked()


os.register_at_fork(after_in_child=_notify_listeners)
