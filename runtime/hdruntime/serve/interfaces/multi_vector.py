"""``POST /v1/multi-vector``: Jina's API for an embedding of each token, of late interaction (ColBERT)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from hdruntime.serve.embedding_types import EmbeddingTypes, EncodingFormat
from hdruntime.serve.interface import Interface, Route, ServedModel, ServeRequest
from hdruntime.serve.request_body import RequestBody
from hdruntime.tasks.hybrid_similarity import HybridDense, HybridTokens
from hdruntime.tasks.task import Text, TextTask
from hdruntime.tasks.token_similarity import Side, TokenVectors
from hdruntime.text.encoding import Overflow


class TextObject(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
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
        manifest, task = model.session.manifest, model.task
        self._tasks: dict[Side, TokenVectors | HybridTokens] = {}
        if isinstance(task, TokenVectors):
            self._tasks = {side: TokenVectors(manifest, side) for side in Side}
        elif isinstance(task, HybridDense):
            self._tasks = dict.fromkeys(Side, HybridTokens(manifest))

    @classmethod
    def answers_task(cls, task: TextTask) -> bool:
        return isinstance(task, TokenVectors | HybridDense)

    def routes(self) -> Sequence[Route]:
        return [Route("/v1/multi-vector", MultiVectorBody, self._embed)] if self._tasks else []

    async def _embed(self, request: ServeRequest, body: MultiVectorBody) -> object:
        task, texts, types = self._tasks[body.input_type], body.texts(), EmbeddingTypes(body.encoding_format)
        self.model.check_size_of_tokens(request, body, texts, task.dimensions, types.value_bytes)
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
        lists = await types.lists(vectors, self.model.ranges)
        data = [
            {"object": "embeddings", "index": index, "embeddings": rows} | answers.truncation(index)
            for index, rows in enumerate(lists)
        ]
        return {"object": "list", "data": data, "model": self.model.name, "usage": answers.usage}


INTERFACE = MultiVectorInterface
