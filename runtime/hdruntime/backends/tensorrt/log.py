"""What TensorRT says: errors are kept for the exception to come, the rest goes to `logging`."""

from __future__ import annotations

__all__ = ["TensorRtLog", "log_of"]

import functools
import logging
import threading
from collections import deque
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)

_MOST_ERRORS = 16

_BENIGN_WARNINGS = ("has Int64 binding", "already exists, the output tensors of this new instance")
"""Said of every graph with int64 inputs, and of every function body that more than one node uses."""


class TensorRtLog:
    """TensorRT's messages; it may write from several threads."""

    def __init__(self) -> None:
        self._errors: deque[str] = deque(maxlen=_MOST_ERRORS)
        self._lock = threading.Lock()

    def write(self, severity: str, message: str) -> None:
        """Take one message.

        Args:
            severity: TensorRT's name of it: ``INTERNAL_ERROR``, ``ERROR``, ``WARNING``, ``INFO`` ...
            message: as TensorRT wrote it.
        """
        if severity in ("INTERNAL_ERROR", "ERROR"):
            with self._lock:
                self._errors.append(message)
            logger.info("error: %s", message)
        elif severity == "WARNING" and not any(words in message for words in _BENIGN_WARNINGS):
            logger.warning("%s", message)
        elif severity != "VERBOSE":
            logger.debug("%s", message)

    def take_errors(self) -> tuple[str, ...]:
        """The latest errors, oldest first; they are forgotten then."""
        with self._lock:
            taken = tuple(self._errors)
            self._errors.clear()
        return taken

    def as_tensorrt_logger(self, trt: ModuleType) -> Any:
        """This log as TensorRT wants it. It must outlive everything that is made with it."""
        write = self.write

        class Logger(trt.ILogger):  # type: ignore[name-defined]
            def __init__(self) -> None:
                trt.ILogger.__init__(self)

            def log(self, severity: Any, message: str) -> None:
                write(severity.name, message)

        return Logger()


@functools.cache
def log_of(trt: ModuleType) -> tuple[TensorRtLog, Any]:
    """The log of a flavour, and the same as TensorRT wants it.

    A flavour keeps the first logger of a process for good, so there is one.
    """
    log = TensorRtLog()
    return log, log.as_tensorrt_logger(trt)
