"""uvicorn's HTTP/1.1 protocols, which ignore ``Upgrade``: a request that offers another protocol gets HTTP/1.1.

RFC 9110, section 7.8: a server may ignore ``Upgrade``. Java's HttpClient, and all that is built on it, offers HTTP/2
(``Upgrade: h2c``) with every request.
"""

from __future__ import annotations

import asyncio
import http
import importlib.util
import re
from collections.abc import Iterable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from hdruntime.serve.connections import HEAD_BYTES, LimitedConnection

_ORIGIN = re.compile(rb"https?://[^/?#]+", re.IGNORECASE)
"""What a request to a proxy has before its path; a server accepts it, too (RFC 9112, section 3.2.2)."""


def head_bytes(target: bytes, headers: Iterable[tuple[bytes, bytes]]) -> int:
    """The size of a request's head, about: parsers do not tell the spaces and the method."""
    return len(target) + sum(len(name) + len(value) + len(b": \r\n") for name, value in headers)


class _Connection(h11.Connection):
    """Reads the requests that httptools reads: HTTP/1.1 or 1.0, of a path."""

    has_long_head = False

    def next_event(self) -> Any:
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            self.has_long_head = error.error_status_hint == http.HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            raise
        if not isinstance(event, h11.Request):
            return event
        if head_bytes(event.target, event.headers.raw_items()) > HEAD_BYTES:
            self.has_long_head = True
            raise h11.RemoteProtocolError("the head is too long")
        if event.http_version not in (b"1.0", b"1.1"):
            raise h11.RemoteProtocolError(f"HTTP/{event.http_version.decode()} is not supported")
        if event.target.startswith(b"/") or event.target == b"*":
            return event
        target = _ORIGIN.sub(b"", event.target, count=1)
        if not target.startswith(b"/"):
            raise h11.RemoteProtocolError("the request has no path")
        headers = event.headers.raw_items()
        return h11.Request(method=event.method, target=target, headers=headers, http_version=event.http_version)


class H11WithoutUpgrade(LimitedConnection, H11Protocol):
    """uvicorn's protocol with the parser h11, which reads the body of a request with an offer by itself."""

    # Of empty lines since the last request.
    _empty_bytes = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = self._read = _Connection(h11.SERVER, HEAD_BYTES)

    def data_received(self, data: bytes) -> None:
        """Parse a part of the connection's data, without empty lines before a request, as httptools does (RFC 9112,
        section 2.2)."""
        if self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            request = data.lstrip(b"\r\n")
            self._empty_bytes = 0 if request else self._empty_bytes + len(data)
            data = request
            if self._empty_bytes > HEAD_BYTES and not self.transport.is_closing():
                self.reject_head()
        # To h11 no data is the end of the connection.
        if data:
            super().data_received(data)
        self.note_request()

    def send_400_response(self, msg: str) -> None:
        """Reject what is no request, or has too long a head."""
        if self._read.has_long_head:
            self.reject_head()
        else:
            super().send_400_response(msg)

    def _should_upgrade(self) -> bool:
        # uvicorn's method also logs two warnings for each such request.
        return False


def http_protocol() -> type[asyncio.Protocol]:
    """The protocol with the parser that is installed: httptools, else h11."""
    if importlib.util.find_spec("httptools") is None:
        return H11WithoutUpgrade
    from hdruntime.serve.httptools_protocol import HttpToolsWithoutUpgrade

    return HttpToolsWithoutUpgrade
