"""Cohere's API: ``POST /v2/embed`` and ``/v1/embed``; ``rerank`` has its documents."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from typing import ClassVar, Literal

import msgspec
import numpy as np

from hdruntime.errors import InputError
from hdruntime.serve.embedding_types import EmbeddingTypes
from hdruntime.serve.interface import Interface, Route, ServeRequest
from hdruntime.serve.request_body import PromptedBody, limit_of
from hdruntime.tasks.embedding import Embedding
from hdruntime.tasks.task import Text
from hdruntime.text.encoding import Overflow
from hdruntime.text.tokenization import TextTokenizer

EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]
"""Cohere's types; base64 is of float32."""


class TextContent(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A part of an input; text is the only type."""

    text: str
    type: Literal["text"] = "text"


class EmbedInput(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An input of several parts."""

    content: list[TextContent]


class CohereEmbedBody(PromptedBody, kw_only=True):
    """``POST /v2/embed``: `texts`, or `inputs` whose parts become the lines of a text."""

    overflow_by_default: ClassVar[Overflow] = Overflow.TRUNCATE

    texts: list[str] | None = None
    inputs: list[EmbedInput] | None = None
    embedding_types: list[EmbeddingType] | None = None
    dimensions: int | None = None
    max_tokens: int | None = None

    def all_texts(self) -> list[str]:
        """The texts of the request, which has one of the two lists."""
        if (self.texts is None) == (self.inputs is None):
            raise InputError("The request must have either texts or inputs.", hint='Send {"texts": ["..."]}.')
        if self.texts is not None:
            return self.texts
        return ["\n".join(part.text for part in each.content) for each in self.inputs or ()]

    def token_limit(self, tokenizer: TextTokenizer, *, is_pair: bool) -> int:
        """See `RequestBody.token_limit`; `max_tokens` alone does not say that texts are truncated."""
        if self.max_tokens is None:
            return super().token_limit(tokenizer, is_pair=is_pair)
        if self.truncate_prompt_tokens not in (None, self.max_tokens):
            raise InputError("max_tokens and truncate_prompt_tokens contradict each other.", hint="Give one of them.")
        return limit_of("max_tokens", self.max_tokens, tokenizer, is_pair=is_pair)


class CohereInterface(Interface):
    """Cohere's embeddings."""

    def routes(self) -> Sequence[Route]:
        if not isinstance(self.model.task, Embedding):
            return []
        versions = {"/v2/embed": "2", "/v1/embed": "1"}
        return [
            Route(path, CohereEmbedBody, partial(self._embed, version=version), error=_error)
            for path, version in versions.items()
        ]

    async def _embed(self, request: ServeRequest, body: CohereEmbedBody, *, version: str) -> object:
        task = self.model.task
        assert isinstance(task, Embedding), "the route is there for embeddings alone"
        is_by_type = version != "1" or body.embedding_types is not None
        if body.embedding_types == []:
            raise InputError("embedding_types is empty.", hint="Leave it out for float.")
        types = EmbeddingTypes(body.embedding_types or ["float"])
        texts = body.all_texts()
        answers = await request.answers(
            body, [Text(text=text) for text in texts], prompt_name=body.chosen_prompt_name(task.manifest)
        )
        rows = await types.rows(task.truncated(np.array(answers.answers), body.dimensions), self.model.ranges)
        embeddings = {name: [row[name] for row in rows] for name in rows[0]}
        meta: dict[str, object] = {
            "api_version": {"version": version},
            "billed_units": {"input_tokens": answers.tokens},
        }
        if answers.truncated:
            meta["warnings"] = [_warning(number, answers.truncation(number)) for number in answers.truncated]
        return {
            "id": str(uuid.uuid4()),
            "response_type": "embeddings_by_type" if is_by_type else "embeddings_floats",
            "embeddings": embeddings if is_by_type else embeddings["float"],
            "texts": texts,
            "meta": meta,
        }


INTERFACE = CohereInterface


def _warning(number: int, truncation: Mapping[str, object]) -> str:
    of_tokens = f" of {truncation['tokens_given']}" if "tokens_given" in truncation else ""
    return f"Text {number} was truncated: {truncation['tokens_used']}{of_tokens} tokens were used."


def _error(status: int, message: str) -> object:
    """The body of an error, as Cohere writes it."""
    return {"id": str(uuid.uuid4()), "message": message}
