"""Reading of requests: bodies in JSON and in JSON lines, within the server's limits."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from hdruntime.serve.options import ServeOptions
from hdruntime.serve.request_body import (
    LARGE_BYTES,
    Content,
    RequestBody,
    body_of,
    read_large_values,
    read_values,
    too_many_texts,
)
from hdruntime.serve.responses import CLIENT_CLOSED_REQUEST, RequestError

if TYPE_CHECKING:
    from starlette.requests import Request

JSON_LINES = ("application/jsonlines", "application/x-jsonlines", "application/jsonl", "application/x-ndjson")
"""Content types of JSON lines; responses have the first one."""

_IS_LARGE = "hdexport.is_large"
"""The key that says, in a request's scope, whether its body is large."""

_IS_READ = "hdexport.is_read"
"""The key that says, in a request's scope, whether its body has arrived; absent from requests without a body."""

_BODY_SECONDS = 2.0
"""Seconds that a server that is stopped waits for the rest of a request's body."""

Read = TypeVar("Read")


class RequestReader:
    """Reads the bodies of requests. Large bodies are read in another thread, so that other requests do not wait.

    Args:
        options: the server's options, with the limits of a request and the default of ``truncate``.
        max_len: maximum tokens of a text that one of the server's models takes.
        is_stopping: whether the HTTP server accepts no more requests.
    """

    def __init__(self, options: ServeOptions, max_len: int, is_stopping: Callable[[], bool]) -> None:
        self._options = options
        # A text of the maximum length has about this many ids, see `Text.characters`.
        self._max_ids = max(options.max_text_characters // 4, max_len)
        self._is_stopping, self._stopping_since = is_stopping, math.inf

    async def values(self, request: Request) -> dict[str, Any]:
        """The JSON object in a request's body."""
        return await self._read(request, self._values)

    async def lines(self, request: Request) -> list[dict[str, Any]]:
        """The JSON objects in a request's lines."""
        return await self._read(request, self._lines)

    async def body_of_request(self, request: Request, values: dict[str, Any], kind: Any) -> Any:
        """The body of a request whose `values` are read; `kind` is `dict` for the values as they are."""
        if kind is dict:
            return values
        if not request.scope[_IS_LARGE]:
            return self.body(values, kind)
        return await asyncio.to_thread(self.body, values, kind)

    def body(self, values: Mapping[str, Any], kind: type[Content]) -> Content:
        """See `ServeRequest.body`."""
        body, truncate = body_of(values, kind), self._options.truncate
        if isinstance(body, RequestBody) and truncate is not None and not body.says_overflow:
            body.truncate = truncate
        return body

    def check_number(self, texts: int) -> None:
        """See `ServeRequest.check_number`."""
        if not 1 <= texts <= self._options.max_texts:
            raise too_many_texts(texts, self._options.max_texts)

    async def reason_to_stop(self, request: Request) -> RequestError | None:
        """The error of a request whose client has disconnected, or whose body has not arrived when the server stops;
        None if the request continues."""
        is_read = request.scope.get(_IS_READ)
        if is_read:
            return _disconnected() if await request.is_disconnected() else None
        # Others than False have no body.
        if is_read is False and self._is_stopping():
            self._stopping_since = min(self._stopping_since, time.monotonic())
            if time.monotonic() - self._stopping_since >= _BODY_SECONDS:
                return RequestError(503, "The server stops, and the request's body has not arrived.", retry_after=1)
        return None

    async def _read(self, request: Request, read: Callable[[bytearray], Read]) -> Read:
        """What a function reads in a request's body."""
        request.scope[_IS_READ] = False
        if (coding := request.headers.get("content-encoding", "").strip().lower()) not in ("", "identity"):
            raise RequestError(415, f"The body is encoded as {coding:.100}; send it without Content-Encoding.")
        content, has_more = bytearray(), True
        while has_more:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise _disconnected()
            content += message.get("body", b"")
            if len(content) > self._options.max_body_bytes:
                raise RequestError(413, f"The body has more than {self._options.max_body_bytes} bytes.")
            has_more = message.get("more_body", False)
        request.scope[_IS_READ] = True
        request.scope[_IS_LARGE] = len(content) > LARGE_BYTES
        return await asyncio.to_thread(read, content) if request.scope[_IS_LARGE] else read(content)

    def _values(self, content: bytes | bytearray) -> dict[str, Any]:
        if len(content) <= LARGE_BYTES:
            return read_values(content)
        return read_large_values(content, max_texts=self._options.max_texts, max_ids=self._max_ids)

    def _lines(self, content: bytearray) -> list[dict[str, Any]]:
        """The JSON objects in lines; empty lines are ignored."""
        lines = content.rstrip()
        # Counted before they are made.
        if not lines or (count := lines.count(b"\n") + 1) > self._options.max_texts:
            raise too_many_texts(count if lines else 0, self._options.max_texts)
        return [self._values(line) for line in lines.split(b"\n") if line.strip()]


def has_json_lines(request: Request) -> bool:
    """Whether a body is JSON lines; a type that is neither these nor JSON is rejected, unless it is a client's default
    for any data."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind in JSON_LINES:
        return True
    if kind not in ("", "application/octet-stream", "application/x-www-form-urlencoded") and "json" not in kind:
        raise RequestError(
            415, f"The content type is {kind}; it must be application/json, or {JSON_LINES[0]} for JSON lines."
        )
    return False


def _disconnected() -> RequestError:
    return RequestError(CLIENT_CLOSED_REQUEST, "The client has disconnected.")
