"""``POST /v1/multi-vector``: Jina's API for an embedding of each token, of late interaction (ColBERT)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from hdruntime.errors import InputError, Setting
from hdruntime.serve.embedding_types import EmbeddingTypes, EncodingFormat
from hdruntime.serve.interface import Interface, Route, ServedModel, ServeRequest
from hdruntime.serve.request_body import RequestBody
from hdruntime.tasks.task import Text, TextTask
from hdruntime.tasks.token_similarity import Side, TokenVectors
from hdruntime.text.encoding import Overflow


class TextObject(msgspec.Struct, kw_only=True):
    """A text with an id, which is ignored, as Jina accepts them."""

    text: str
    id: str | None = None


class MultiVectorBody(RequestBody, kw_only=True):
    """``POST /v1/multi-vector``."""

    overflow_by_default: ClassVar[Overflow] = Overflow.TRUNCATE

    input: str | TextObject | list[str | TextObject]
    input_type: Side = Side.DOCUMENT
    encoding_format: EncodingFormat | list[EncodingFormat] = "float"
    dimensions: int | None = None

    def texts(self) -> list[Text]:
        """The inputs as texts of a task."""
        inputs = self.input if isinstance(self.input, list) else [self.input]
        return [Text(text=each if isinstance(each, str) else each.text) for each in inputs]


class MultiVectorInterface(Interface):
    """The embeddings of the tokens of queries and documents."""

    def __init__(self, model: ServedModel) -> None:
        super().__init__(model)
        is_served = self.answers_task(model.task)
        self._tasks = {side: TokenVectors(model.session.manifest, side) for side in Side if is_served}

    @classmethod
    def answers_task(cls, task: TextTask) -> bool:
        return isinstance(task, TokenVectors)

    def routes(self) -> Sequence[Route]:
        return [Route("/v1/multi-vector", MultiVectorBody, self._embed)] if self._tasks else []

    async def _embed(self, request: ServeRequest, body: MultiVectorBody) -> object:
        task, texts, types = self._tasks[body.input_type], body.texts(), EmbeddingTypes(body.encoding_format)
        self._check_size(texts)
        # A query is one text for MaxSim, whose chunks would count as queries of their own.
        is_whole = body.overflow is Overflow.SPLIT and not task.splits
        answers = await request.answers(
            body,
            texts,
            task=task,
            overflow=Overflow.ERROR if is_whole else None,
            prompt_name=body.input_type,
        )
        vectors = [task.truncated(each, body.dimensions) for each in answers.answers]
        data = [
            {"object": "embeddings", "index": index, "embeddings": rows} | answers.truncation(index)
            for index, rows in enumerate(types.lists(vectors, self.model.ranges))
        ]
        return {"object": "list", "data": data, "model": self.model.name, "usage": answers.usage}

    def _check_size(self, texts: Sequence[Text]) -> None:
        """Limit the response, which has an embedding for each token."""
        characters, limit = sum(text.characters for text in texts), self.model.options.max_text_characters
        if characters > limit:
            raise InputError(
                f"The request has {characters} characters; at most {limit} are answered at once.",
                hint=(
                    "Send several requests, or start the server with a larger ",
                    Setting("max_text_characters", command="serve"),
                    ".",
                ),
            )


INTERFACE = MultiVectorInterface
