"""uvicorn's HTTP/1.1 protocols without upgrades: a request that offers another protocol is answered over HTTP/1.1.

RFC 9110, section 7.8: a server may ignore ``Upgrade``. Java's HttpClient, and all that is built on it, offers HTTP/2
(``Upgrade: h2c``) with every request.
"""

from __future__ import annotations

import asyncio
import importlib.util
import re
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

_ORIGIN = re.compile(rb"https?://[^/?#]+", re.IGNORECASE)
"""What a request to a proxy has before its path; a server accepts it, too (RFC 9112, section 3.2.2)."""


class _Connection(h11.Connection):
    """Reads the requests that httptools reads: HTTP/1.1 or 1.0, of a path."""

    def next_event(self) -> Any:
        event = super().next_event()
        if not isinstance(event, h11.Request):
            return event
        if event.http_version not in (b"1.0", b"1.1"):
            raise h11.RemoteProtocolError(f"HTTP/{event.http_version.decode()} is not supported")
        if event.target.startswith(b"/") or event.target == b"*":
            return event
        target = _ORIGIN.sub(b"", event.target, count=1)
        if not target.startswith(b"/"):
            raise h11.RemoteProtocolError("the request has no path")
        headers = event.headers.raw_items()
        return h11.Request(method=event.method, target=target, headers=headers, http_version=event.http_version)


class H11WithoutUpgrade(H11Protocol):
    """uvicorn's protocol with the parser h11, which reads the body of a request with an offer by itself."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.conn = _Connection(h11.SERVER)

    def _should_upgrade(self) -> bool:
        # uvicorn's method also logs two warnings for each such request.
        return False


def http_protocol() -> type[asyncio.Protocol]:
    """The protocol with the parser that is installed: httptools, else h11."""
    if importlib.util.find_spec("httptools") is None:
        return H11WithoutUpgrade
    from hdruntime.serve.httptools_protocol import HttpToolsWithoutUpgrade

    return HttpToolsWithoutUpgrade
