"""Connections of a server: as many as there are files for, none of which takes for ever to say what it asks."""

from __future__ import annotations

import asyncio
import errno
import functools
import json
import logging
import os
import socket
import sys
import weakref
from typing import Any

logger = logging.getLogger(__name__)

HEAD_BYTES = 2**16
"""Bytes of a request's line and headers, at most: common proxies allow 8 to 64 KiB."""

_FREE_FILES = 16
"""Files that are left to others than connections: those that a program opens for a moment, and those of
`_MORE_CONNECTIONS`."""

_MORE_CONNECTIONS = 8
"""Connections beyond the limit, where all others are answered: they learn whether the server is healthy."""

_OPEN = ("/health", "/ready")
"""Routes that have an answer all the same."""

_idle: weakref.WeakKeyDictionary[Any, dict[LimitedConnection, None]] = weakref.WeakKeyDictionary()
"""Of each server, the connections on which no request is answered; those of the longest time first."""


class LimitedConnection(asyncio.Protocol):
    """A base of a class that is one of uvicorn's protocols, too, which have `transport`, `connections` and `cycle`.

    A connection without a request is closed where its next head is not there in time, and where a new connection needs
    its file, the one that idles longest first.
    """

    transport: Any
    connections: set[Any]
    cycle: Any
    config: Any
    loop: Any
    server_state: Any
    _head_timer: asyncio.TimerHandle | None = None

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.app = self._answered

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for a head, and make room for this connection."""
        super().connection_made(transport)
        idle = self._idle()
        idle[self] = None
        self._start_head_timer()
        most = most_connections()
        if len(self.connections) > most:
            _say_once(
                f"{most} connections are open, as many as the limit on open files has room for. Connections that idle "
                "longest are closed for new ones, and requests beyond get 503. For more connections, raise the limit "
                "(ulimit -n, LimitNOFILE of systemd)."
            )
            longest = next(iter(idle))
            if longest is not self or len(self.connections) > most + _MORE_CONNECTIONS:
                # Not again for the next connection: this one is counted until its file is closed.
                idle.pop(longest)
                longest.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._idle().pop(self, None)
        self._stop_head_timer()
        super().connection_lost(exc)

    def note_request(self) -> None:
        """Look whether data has brought a request; a head that has begun has to be whole in time."""
        if self._has_request():
            self._stop_head_timer()
            self._idle().pop(self, None)
        elif self._head_timer is None and not self.transport.is_closing():
            self._start_head_timer()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()  # type: ignore[misc]
        if not self._has_request() and not self.transport.is_closing():
            self._idle()[self] = None

    def refuse_head(self) -> None:
        """Answer a request whose head is too long, and close the connection."""
        message = f"The request's line and headers have more than {HEAD_BYTES} bytes."
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        body = json.dumps({"error": error}).encode()
        self.transport.write(
            b"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Type: application/json\r\n"
            b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        self.transport.close()

    async def _answered(self, scope: Any, receive: Any, send: Any) -> None:
        """The application's answer; where connections are too many, health alone has one."""
        if len(self.connections) <= most_connections() or scope["path"].endswith(_OPEN):
            await self.config.loaded_app(scope, receive, send)
            return
        error = {"message": "The server has no room for more connections.", "type": "server_error"}
        body = json.dumps({"error": {**error, "param": None, "code": None}}).encode()
        headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
        listed = [(name.encode(), value.encode()) for name, value in (headers | {"retry-after": "1"}).items()]
        await send({"type": "http.response.start", "status": 503, "headers": listed})
        await send({"type": "http.response.body", "body": body})

    def _has_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _idle(self) -> dict[LimitedConnection, None]:
        return _idle.setdefault(self.server_state, {})

    def _start_head_timer(self) -> None:
        seconds = self.config.timeout_keep_alive
        self._head_timer = self.loop.call_later(seconds, self._head_is_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if not self._has_request() and not self.transport.is_closing():
            _say_once(
                f"A connection was closed on which no whole request came within {self.config.timeout_keep_alive:g} "
                "seconds (--keep-alive); more of them are closed without a word."
            )
            self.transport.close()


class ListeningSocket(socket.socket):
    """A socket whose clients are turned away where no file is left for their connections.

    asyncio's loop otherwise logs an error for each of its attempts to accept a connection, as many as the backlog, and
    accepts none for a second. uvloop's does the same as this class.
    """

    _spare: int | None = None

    def listen(self, *given: int) -> None:
        """Listen, with a file to spare."""
        if self._spare is None and sys.platform != "win32":
            self._spare = os.open(os.devnull, os.O_RDONLY)
        # Counted before connections have taken files.
        most_connections()
        super().listen(*given)

    def accept(self) -> tuple[socket.socket, Any]:
        """A connection."""
        try:
            return super().accept()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or self._spare is None:
                raise
        _say_once(
            "No more files can be opened: clients are turned away until one is closed. Raise the limit on open files "
            "(ulimit -n, LimitNOFILE of systemd)."
        )
        os.close(self._spare)
        self._spare = None
        try:
            super().accept()[0].close()
        finally:
            self._spare = os.open(os.devnull, os.O_RDONLY)
        # What has closed connections to do comes first.
        raise BlockingIOError

    def close(self) -> None:
        """Close the socket, and the file to spare."""
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None
        super().close()


@functools.cache
def most_connections() -> int:
    """Connections for which there are files, counted before the first one comes, or when it does."""
    try:
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        opened = len(os.listdir("/dev/fd"))
    except (ImportError, OSError):
        return sys.maxsize
    return sys.maxsize if soft == resource.RLIM_INFINITY else max(1, soft - opened - _FREE_FILES)


@functools.cache
def _say_once(message: str) -> None:
    logger.warning(message)
