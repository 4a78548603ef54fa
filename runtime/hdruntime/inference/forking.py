"""Sessions of a parent process in its forks: left untouched."""

from __future__ import annotations

__all__ = ["keep_for_ever", "tell_of_forks"]

import ctypes
import os
import weakref
from typing import Protocol


class Listener(Protocol):
    """An object whose threads or GPU contexts a fork does not copy."""

    def forked(self) -> None:
        """Called in the forked process before any other code; its only thread calls it."""


def tell_of_forks(listener: Listener) -> None:
    """Call `listener.forked` in every fork of this process, as long as the listener is alive."""
    _listeners.add(listener)


def keep_for_ever(value: object) -> None:
    """Never free an object, not even when the process ends.

    ONNX Runtime waits for its threads when it frees a session; a fork has no such threads, and would crash.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


_listeners: weakref.WeakSet[Listener] = weakref.WeakSet()


def _forked() -> None:
    for listener in list(_listeners):
        listener.forked()


os.register_at_fork(after_in_child=_forked)
