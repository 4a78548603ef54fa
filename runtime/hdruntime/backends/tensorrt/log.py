"""TensorRT's messages: errors are kept for the next exception, others go to `logging`."""

from __future__ import annotations

import functools
import logging
import threading
from collections import deque
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)

_MOST_ERRORS = 16

_BENIGN_WARNINGS = ("has Int64 binding", "already exists, the output tensors of this new instance")
"""Issued for every graph with int64 inputs, and for every function body that several nodes use."""


class TensorRtLog:
    """TensorRT's messages, which may come from several threads."""

    def __init__(self) -> None:
        self._errors: deque[str] = deque(maxlen=_MOST_ERRORS)
        self._lock = threading.Lock()

    def write(self, severity: str, message: str) -> None:
        """Take one message; `severity` is TensorRT's name: ``INTERNAL_ERROR``, ``ERROR``, ``WARNING``, ``INFO`` ..."""
        if severity in ("INTERNAL_ERROR", "ERROR"):
            with self._lock:
                self._errors.append(message)
            logger.info("error: %s", message)
        elif severity == "WARNING" and not any(words in message for words in _BENIGN_WARNINGS):
            logger.warning("%s", message)
        elif severity != "VERBOSE":
            logger.debug("%s", message)

    def take_errors(self) -> tuple[str, ...]:
        """Return and forget the latest errors, oldest first."""
        with self._lock:
            taken = tuple(self._errors)
            self._errors.clear()
        return taken


@functools.cache
def log_of(trt: ModuleType) -> tuple[TensorRtLog, Any]:
    """The log of a variant, and its TensorRT logger: one per process, because a variant keeps its first logger."""
    log = TensorRtLog()

    class Logger(trt.ILogger):  # type: ignore[name-defined]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            log.write(severity.name, message)

    return log, Logger()
