"""Options of a server: the one declaration of each, from which ``hdexport serve`` makes its flags."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from hdruntime.errors import InputError, Setting
from hdruntime.process_limits import free_bytes

_MAX_QUEUE_TOKENS = 1_000_000

_MAX_RESPONSE_MB = 256

_BYTES_OF_WAITING_TOKEN = 256
"""Texts of 5, 50 and 500 words took 234, 141 and 179 bytes for each token, as lists of ids and offsets, and 3 to 4
characters."""

LongTexts = Literal["error", "end", "split"]
"""Treatment of a text with too many tokens: it is rejected, truncated at its end, or split into chunks."""


@dataclass(frozen=True, kw_only=True)
class OptionHelp:
    """What the help of an option says, and the values that the option accepts.

    Attributes:
        text: the meaning of the value, and its unit.
        group: title of the group of options in the help; empty for no group.
        metavar: the value in the help.
        default: the default in words; empty: the default value.
        minimum: minimum of the value; None for any value.
        maximum: maximum of the value; None for no maximum.
        choices: the accepted values; empty for any value.
    """

    text: str
    group: str
    metavar: str
    default: str
    minimum: float | None
    maximum: float | None
    choices: tuple[str, ...]

    @property
    def accepted(self) -> str:
        """The accepted values."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        return f"{self.minimum:g} or more" if self.maximum is None else f"{self.minimum:g} to {self.maximum:g}"

    def accepts(self, value: Any) -> bool:
        """Whether a value is among the choices, or a finite number in the bounds."""
        if self.choices:
            return value in self.choices
        if self.minimum is None:
            return True
        return math.isfinite(value) and value >= self.minimum and (self.maximum is None or value <= self.maximum)


def _described(
    text: str,
    *,
    group: str = "limits",
    metavar: str = "N",
    default: str = "",
    minimum: float | None = None,
    maximum: float | None = None,
    choices: tuple[str, ...] = (),
) -> dict[str, OptionHelp]:
    """The metadata of a field of `ServeOptions`."""
    described = OptionHelp(
        text=text,
        group=group,
        metavar=metavar,
        default=default,
        minimum=minimum,
        maximum=maximum,
        choices=choices,
    )
    return {"help": described}


_PROXIES = "proxies and browsers"


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Options of a server. Each field has a flag of ``hdexport serve``, but `api_key`, which is read from a file.

    Attributes:
        api_key: key of requests, ``Authorization: Bearer KEY``; None: requests need no key.
    """

    host: str = field(
        default="127.0.0.1",
        metadata=_described("address to listen on", group="", metavar="HOST", default="127.0.0.1, this machine only"),
    )
    port: int = field(
        default=8000,
        metadata=_described("port to listen on; 0 chooses a free port", group="", minimum=0, maximum=65535),
    )
    api_key: str | None = None
    max_wait_ms: float = field(
        default=0.0,
        metadata=_described("maximum wait of a text for other texts of its batch, in ms", metavar="MS", minimum=0),
    )
    max_queue_tokens: int | None = field(
        default=None,
        metadata=_described(
            "maximum tokens in the queue; further requests get 429",
            default="1000000, fewer if less than 1 GB of memory is free",
            minimum=1,
        ),
    )
    max_texts: int = field(default=2048, metadata=_described("maximum texts per request", minimum=1))
    max_body_mb: int = field(default=32, metadata=_described("maximum size of a request body in MiB", minimum=1))
    max_response_mb: int | None = field(
        default=None,
        metadata=_described(
            "maximum size in MiB of a response with embeddings of tokens, which takes up to three times its size in "
            "memory; larger ones get 400",
            default="256, fewer if less than 3 GB of memory is free",
            minimum=1,
        ),
    )
    max_text_characters: int = field(
        default=2**20,
        metadata=_described(
            "maximum characters of a text that must be tokenized in full: a split text, or one without spaces. "
            "A truncated text has no such limit",
            minimum=1,
        ),
    )
    truncate: LongTexts | None = field(
        default=None,
        metadata=_described(
            "default of the request key truncate, for texts longer than --max-seq-length: error answers 400, end "
            "truncates, split runs chunks and pools their outputs; set it for clients that cannot send the key",
            default="error, for rerank end",
            choices=get_args(LongTexts),
        ),
    )
    timeout: float = field(
        default=120.0,
        metadata=_described(
            "maximum time to a response in seconds; a request that would take longer gets 429",
            metavar="S",
            minimum=0.1,
        ),
    )
    keep_alive: float = field(
        default=120.0,
        metadata=_described(
            "seconds until an idle connection, or one with an incomplete request head, is closed; choose more than "
            "the proxy's timeout",
            group=_PROXIES,
            metavar="S",
            minimum=0.001,
        ),
    )
    forwarded_allow_ips: str | None = field(
        default=None,
        metadata=_described(
            "comma-separated addresses and networks of trusted proxies, whose X-Forwarded-For names the client, or '*'",
            group=_PROXIES,
            metavar="IPS",
            default="the variable FORWARDED_ALLOW_IPS, else this machine",
        ),
    )
    root_path: str = field(
        default="",
        metadata=_described("prefix of every route behind a proxy", group=_PROXIES, metavar="PATH", default="none"),
    )
    cors_origin: tuple[str, ...] = field(
        default=(),
        metadata=_described(
            "origin whose scripts may read responses, such as https://example.com, or '*'; repeatable",
            group=_PROXIES,
            metavar="ORIGIN",
            default="none",
        ),
    )

    @property
    def max_body_bytes(self) -> int:
        """Maximum bytes of a request's body."""
        return self.max_body_mb * 2**20

    def max_response_bytes(self) -> int:
        """`max_response_mb` in bytes, or its default with the memory that is free now."""
        if self.max_response_mb is not None:
            return self.max_response_mb * 2**20
        free = free_bytes()
        # A response takes a quarter of the free memory at most, as the queue does.
        return _MAX_RESPONSE_MB * 2**20 if free is None else min(_MAX_RESPONSE_MB * 2**20, free // 4 // 3)

    def queue_tokens(self) -> int:
        """`max_queue_tokens`, or its default with the memory that is free now."""
        if self.max_queue_tokens is not None:
            return self.max_queue_tokens
        free = free_bytes()
        room = _MAX_QUEUE_TOKENS if free is None else free // 4 // _BYTES_OF_WAITING_TOKEN
        return max(1, min(_MAX_QUEUE_TOKENS, room))

    def check(self) -> None:
        """Reject values under which nothing could be served, and keys, origins and paths that no client can send."""
        for each in fields(self):
            value, described = getattr(self, each.name), each.metadata.get("help")
            if described is not None and value is not None and not described.accepts(value):
                raise InputError(parameter=each.name, value=value, accepted=described.accepted)
        key = self.api_key
        if key is not None and not (key == key.strip() != "" and key.isascii() and key.isprintable()):
            raise InputError(
                "The API key is empty, or no header carries it.",
                hint="Give one line of ASCII without spaces around it, or leave the key out to accept all requests.",
            )
        for origin in self.cors_origin:
            if origin != "*" and not _is_origin(origin):
                raise InputError(
                    Setting("cors_origin"),
                    f" is {origin!r}, which no browser sends.",
                    hint="Give the page's scheme, host and port in small letters, such as https://example.com, or '*'.",
                )
        path = self.root_path
        if path and not (path.startswith("/") and not path.endswith("/") and path.isascii() and path.isprintable()):
            raise InputError(
                Setting("root_path"), f" is {path!r}.", hint="Give the path that the proxy keeps, such as /embeddings."
            )


def _is_origin(text: str) -> bool:
    try:
        parts = urlsplit(text)
        _ = parts.port
    except ValueError:
        return False
    return bool(parts.scheme and parts.hostname) and text == f"{parts.scheme}://{parts.netloc}".lower()
