"""uvicorn's protocol with the parser httptools, see `hdruntime.serve.http_protocols`."""

from __future__ import annotations

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from hdruntime.serve.connections import HEAD_BYTES, LimitedConnection
from hdruntime.serve.http_protocols import head_bytes

_UPGRADE_HEADERS = (b"upgrade", b"http2-settings")


class HttpToolsWithoutUpgrade(LimitedConnection, HttpToolsProtocol):
    """Parses a request that offers another protocol a second time, without the offer.

    httptools ends such a request at its head: the body, and all requests after it, would belong to the other protocol
    (Kludex/uvicorn#2722). A new parser reads the head without ``Upgrade``, then what follows, so that the connection
    goes on.
    """

    # Heads that are whole, whether a body follows the last one, and bytes of a head that is not whole.
    _heads, _has_body, _unfinished, _has_long_head = 0, False, 0, False

    def data_received(self, data: bytes) -> None:
        """Parse a part of the connection's data."""
        heads, had_body = self._heads, self._has_body
        self._parse(data)
        # The parser says nothing of a header before it is whole.
        is_head = heads == self._heads and not had_body
        self._unfinished = self._unfinished + len(data) if is_head else 0
        if self._unfinished > HEAD_BYTES and not self.transport.is_closing():
            self.reject_head()
        self.note_request()

    def _parse(self, data: bytes) -> None:
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
            if self._has_long_head:
                self.reject_head()
                return
            message = "Invalid HTTP request received."
            self.logger.warning(message)
            self.send_400_response(message)

    def on_headers_complete(self) -> None:
        """Begin the request, unless it is parsed a second time, or its head is too long."""
        self._heads, self._has_body = self._heads + 1, True
        self._has_long_head = head_bytes(self.url, self.headers) > HEAD_BYTES
        if self._has_long_head:
            raise ValueError("the head is too long")
        version = self.parser.get_http_version()
        hosts = sum(name == b"host" for name, _ in self.headers)
        # As h11 does (RFC 9112, section 3.2).
        if version not in ("1.0", "1.1") or hosts > 1 or (version == "1.1" and not hosts):
            raise ValueError("the request has another version of HTTP, or not one host")
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        """End the body, unless the request is parsed a second time."""
        self._has_body = False
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _fed(self, data: memoryview) -> int | None:
        """Parse data up to the end of a head that offers another protocol; None where there is no such head."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            return upgrade.args[0]
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
