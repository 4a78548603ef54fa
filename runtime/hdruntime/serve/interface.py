"""What an interface of the server declares: its routes, and what a handler asks of the server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import msgspec

from hdruntime.serve.options import ServeOptions
from hdruntime.serve.request_body import RequestBody
from hdruntime.session import Session
from hdruntime.tasks.task import Text, TextTask
from hdruntime.text.encoding import Overflow
from hdruntime.text.ranges import Ranges
from hdruntime.text.tokenization import TextTokenizer


class Answers(NamedTuple):
    """The answers to the texts of a request, in order, and the number of their tokens."""

    answers: list[Any]
    tokens: int

    @property
    def usage(self) -> dict[str, int]:
        """The tokens, as OpenAI reports them."""
        return {"prompt_tokens": self.tokens, "total_tokens": self.tokens}


class ServeRequest(Protocol):
    """A request, as a handler sees it.

    Attributes:
        tokenizer: the bundle's tokenizer, with the server's limits.
        truncated: numbers of the inputs that were truncated; the client is told.
    """

    tokenizer: TextTokenizer
    truncated: set[int]

    def check_number(self, texts: int) -> None:
        """Refuse no texts, and more texts than a request may have."""

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
            task: another task of the bundle, which reads texts in full; None for the served task.
            overflow: treatment of texts of too many tokens, in place of the body's.
            stride: tokens that chunks of a split text share.
            prompt_name: name of the prompt before every text; None for the model's default prompt.
            max_tokens_each: maximum tokens of each text, and of each second text of a pair; None for no maximum.
        """


Handler = Callable[[ServeRequest, Any], Awaitable[object]]
"""Takes a request and its body, and returns the JSON of the response."""


class Route(NamedTuple):
    """A path of the server.

    Attributes:
        path: the path, such as ``/v1/embeddings``.
        body: the type of the body of POST requests; None for a GET route, whose handler gets None.
        handler: makes the response.
    """

    path: str
    body: type[msgspec.Struct] | None
    handler: Handler


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """The bundle that is served.

    Attributes:
        task: the bundle's task.
        session: runs all texts.
        options: the server's options.
        max_queue_tokens: tokens that the server's queue holds.
        tokenizer: the bundle's tokenizer, with the server's limits.
        ranges: float32 [2, dimensions], the calibration ranges of int8 and uint8 embeddings; None without any.
    """

    task: TextTask
    session: Session
    options: ServeOptions
    max_queue_tokens: int
    tokenizer: TextTokenizer
    ranges: Ranges | None = None


class Interface:
    """The routes of one API that clients speak; each module of `hdruntime.serve.interfaces` has one, ``INTERFACE``.

    Args:
        model: the served bundle.
    """

    def __init__(self, model: ServedModel) -> None:
        self.model = model

    @classmethod
    def answers_task(cls, task: TextTask) -> bool:
        """Whether the interface has a route for the answers of a task."""
        raise NotImplementedError

    def routes(self) -> Sequence[Route]:
        """The routes for the bundle's task."""
        raise NotImplementedError
