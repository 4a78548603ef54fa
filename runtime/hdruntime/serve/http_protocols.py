"""uvicorn's HTTP/1.1 protocols without upgrades: a request that offers another protocol is answered over HTTP/1.1.

RFC 9110, section 7.8: a server may ignore ``Upgrade``. Java's HttpClient, and all that is built on it, offers HTTP/2
(``Upgrade: h2c``) with every request.
"""

from __future__ import annotations

import asyncio
import importlib.util

from uvicorn.protocols.http.h11_impl import H11Protocol


class H11WithoutUpgrade(H11Protocol):
    """uvicorn's protocol with the parser h11, which reads the body of such a request by itself."""

    def _should_upgrade(self) -> bool:
        # uvicorn's method also logs two warnings for each such request.
        return False


def http_protocol() -> type[asyncio.Protocol]:
    """The protocol with the parser that is installed: httptools, else h11."""
    if importlib.util.find_spec("httptools") is None:
        return H11WithoutUpgrade
    from hdruntime.serve.httptools_protocol import HttpToolsWithoutUpgrade

    return HttpToolsWithoutUpgrade
