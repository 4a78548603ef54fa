"""What an interface of the server declares: its routes, and what a handler asks of the server."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import msgspec

from hdruntime.errors import InputError, Setting
from hdruntime.serve.embedding_types import BASE64_VALUE_BYTES
from hdruntime.serve.options import ServeOptions
from hdruntime.serve.request_body import Content, RequestBody
from hdruntime.session import Session
from hdruntime.tasks.task import Text, TextTask
from hdruntime.text.encoding import Encoding, Overflow
from hdruntime.text.ranges import Ranges
from hdruntime.text.tokenization import TextTokenizer


class ModelNotFoundError(InputError):
    """A request names a model that is not served: status 404."""


class Answers(NamedTuple):
    """The answers to the texts of a request, in order.

    Attributes:
        answers: an answer per text.
        tokens: number of tokens that were run.
        truncated: number of a truncated text -> its encoding.
    """

    answers: list[Any]
    tokens: int
    truncated: Mapping[int, Encoding]

    @property
    def usage(self) -> dict[str, int]:
        """The tokens, as OpenAI reports them, and the number of truncated texts if there are any."""
        usage = {"prompt_tokens": self.tokens, "total_tokens": self.tokens}
        return usage | {"truncated_inputs": len(self.truncated)} if self.truncated else usage

    def truncation(self, number: int) -> dict[str, object]:
        """Keys of the JSON object of a truncated text or pair; no keys for any other.

        Returns:
            ``truncated`` (True), ``tokens_used``, and ``tokens_given``, which is absent if the text is so long that
            its tokens were not counted. Special tokens and prompt count.
        """
        encoding = self.truncated.get(number)
        if encoding is None:
            return {}
        keys: dict[str, object] = {"truncated": True, "tokens_used": len(encoding)}
        return keys if encoding.given_tokens is None else keys | {"tokens_given": encoding.given_tokens}


class ServeRequest(Protocol):
    """A request, as a handler sees it.

    Attributes:
        tokenizer: the bundle's tokenizer, with the server's limits.
        truncated: numbers of the inputs that were truncated, which `answers` adds; the client is told in a header.
        path_parameters: values of the parameters in the route's path, such as ``model`` of ``/v2/models/{model}``.
        models: the models that the request may choose from: those of the server, or the one in the path's prefix.
    """

    tokenizer: TextTokenizer
    truncated: set[int]
    path_parameters: Mapping[str, str]
    models: Sequence[ServedModel]

    def check_number(self, texts: int) -> None:
        """Reject no texts, and more texts than a request may have."""

    def add_response_bytes(self, size: int) -> int:
        """Count bytes of a part of the response, and return the bytes of all parts that were counted."""

    async def check_ready(self) -> None:
        """Reject with 503 and the reason, within a second, if a text cannot be answered now."""

    def check_alive(self) -> None:
        """Reject with 503 and the reason if a restart may help."""

    def part(self) -> ServeRequest:
        """One of several requests that came as one, with `truncated` of its own."""

    def body(self, values: Mapping[str, Any], kind: type[Content]) -> Content:
        """A body of its keys, with the server's defaults."""

    async def answers(
        self,
        body: RequestBody,
        texts: Sequence[Text],
        *,
        task: TextTask | None = None,
        overflow: Overflow | None = None,
        stride: int = 0,
        prompt_name: str | None = None,
        max_tokens_each: tuple[int | None, int | None] = (None, None),
    ) -> Answers:
        """The task's answers to texts, which wait in the server's queue.

        Args:
            body: its keys say how texts of too many tokens are treated.
            texts: the texts of the request.
            task: another task of the bundle; None for the served task.
            overflow: treatment of texts of too many tokens, in place of the body's.
            stride: tokens that chunks of a split text share.
            prompt_name: name of the prompt before every text; None for the model's default prompt.
            max_tokens_each: maximum tokens of each text, and of each second text of a pair; None for no maximum.
        """


Handler = Callable[[ServeRequest, Any], Awaitable[object]]
"""Takes a request and its body, and returns the JSON of the response."""


class Route(NamedTuple):
    """A path of the server.

    Of several models that have a path, a request chooses one by the body's key ``model``, or by the path where that has
    the parameter ``{model}``; ``{model:path}`` takes slashes, too.

    Attributes:
        path: the path, such as ``/v1/embeddings``, with parameters such as ``{model}``.
        body: the type of the body of POST requests; `dict` for the object as it is; None for a GET route, whose handler
            gets None.
        handler: makes the response.
        lines: makes the responses to a body in JSON lines, a list of objects: a list with a response for each. None:
            a body is one JSON object, whatever its content type.
        is_open: whether the route needs no API key.
        error: makes the body of a response with an error, of the status and the message; None: OpenAI's.
        is_of_server: whether the response is about all of `ServeRequest.models`, so that a request chooses none.
    """

    path: str
    body: type[msgspec.Struct] | type[dict[str, Any]] | None
    handler: Handler
    lines: Handler | None = None
    is_open: bool = False
    error: Callable[[int, str], object] | None = None
    is_of_server: bool = False

    @property
    def shown_path(self) -> str:
        """The path for readers: a parameter is its name in braces."""
        return self.path.replace(":path}", "}")


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """The bundle that is served.

    Attributes:
        names: the names of the model; the first one is shown.
        task: the bundle's task.
        session: a session of the bundle. Texts run in any of the model's, by `ServeRequest.answers`.
        options: the server's options.
        max_queue_tokens: tokens that the server's queue holds.
        max_response_bytes: size of a response with embeddings of tokens.
        tokenizer: the bundle's tokenizer, with the server's limits.
        ranges: float32 [2, dimensions], the calibration ranges of int8 and uint8 embeddings; None without any.
    """

    names: Sequence[str]
    task: TextTask
    session: Session
    options: ServeOptions
    max_queue_tokens: int
    max_response_bytes: int
    tokenizer: TextTokenizer
    ranges: Ranges | None = None

    @property
    def name(self) -> str:
        """The name that is shown."""
        return self.names[0]

    def check_name(self, request: ServeRequest) -> None:
        """Reject a request whose path names another model.

        Raises:
            ModelNotFoundError: it does.
        """
        name = request.path_parameters["model"]
        if name not in self.names:
            raise ModelNotFoundError(
                f"There is no model {name!r}.", hint=f"Use {self.name!r}, the model that is served."
            )

    def check_size_of_tokens(
        self, request: ServeRequest, body: RequestBody, texts: Sequence[Text], dimensions: int, value_bytes: float
    ) -> None:
        """Reject texts whose response might be too large, before they run.

        Args:
            request: the request, whose parts have one response.
            body: its keys say how many tokens of a text run.
            texts: the texts; each character counts as a token.
            dimensions: values of the embedding of a token.
            value_bytes: bytes of a value in memory and in the response, whichever is more.

        Raises:
            InputError: the response might exceed `max_response_bytes`.
        """
        # A character is at most a token, but for the few that a tokenizer without such characters spells in bytes.
        is_whole, max_len = body.overflow is Overflow.SPLIT, self.tokenizer.max_len
        lengths = [len(text.text if text.input_ids is None else text.input_ids) for text in texts]
        tokens = sum(length if is_whole else min(length, max_len) for length in lengths)
        size = request.add_response_bytes(math.ceil(tokens * dimensions * value_bytes))
        if size > self.max_response_bytes:
            larger, can_encode = Setting("max_response_mb", command="serve"), hasattr(body, "encoding_format")
            smaller = ', ask for "encoding_format": "base64"' if can_encode and value_bytes > BASE64_VALUE_BYTES else ""
            raise InputError(
                f"The texts have up to {tokens} tokens with {dimensions} values each, and the response up to "
                f"{size / 2**20:.1f} MiB; it may have {self.max_response_bytes / 2**20:.1f} MiB.",
                hint=(f"Send fewer texts in a request{smaller}, or start the server with a larger ", larger, "."),
            )


class Interface:
    """The routes of one API that clients speak; each module of `hdruntime.serve.interfaces` has one, ``INTERFACE``.

    Args:
        model: the served bundle.
    """

    def __init__(self, model: ServedModel) -> None:
        self.model = model

    def routes(self) -> Sequence[Route]:
        """The routes for the bundle's task."""
        raise NotImplementedError

    def roots(self) -> Sequence[Route]:
        """Those of the `routes` that answer at paths which say nothing of the task, such as ``/``: the first one, or
        the one whose body has `inputs` where a body has that key."""
        return ()
