"""Connections of a server: a limit on their number, and a time within which the head of a request must arrive."""

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
"""Maximum bytes of a request's line and headers: common proxies allow 8 to 64 KiB."""

_FREE_FILES = 16
"""Open files that are reserved for others than connections: files that are open for a moment, and the files of
`_EXTRA_CONNECTIONS`."""

_EXTRA_CONNECTIONS = 8
"""Connections beyond the limit, which are answered on the routes of health alone."""

_OPEN = ("/health", "/ready")
"""Routes that are answered beyond the limit."""

_idle: weakref.WeakKeyDictionary[Any, dict[LimitedConnection, None]] = weakref.WeakKeyDictionary()
"""Server -> its idle connections, the longest idle first."""


class LimitedConnection(asyncio.Protocol):
    """A mixin of uvicorn's protocols, which have `transport`, `connections` and `cycle`.

    An idle connection is closed if the head of its next request does not arrive in time, or if a new connection needs
    its file; then the longest idle connection is closed first.
    """

    transport: Any
    connections: set[Any]
    cycle: Any
    config: Any
    loop: Any
    server_state: Any
    _head_timer: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.app = self._answered

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for a head, and make room for this connection."""
        super().connection_made(_HeadWithBody(transport))  # type: ignore[arg-type]
        idle = self._idle()
        idle[self] = None
        self._start_head_timer()
        limit = max_connections()
        if len(self.connections) > limit:
            _warn_once(
                f"{limit} connections are open, as many as the limit on open files has room for. Connections that idle "
                "longest are closed for new ones, and requests beyond get 503. For more connections, raise the limit "
                "(ulimit -n, LimitNOFILE of systemd)."
            )
            longest = next(iter(idle))
            if longest is not self or len(self.connections) > limit + _EXTRA_CONNECTIONS:
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
        self.transport.send_head()
        super().on_response_complete()  # type: ignore[misc]
        if not self._has_request() and not self.transport.is_closing():
            self._idle()[self] = None

    def reject_head(self) -> None:
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
        if len(self.connections) <= max_connections() or scope["path"].endswith(_OPEN):
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
            _warn_once(
                f"A connection was closed on which no whole request came within {self.config.timeout_keep_alive:g} "
                "seconds (keep_alive); further ones are closed without a warning."
            )
            self.transport.close()


class _HeadWithBody:
    """A connection's transport that sends the head of a response together with the body's first part.

    uvicorn writes them one after the other: two system calls, and two packets for the client. The response to a HEAD
    request has no body.
    """

    def __init__(self, transport: Any) -> None:
        self._transport, self._head = transport, b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send data, after a head that waits; a response's head, which ends with an empty line, waits."""
        if self._head:
            head, self._head = self._head, b""
            self._transport.writelines([head, data])
        elif data.startswith(b"HTTP/1.1 ") and data.endswith(b"\r\n\r\n") and not data.startswith(b"HTTP/1.1 100"):
            self._head = data
        else:
            self._transport.write(data)

    def send_head(self) -> None:
        """Send a head that waits."""
        if self._head:
            self.write(b"")

    def close(self) -> None:
        """Close the connection after what waits."""
        self.send_head()
        self._transport.close()


class ListeningSocket(socket.socket):
    """A socket that disconnects clients when no file is left for their connections.

    asyncio's loop otherwise logs an error for each of its attempts to accept a connection, as many as the backlog, and
    accepts none for a second. uvloop's does the same as this class.
    """

    _spare: int | None = None

    def listen(self, *args: int) -> None:
        """Listen, with a file to spare."""
        if self._spare is None and sys.platform != "win32":
            self._spare = os.open(os.devnull, os.O_RDONLY)
        # Counted before connections have taken files.
        max_connections()
        super().listen(*args)

    def accept(self) -> tuple[socket.socket, Any]:
        try:
            return super().accept()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or self._spare is None:
                raise
        _warn_once(
            "No more files can be opened: clients are disconnected until one is closed. Raise the limit on open files "
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
def max_connections() -> int:
    """Connections for which there are files, counted before the first one comes, or when it does."""
    try:
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        opened = len(os.listdir("/dev/fd"))
    except (ImportError, OSError):
        return sys.maxsize
    return sys.maxsize if soft == resource.RLIM_INFINITY else max(1, soft - opened - _FREE_FILES)


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)
