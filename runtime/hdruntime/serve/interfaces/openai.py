"""OpenAI's API: ``POST /v1/embeddings``, with keys of Jina, Voyage, vLLM and infinity, and ``GET /v1/models``."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from hdruntime.errors import InputError, joined
from hdruntime.serve.embedding_types import EmbeddingTypes, EncodingFormat, OutputDtype, made_beside_the_loop
from hdruntime.serve.interface import Answers, Interface, Route, ServedModel, ServeRequest
from hdruntime.serve.interfaces.pipelines import arrays_of
from hdruntime.serve.request_body import PromptedBody
from hdruntime.tasks.embedding import ChunkEmbeddings, Embedding
from hdruntime.tasks.hybrid_similarity import (
    EmbeddingKind,
    HybridDense,
    HybridEmbedding,
    HybridEmbeddings,
    checked_kinds,
)
from hdruntime.tasks.sparse_similarity import SparseVector
from hdruntime.tasks.task import Text, TextTask
from hdruntime.text.chunking import joined_chunks, overlap_of
from hdruntime.text.embeddings import normalized
from hdruntime.text.encoding import Overflow

_MANY_IDS = 2**14
"""Ids of a request that are checked in another thread than the event loop's: fewer take a millisecond."""


_IDS_HINT = (
    "Send texts, or ids of the bundle's tokenizer with special tokens. LangChain's OpenAIEmbeddings sends OpenAI's "
    "ids, and with check_embedding_ctx_length=False texts."
)


class EmbeddingsBody(PromptedBody, kw_only=True):
    """``POST /v1/embeddings``."""

    input: Any
    encoding_format: EncodingFormat | list[EncodingFormat] = "float"
    output_dtype: OutputDtype | None = None
    dimensions: int | None = None
    normalize: bool = False
    late_chunking: bool = False
    return_dense: bool = True
    return_sparse: bool = False
    return_colbert_vecs: bool = False

    def kinds(self) -> tuple[EmbeddingKind, ...]:
        """The kinds of embeddings that each text gets, by FlagEmbedding's keys."""
        requested = {
            EmbeddingKind.DENSE: self.return_dense,
            EmbeddingKind.SPARSE: self.return_sparse,
            EmbeddingKind.COLBERT: self.return_colbert_vecs,
        }
        return checked_kinds(kind for kind, is_asked in requested.items() if is_asked)


class OpenAIInterface(Interface):
    """OpenAI's API."""

    def __init__(self, model: ServedModel) -> None:
        super().__init__(model)
        self._chunks: ChunkEmbeddings | None = None
        self._hybrids: dict[tuple[EmbeddingKind, ...], HybridEmbeddings] = {}

    @classmethod
    def answers_task(cls, task: TextTask) -> bool:
        return isinstance(task, Embedding)

    def routes(self) -> Sequence[Route]:
        models = [
            Route("/v1/models", None, self._models, is_of_server=True),
            Route("/v1/models/{model:path}", None, self._model),
        ]
        if not self.answers_task(self.model.task):
            return models
        return [*models, Route("/v1/embeddings", EmbeddingsBody, self._embeddings)]

    async def _models(self, request: ServeRequest, body: None) -> object:
        return {"object": "list", "data": [_description(model) for model in request.models]}

    async def _model(self, request: ServeRequest, body: None) -> object:
        return _description(self.model)

    async def _embeddings(self, request: ServeRequest, body: EmbeddingsBody) -> object:
        task = self.model.task
        assert isinstance(task, Embedding), "the route is there for embeddings alone"
        types = EmbeddingTypes(body.encoding_format, body.output_dtype)
        texts = await texts_of_input(request, body.input)
        if (kinds := body.kinds()) != (EmbeddingKind.DENSE,):
            return await self._hybrid_answer(request, texts, body, kinds)
        if body.late_chunking:
            if body.truncate_prompt_tokens is not None:
                raise InputError("late_chunking reads texts in full.", hint="Leave out truncate_prompt_tokens.")
            answers = await self._chunk_answers(request, [text.text for text in texts], body)
            vectors = answers.answers[0].vectors
        else:
            answers = await request.answers(body, texts, prompt_name=body.chosen_prompt_name(task.manifest))
            vectors = np.array(answers.answers)
        vectors = task.truncated(vectors, body.dimensions)
        vectors = normalized(vectors) if body.normalize else vectors
        is_rescaled = body.normalize and not task.normalizes
        rows = await types.rows(vectors, self.model.ranges, is_rescaled=is_rescaled)
        data = [
            {"object": "embedding", "index": index, "embedding": row} | answers.truncation(index)
            for index, row in enumerate(rows)
        ]
        return {"object": "list", "data": data, "model": self.model.name, "usage": answers.usage}

    async def _hybrid_answer(
        self, request: ServeRequest, texts: list[Text], body: EmbeddingsBody, kinds: tuple[EmbeddingKind, ...]
    ) -> object:
        """The response with several kinds of embeddings, or with others than the dense one."""
        dense, types = self.model.task, EmbeddingTypes(body.encoding_format, body.output_dtype)
        if not isinstance(dense, HybridDense):
            raise InputError(
                f"The bundle's task is {dense.manifest.task}, which has dense embeddings alone.",
                hint="Leave out return_dense, return_sparse and return_colbert_vecs.",
            )
        if body.late_chunking or body.dimensions is not None:
            raise InputError(
                "late_chunking and dimensions are of dense embeddings.",
                hint="Leave them out, or leave out return_dense, return_sparse and return_colbert_vecs.",
            )
        if EmbeddingKind.DENSE not in kinds and body.normalize:
            raise InputError("normalize is of dense embeddings.", hint="Leave it out, or leave out return_dense.")
        if kinds == (EmbeddingKind.SPARSE,) and not types.is_float:
            raise InputError(
                "encoding_format and output_dtype are of dense embeddings and of those of tokens.",
                hint="Leave them out: lexical weights are numbers.",
            )
        task = self._hybrids.get(kinds) or self._hybrids.setdefault(kinds, HybridEmbeddings(dense.manifest, kinds))
        if EmbeddingKind.COLBERT in kinds:
            types.check_ranges_are_not_needed("return_colbert_vecs")
            self.model.check_size_of_tokens(request, body, texts, task.token_dimensions, types.value_bytes)
        answers = await request.answers(body, texts, task=task, prompt_name=body.chosen_prompt_name(dense.manifest))
        of_texts: list[HybridEmbedding] = answers.answers
        data: list[dict[str, Any]] = [{"object": "embedding", "index": index} for index in range(len(of_texts))]
        if EmbeddingKind.DENSE in kinds:
            vectors = np.array([each.dense for each in of_texts])
            vectors = normalized(vectors) if body.normalize else vectors
            is_rescaled = body.normalize and not dense.normalizes
            rows = await types.rows(vectors, self.model.ranges, is_rescaled=is_rescaled)
            for each, row in zip(data, rows, strict=True):
                each["embedding"] = row
        if EmbeddingKind.COLBERT in kinds:
            tokens = await types.lists([each.colbert for each in of_texts if each.colbert is not None], None)
            for each, rows in zip(data, tokens, strict=True):
                each["colbert_vecs"] = rows
        if EmbeddingKind.SPARSE in kinds:
            sparse = [each.sparse for each in of_texts if each.sparse is not None]
            weights = await made_beside_the_loop(lambda: list(map(_lexical_weights, sparse)), arrays_of(sparse))
            for each, of_text in zip(data, weights, strict=True):
                each["lexical_weights"] = of_text
        for index, each in enumerate(data):
            each |= answers.truncation(index)
        return {"object": "list", "data": data, "model": self.model.name, "usage": answers.usage}

    async def _chunk_answers(self, request: ServeRequest, chunks: list[str], body: EmbeddingsBody) -> Answers:
        """The answer to the inputs as chunks of one text, which runs in windows unless a long one is rejected."""
        if any(not isinstance(chunk, str) or not chunk for chunk in chunks):
            raise InputError("late_chunking reads texts that are not empty.", hint="Give the chunks of one document.")
        self._chunks = self._chunks or ChunkEmbeddings(self.model.session.manifest, None)
        document, spans = joined_chunks(chunks)
        text = Text(text=document, spans=spans)
        is_rejected = body.says_overflow and body.overflow is Overflow.ERROR
        overflow = Overflow.ERROR if is_rejected else Overflow.SPLIT
        stride = 0 if is_rejected else overlap_of(None, request.tokenizer.max_len)
        prompt_name = body.chosen_prompt_name(self.model.session.manifest)
        return await request.answers(
            body, [text], task=self._chunks, overflow=overflow, stride=stride, prompt_name=prompt_name
        )


INTERFACE = OpenAIInterface


def _lexical_weights(vector: SparseVector) -> msgspec.Raw:
    """The JSON of a sparse vector as FlagEmbedding has it: id of a token -> its weight."""
    weights = dict(zip(vector.indices.tolist(), vector.values.tolist(), strict=True))
    return msgspec.Raw(msgspec.json.encode(weights))


async def texts_of_input(request: ServeRequest, value: object) -> list[Text]:
    """The texts of OpenAI's ``input``: a text, texts, ids, or lists of ids; anything else is rejected."""
    # Ids are checked one by one, and a request may have millions.
    has_many = _count_ids(value) > _MANY_IDS
    return await asyncio.to_thread(_texts_or_ids, request, value) if has_many else _texts_or_ids(request, value)


def _description(model: ServedModel) -> dict[str, object]:
    described = {"id": model.name, "object": "model", "created": 0, "owned_by": "hdexport"}
    return described | {"task": model.session.manifest.task, "max_model_len": model.session.max_seq_length}


def _count_ids(value: object) -> int:
    """An upper bound of the ids of an ``input``."""
    if not isinstance(value, list) or not value or isinstance(value[0], str):
        return 0
    return len(value) + sum(len(item) for item in value if isinstance(item, list))


def _texts_or_ids(request: ServeRequest, value: object) -> list[Text]:
    if isinstance(value, str):
        return [Text(text=value)]
    if isinstance(value, list) and value:
        items: list[Any] = [value] if _is_ids(value) else value
        # First: a body has room for millions. The chunks of one text are counted here, too.
        request.check_number(len(items))
        if all(isinstance(item, str) for item in items):
            return [Text(text=item) for item in items]
        if all(_is_ids(item) for item in items):
            return _texts_of_ids(request, items)
    raise InputError("input is neither a text, nor a list of texts, of ids, or of lists of ids.")


def _texts_of_ids(request: ServeRequest, items: list[list[int]]) -> list[Text]:
    """Texts as ids of the bundle's tokenizer; LangChain's class sends OpenAI's ids unless it is told not to."""
    for number, ids in enumerate(items):
        try:
            request.tokenizer.checked_ids(ids)
        except InputError as error:
            raise InputError(f"input[{number}]: ", *joined(error.problem), hint=_IDS_HINT) from None
    return [Text(input_ids=ids) for ids in items]


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)
