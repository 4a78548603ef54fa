"""Options of a server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args
from urllib.parse import urlsplit

from hdruntime.errors import InputError
from hdruntime.process_limits import free_bytes

LongTexts = Literal["error", "end", "split"]
"""The treatment of a text of too many tokens: it is refused, truncated at its end, or run in chunks."""

_MOST_QUEUE_TOKENS = 1_000_000

_BYTES_OF_WAITING_TOKEN = 256
"""Texts of 5, 50 and 500 words took 234, 141 and 179 bytes for each token, as lists of ids and offsets, and 3 to 4
characters."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The limits of a server, and where it is reached.

    Attributes:
        api_key: that requests have to carry, as ``Authorization: Bearer KEY``; None takes all.
        max_wait_ms: how long a text waits for others to share its batch with.
        max_queue_tokens: tokens that wait at most; more are refused with 429. None: 1,000,000, or as many as a quarter
            of the free memory holds if that is less.
        max_texts: of one request.
        max_body_bytes: of one request.
        max_text_characters: of a text that is read whole: one that is split or chunked, or that the tokenizer takes for
            one word. Of a text that is cut or refused for its tokens, only the part that decides is read.
        truncate: the treatment of texts of too many tokens where a request does not say it; a request's own key has
            precedence. None: the default of the route's interface, which is ``end`` for rerank and ``error`` for all
            others. ``split`` refuses long lists of ids, which cannot be split.
        timeout_s: seconds in which a request is answered; a request that cannot be is refused with 429, and one whose
            body has not come gets 503.
        cors_origins: of pages whose scripts may read answers, ``https://example.com``; ``*`` for all.
        root_path: before every path, ``/prefix``, for a proxy that passes it on; paths without it are answered, too.
    """

    api_key: str | None = None
    max_wait_ms: float = 2.0
    max_queue_tokens: int | None = None
    max_texts: int = 2048
    max_body_bytes: int = 32 * 2**20
    max_text_characters: int = 2**20
    truncate: LongTexts | None = None
    timeout_s: float = 120.0
    cors_origins: tuple[str, ...] = ()
    root_path: str = ""

    def queue_tokens(self) -> int:
        """`max_queue_tokens`, or its default with the memory that is free now."""
        if self.max_queue_tokens is not None:
            return self.max_queue_tokens
        free = free_bytes()
        room = _MOST_QUEUE_TOKENS if free is None else free // 4 // _BYTES_OF_WAITING_TOKEN
        return max(1, min(_MOST_QUEUE_TOKENS, room))

    def check(self) -> None:
        """Refuse limits under which nothing could be served, and keys, origins and paths that no client can send."""
        limits = ("max_queue_tokens", 1), ("max_texts", 1), ("max_body_bytes", 1024), ("max_text_characters", 1)
        for name, least in (*limits, ("timeout_s", 0.1)):
            if getattr(self, name) is not None and not getattr(self, name) >= least:
                option = name.removesuffix("_s").replace("_", "-")
                raise InputError(f"--{option} is {getattr(self, name)}.", hint=f"Give {least} or more.")
        if not self.max_wait_ms >= 0:
            raise InputError(f"--max-wait-ms is {self.max_wait_ms:g}.", hint="Give 0 or more.")
        if self.truncate not in (None, *get_args(LongTexts)):
            raise InputError(f"--truncate is {self.truncate}.", hint=f"Give one of {', '.join(get_args(LongTexts))}.")
        key = self.api_key
        if key is not None and not (key == key.strip() != "" and key.isascii() and key.isprintable()):
            raise InputError(
                "The API key is empty, or no header carries it.",
                hint="Give one line of ASCII without spaces around it, or "
                "leave it out for a server that takes all requests.",
            )
        for origin in self.cors_origins:
            if origin != "*" and not _is_origin(origin):
                raise InputError(
                    f"--cors-origin is {origin!r}, which no browser sends.",
                    hint="Give the page's scheme, host and port in small letters, such as https://example.com, or '*'.",
                )
        path = self.root_path
        if path and not (path.startswith("/") and not path.endswith("/") and path.isascii() and path.isprintable()):
            raise InputError(
                f"--root-path is {path!r}.", hint="Give the path that the proxy passes on, such as /embeddings."
            )


def _is_origin(text: str) -> bool:
    try:
        parts = urlsplit(text)
        _ = parts.port
    except ValueError:
        return False
    return bool(parts.scheme and parts.hostname) and text == f"{parts.scheme}://{parts.netloc}".lower()
