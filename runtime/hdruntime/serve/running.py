"""Requests that are being answered; they end if the client disconnects or the timeout has passed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

_LOOK_SECONDS = 0.5
"""Seconds between two checks whether clients have disconnected."""


_ENDS = "hdexport.ends"
"""The key of the time, in a request's scope, at which its time is over."""


def seconds_left(request: Request) -> float:
    """The time that a request has until it is ended."""
    ends: float = request.scope[_ENDS]
    return ends - time.monotonic()


@dataclass(eq=False, slots=True)
class _Running:
    """A request, and the task that answers it; `reason` is the error that it ends with instead."""

    request: Request
    task: asyncio.Task[object]
    ends: float
    reason: Exception | None = None


class RunningRequests:
    """Answers requests in the tasks that the HTTP server made for them, and watches all of them in one task.

    Args:
        timeout_s: seconds after which a request ends with a TimeoutError.
        reason_to_stop: returns the error with which a request must end now, or None.
    """

    def __init__(self, timeout_s: float, reason_to_stop: Callable[[Request], Awaitable[Exception | None]]) -> None:
        self._timeout_s, self._reason_to_stop = timeout_s, reason_to_stop
        # The oldest first, whose timeout passes first.
        self._requests: dict[_Running, None] = {}
        self._watching: asyncio.Task[None] | None = None

    async def answered(self, request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        """The response to a request; a request that is stopped is cancelled and raises the reason."""
        task = asyncio.current_task()
        assert task is not None, "HTTP servers answer in tasks"
        running = _Running(request, task, time.monotonic() + self._timeout_s)
        request.scope[_ENDS] = running.ends
        self._requests[running] = None
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())
        try:
            return await answer(request)
        except asyncio.CancelledError:
            if running.reason is None:
                raise
            # For a timeout or a task group around the application: this cancellation was none of theirs.
            task.uncancel()
            raise running.reason from None
        finally:
            self._requests.pop(running, None)

    def close(self) -> None:
        """End the watching."""
        if self._watching is not None:
            self._watching.cancel()

    async def _watch(self) -> None:
        while self._requests:
            left = next(iter(self._requests)).ends - time.monotonic()
            await asyncio.sleep(max(0.0, min(left, _LOOK_SECONDS, self._timeout_s)))
            looked_at = [*self._requests]
            # All at once: each check takes some turns of the loop.
            reasons = await asyncio.gather(*map(self._reason, looked_at))
            for each, reason in zip(looked_at, reasons, strict=True):
                # It may have been answered meanwhile.
                if reason is not None and each in self._requests:
                    del self._requests[each]
                    each.reason = reason
                    each.task.cancel()

    async def _reason(self, running: _Running) -> Exception | None:
        if running.ends <= time.monotonic():
            return TimeoutError()
        try:
            return await self._reason_to_stop(running.request)
        except Exception as error:
            return error
