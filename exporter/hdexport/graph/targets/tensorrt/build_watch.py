"""Progress and Ctrl-C while TensorRT builds."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any

logger = logging.getLogger(__name__)

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Progress = Callable[[str, int, int], None]
"""Called with the innermost phase, its steps done and all its steps.

Phases nest, and the time of a step varies by orders of magnitude: they give no honest percentage.
"""


class BuildWatch:
    """Reports a build's progress and stops it on Ctrl-C or when the report fails.

    TensorRT calls back from C++ code that no exception may cross. So Ctrl-C is recorded and the next step answers
    "stop"; the exception is raised after TensorRT has returned.
    """

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._steps: dict[str, int] = {}
        self._reason: BaseException | None = None

    @property
    def is_stopped(self) -> bool:
        """Whether the build was asked to stop."""
        return self._reason is not None

    @contextmanager
    def guard(self) -> Iterator[None]:
        """While the block runs, Ctrl-C stops the build, unless it is ignored; afterwards it is raised as usual. So do
        SIGTERM and SIGHUP where they are handled as Ctrl-C is."""
        # Python delivers signals to the main thread only. A signal that is ignored, or ends the process silently, stays
        # so.
        main = threading.current_thread() is threading.main_thread()
        previous = {number: signal.getsignal(number) for number in _STOPPING if main}
        caught = {number: handler for number, handler in previous.items() if callable(handler)}
        for number in caught:
            signal.signal(number, self._interrupted)
        try:
            yield
        finally:
            for number, handler in caught.items():
                signal.signal(number, handler)
            if self._reason is not None:
                raise self._reason

    def as_monitor(self, trt: ModuleType) -> Any:
        """This watch as a TensorRT progress monitor, which must outlive everything made with it."""
        watch = self

        class Monitor(trt.IProgressMonitor):  # type: ignore[name-defined]
            def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
                watch._steps[phase] = steps
                watch._report(phase, 0)

            def step_complete(self, phase: str, step: int) -> bool:
                watch._report(phase, step + 1)
                return not watch.is_stopped

            def phase_finish(self, phase: str) -> None:
                pass  # the next phase reports

        return Monitor()

    def _report(self, phase: str, done: int) -> None:
        if self._progress is None or self._reason is not None:
            return
        try:
            self._progress(phase, done, self._steps.get(phase, done))
        except Exception as error:  # raised again by guard()
            self._reason = error

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        self._reason = KeyboardInterrupt(number)
