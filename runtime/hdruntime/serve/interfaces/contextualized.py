"""``POST /v1/contextualizedembeddings``: Voyage's and Perplexity's API for chunks of documents, by late chunking."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from hdruntime.errors import InputError
from hdruntime.serve.embedding_types import EmbeddingTypes, EncodingFormat, OutputDtype
from hdruntime.serve.interface import Interface, Route, ServedModel, ServeRequest
from hdruntime.serve.request_body import PromptedBody
from hdruntime.tasks.embedding import ChunkEmbeddings, Embedding
from hdruntime.tasks.task import Text, TextTask
from hdruntime.text.chunking import TextChunks, joined_chunks, overlap_of
from hdruntime.text.encoding import Overflow

_CHUNK_SIZE = 512
"""Tokens of a chunk of a document that the server divides, where a request does not say."""

_SHAPE = 'Send a list of documents, each a list of its chunks: [["first chunk", "second chunk"], ["another document"]].'


class ContextualizedBody(PromptedBody, kw_only=True):
    """``POST /v1/contextualizedembeddings``: `inputs` of Voyage, or `input` of Perplexity."""

    overflow_by_default: ClassVar[Overflow] = Overflow.SPLIT

    inputs: list[str | list[str]] | None = None
    input: list[str | list[str]] | None = None
    dimensions: int | None = None
    encoding_format: EncodingFormat | None = None
    output_dtype: OutputDtype | None = None
    enable_auto_chunking: bool = False
    chunk_size: int | None = None
    chunk_overlap: int = 0

    def types(self) -> EmbeddingTypes:
        """The types of the embeddings; Perplexity's default is int8."""
        default: EncodingFormat = "float" if self.input is None else "base64_int8"
        return EmbeddingTypes(self.encoding_format or default, self.output_dtype)

    def documents(self) -> list[list[str]]:
        """The chunks of each document, or the document as its only chunk; other shapes are rejected."""
        if (self.inputs is None) == (self.input is None):
            raise InputError("The body needs the required field `inputs`, or `input`, and not both.", hint=_SHAPE)
        name, values = ("inputs", self.inputs) if self.input is None else ("input", self.input)
        is_flat = self.input_type in ("query", "search_query") or self.enable_auto_chunking
        documents = []
        for number, chunks in enumerate(values or ()):
            if isinstance(chunks, str):
                if not is_flat:
                    raise InputError(
                        f"{name}[{number}] is a text, and no list of chunks.",
                        hint='Send a list of its chunks, or a text with "input_type": "query" or '
                        '"enable_auto_chunking": true.',
                    )
                chunks = [chunks]
            if not chunks or not all(chunks):
                what = f"{name}[{number}][{chunks.index('')}] is empty" if chunks else f"{name}[{number}] has no chunk"
                raise InputError(f"{what}.", hint="Leave it out.")
            if self.enable_auto_chunking and len(chunks) != 1:
                raise InputError(
                    f"{name}[{number}] has {len(chunks)} chunks, and enable_auto_chunking divides whole documents.",
                    hint="Send one text for each document.",
                )
            documents.append(chunks)
        return documents

    def rule(self) -> str | None:
        """The rule by which the server divides documents; None for the request's own chunks."""
        if not self.enable_auto_chunking:
            if self.chunk_size is not None or self.chunk_overlap:
                raise InputError(
                    "chunk_size and chunk_overlap are of documents that the server divides.",
                    hint='Leave them out, or add "enable_auto_chunking": true.',
                )
            return None
        if self.chunk_overlap:
            raise InputError(parameter="chunk_overlap", value=self.chunk_overlap, accepted="0: chunks do not overlap")
        size = _CHUNK_SIZE if self.chunk_size is None else self.chunk_size
        if size < 1:
            raise InputError(parameter="chunk_size", value=size, accepted="1 token or more")
        return f"tokens:{size}"


class ContextualizedInterface(Interface):
    """The embeddings of a document's chunks, each of which sees the whole document."""

    def __init__(self, model: ServedModel) -> None:
        super().__init__(model)
        self._chunks: ChunkEmbeddings | None = None

    @classmethod
    def answers_task(cls, task: TextTask) -> bool:
        return isinstance(task, Embedding)

    def routes(self) -> Sequence[Route]:
        if not self.answers_task(self.model.task):
            return []
        return [Route("/v1/contextualizedembeddings", ContextualizedBody, self._embed)]

    async def _embed(self, request: ServeRequest, body: ContextualizedBody) -> object:
        task = self.model.task
        assert isinstance(task, Embedding), "the route is there for embeddings alone"
        if body.truncate_prompt_tokens is not None:
            raise InputError("Documents are read in full.", hint="Leave out truncate_prompt_tokens.")
        types, documents, rule = body.types(), body.documents(), body.rule()
        request.check_number(sum(map(len, documents)))
        self._chunks = self._chunks or ChunkEmbeddings(self.model.session.manifest, None, some=True)
        joined = [joined_chunks(chunks) for chunks in documents]
        texts = [Text(text=text, spans=spans if rule is None else rule) for text, spans in joined]
        # Nothing is truncated: long documents run in overlapping windows, unless the request rejects them.
        overflow = Overflow.ERROR if body.overflow is Overflow.ERROR else Overflow.SPLIT
        stride = overlap_of(None, request.tokenizer.max_len) if overflow is Overflow.SPLIT else 0
        prompt_name = body.chosen_prompt_name(task.manifest)
        answers = await request.answers(
            body, texts, task=self._chunks, overflow=overflow, stride=stride, prompt_name=prompt_name
        )
        of_texts: list[TextChunks] = answers.answers
        vectors = [task.truncated(each.vectors, body.dimensions) for each in of_texts]
        rows = await types.lists(vectors, self.model.ranges)
        data = []
        for index, (document, chunks, rows_of_document) in enumerate(zip(texts, of_texts, rows, strict=True)):
            embeddings: list[dict[str, Any]] = [
                {"object": "embedding", "index": number, "embedding": row}
                for number, row in enumerate(rows_of_document)
            ]
            if rule is not None:
                spans = zip(chunks.starts.tolist(), chunks.ends.tolist(), strict=True)
                embeddings = [
                    each | {"text": document.text[start:end]}
                    for each, (start, end) in zip(embeddings, spans, strict=True)
                ]
            data.append({"object": "list", "index": index, "data": embeddings})
        return {"object": "list", "data": data, "model": self.model.name, "usage": answers.usage}


INTERFACE = ContextualizedInterface
