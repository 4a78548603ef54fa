"""Responses of the server in JSON, errors among them, and the header that names truncated inputs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from starlette.responses import Response

CLIENT_CLOSED_REQUEST = 499
"""The status of a request whose client has disconnected, for the metrics, as nginx has it."""

TRUNCATED = "X-Truncated-Inputs"
"""The header of a response with the numbers of the inputs that were truncated."""

_RANGES_CHARACTERS = 1000
"""Length after which the header counts the rest of the numbers: proxies accept 4 to 8 KB of headers in all."""

_MESSAGE_CHARACTERS = 4000
"""Maximum characters of an error's message, which quotes what a client has sent: clients write it to their logs."""

_TYPES = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}
"""A status -> the type of the error, as OpenAI has it; other errors are of the type ``invalid_request_error``."""


class RequestError(Exception):
    """A request that the server rejects.

    Args:
        status: HTTP status of the response.
        message: what the client is told.
        retry_after: seconds after which the client may send the request again; None if it should not.
    """

    def __init__(self, status: int, message: str, *, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.retry_after = status, retry_after


def json_response(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    from starlette.responses import Response

    encoded = msgspec.json.encode(content)
    return Response(encoded, status_code=status, media_type="application/json", headers=headers)


def error_response(
    error: Callable[[int, str], object] | None,
    status: int,
    message: str,
    *,
    retry_after: int | None = None,
    code: str | None = None,
) -> Response:
    """The response with an error.

    Args:
        error: makes the JSON from the status and the message; None for OpenAI's JSON.
        status: HTTP status.
        message: what was given, what is accepted, and what to do.
        retry_after: seconds for the header ``Retry-After``; None for no header.
        code: OpenAI's code of the error.
    """
    if len(message) > _MESSAGE_CHARACTERS:
        message = f"{message[:_MESSAGE_CHARACTERS]}..."
    openai = {
        "error": {"message": message, "type": _TYPES.get(status, "invalid_request_error"), "param": None, "code": code}
    }
    headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
    return json_response(openai if error is None else error(status, message), status, headers)


def number_ranges(numbers: Collection[int]) -> str:
    """Ascending numbers and ranges: ``0,3-5``; after very many ranges, the number of further numbers: ``0,2,4,+97``."""
    shown: list[str] = []
    ordered, left, size = sorted(numbers), len(numbers), 0
    for _, group in itertools.groupby(enumerate(ordered), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        if size > _RANGES_CHARACTERS:
            return ",".join([*shown, f"+{left}"])
        shown.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
        left, size = left - len(run), size + len(shown[-1]) + 1
    return ",".join(shown)
