"""uvicorn's protocol with the parser httptools, see `hdruntime.serve.http_protocols`."""

from __future__ import annotations

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_UPGRADE_HEADERS = (b"upgrade", b"http2-settings")


class HttpToolsWithoutUpgrade(HttpToolsProtocol):
    """Parses a request that offers another protocol a second time, without the offer.

    httptools ends such a request at its head: the body, and all requests after it, would belong to the other protocol
    (Kludex/uvicorn#2722). A new parser reads the head without ``Upgrade``, then what follows, so that the connection
    goes on.
    """

    def data_received(self, data: bytes) -> None:
        """Parse a part of the connection's data."""
        self._unset_keepalive_if_required()
        rest = memoryview(data)
        try:
            while (head := self._fed(rest)) is not None:
                rest = rest[head:]
                written = self._head_without_upgrade()
                self.parser = httptools.HttpRequestParser(self)
                # As uvicorn sets it: an answer to the first of several requests may close the connection.
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                self.parser.feed_data(written)
        except httptools.HttpParserError:
            message = "Invalid HTTP request received."
            self.logger.warning(message)
            self.send_400_response(message)

    def on_headers_complete(self) -> None:
        """Begin the request, unless it is parsed a second time."""
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        """End the body, unless the request is parsed a second time."""
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _fed(self, data: memoryview) -> int | None:
        """Parse data up to the end of a head that offers another protocol; None where there is no such head."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            end: int = upgrade.args[0]
            return end
        return None

    def _head_without_upgrade(self) -> bytes:
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        if method == b"CONNECT":
            # A tunnel has no path; this server is no proxy.
            raise httptools.HttpParserInvalidMethodError("CONNECT")
        lines = [b"%b %b HTTP/%b" % (method, self.url, version)]
        for name, value in self.headers:
            if name == b"connection":
                options = [option.strip() for option in value.split(b",")]
                value = b", ".join(option for option in options if option.lower() not in _UPGRADE_HEADERS)
            if name not in _UPGRADE_HEADERS and (value or name != b"connection"):
                lines.append(b"%b: %b" % (name, value))
        return b"\r\n".join([*lines, b"", b""])
