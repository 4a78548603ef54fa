"""Vectors of texts, of their tokens and of their chunks."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hdruntime.arrays import FloatArray
from hdruntime.bundle.manifest import Manifest
from hdruntime.errors import InputError
from hdruntime.tasks.requests import Body
from hdruntime.tasks.task import (
    Answered,
    Call,
    Outputs,
    Pairs,
    PendingText,
    Route,
    RowTensor,
    Text,
    TextsBody,
    TextTask,
    Values,
)
from hdruntime.text.chunking import SENTENCES, LateChunking, TextChunks, overlap_of, tokens_per_chunk
from hdruntime.text.embeddings import normalized, truncated
from hdruntime.text.pooling import SENTENCE_EMBEDDING, PoolingMode, embedding_output, embedding_size, pooled_text
from hdruntime.text.splitting import SplitEncoding, SplitPooling
from hdruntime.text.tokenization import Encoding, Overflow

if TYPE_CHECKING:
    import pyarrow as pa


_MANY_IDS = 2**14
"""Ids of a request that are checked beside the event loop: fewer take a millisecond."""


class ChunkEmbeddings(TextTask):
    """The chunks of a text; each is a row of a job.

    Args:
        manifest: of a bundle whose vectors are the mean of their tokens' states; others are refused.
        rule: ``tokens:N`` or ``sentences``; None for the spans of each text.
        some: whether a text without a chunk is refused.
    """

    prompts = True

    def __init__(self, manifest: Manifest, rule: str | None, *, some: bool = False) -> None:
        self._chunking, self._rule, self._some = LateChunking(manifest), rule, some
        self.outputs = (self._chunking.output.name,)
        super().__init__(manifest)

    def fields(self) -> tuple[pa.Field, ...]:
        import pyarrow as pa

        places = pa.schema({"chunk": pa.int32(), "start": pa.int32(), "end": pa.int32()})
        return (*places, pa.field("embedding", pa.list_(pa.float32(), self.manifest.hidden_size)))

    def rows(self, answer: TextChunks) -> list[Values]:
        numbers = zip(answer.starts.tolist(), answer.ends.tolist(), answer.tokens.tolist(), strict=True)
        return [
            {"chunk": chunk, "start": start, "end": end, "embedding": vector, "tokens": tokens}
            for chunk, ((start, end, tokens), vector) in enumerate(zip(numbers, answer.vectors, strict=True))
        ]

    def begin(self, split: SplitEncoding, text: Text, *, prompt: str, pooling: SplitPooling | None) -> PendingText:
        # A row without spans has no chunk; a caller's are checked.
        spans = [] if text.spans is None and self._some else text.spans
        begun = self._chunking.begin(split, text.text, spans if self._rule is None else self._rule, prompt=prompt)
        if self._some and not len(begun):
            raise InputError(
                "The text has no chunk: it has no token, or no chunk is given for it.", hint="Leave it out."
            )
        return begun


def column_of_spans(late_chunking: str) -> str | None:
    """The column that an option of late chunking names; None if it is a rule."""
    if not late_chunking:
        raise InputError("--late-chunking is empty.", hint="Type tokens:256, sentences, or the name of a column.")
    is_rule = late_chunking == SENTENCES or tokens_per_chunk(late_chunking) is not None
    return None if is_rule else late_chunking


class EmbeddingsBody(Body, kw_only=True):
    """``POST /v1/embeddings``."""

    input: Any
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    normalize: bool = False
    prompt_name: str | None = None
    late_chunking: bool = False


class EmbedBody(TextsBody, kw_only=True):
    """``POST /embed`` of text-embeddings-inference."""

    normalize: bool = True
    dimensions: int | None = None


class Embedding(TextTask):
    """The vector of a text, float32 [dimensions]; `pooling` is of tokens' vectors, by default their mean."""

    reads_offsets = False
    pools_streams = True
    pairs = Pairs.ALLOWED
    prompts = True

    def __init__(self, manifest: Manifest, pooling: PoolingMode | None = None) -> None:
        self._output = embedding_output(manifest)
        self.outputs = (self._output.name,)
        super().__init__(manifest)
        self._pooling = pooling or PoolingMode.MEAN
        self.dimensions = embedding_size(manifest)
        self._chunks: ChunkEmbeddings | None = None

    def fields(self) -> tuple[pa.Field, ...]:
        import pyarrow as pa

        width = self._output.shape[-1]
        return (pa.field("embedding", pa.list_(pa.float32(), width if isinstance(width, int) else -1)),)

    def values(self, answer: FloatArray) -> Values:
        return {"embedding": answer}

    def part(self, outputs: Outputs) -> Outputs:
        # The outputs of a streamed document are pooled already.
        if self._output.name not in outputs or not self._output.has_tokens_axis:
            return outputs
        return {SENTENCE_EMBEDDING: pooled_text(outputs[self._output.name], self._pooling)}

    def answer_of_whole(self, outputs: Outputs, encoding: Encoding, text: Text) -> FloatArray:
        return outputs[SENTENCE_EMBEDDING]

    def row_tensor(self) -> RowTensor:
        return RowTensor("embedding", self.dimensions, Pairs.REFUSED)

    def routes(self) -> Sequence[Route]:
        return Route("/v1/embeddings", EmbeddingsBody, self._embeddings), Route("/embed", EmbedBody, self._embed)

    async def _embeddings(self, call: Call, body: EmbeddingsBody) -> object:
        # Ids are checked one by one, and a request may have millions.
        has_many = _ids_in(body.input) > _MANY_IDS
        texts = await asyncio.to_thread(_texts_or_ids, call, body) if has_many else _texts_or_ids(call, body)
        if body.late_chunking:
            if body.truncate_prompt_tokens is not None:
                raise InputError("late_chunking reads whole texts.", hint="Leave out truncate_prompt_tokens.")
            found = await self._chunks_of(call, [text.text for text in texts], body)
            vectors = found.answers[0].vectors
        else:
            found = await call.answered(body, texts, prompt_name=body.prompt_name)
            vectors = np.array(found.answers)
        vectors = self._shortened(vectors, body.dimensions)
        vectors = normalized(vectors) if body.normalize else vectors
        rows: list[Any] = (
            vectors.tolist()
            if body.encoding_format == "float"
            else [base64.b64encode(vector.tobytes()).decode() for vector in vectors.astype("<f4")]
        )
        data = [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)]
        return {"object": "list", "data": data, "model": self.manifest.name, "usage": found.usage}

    async def _embed(self, call: Call, body: EmbedBody) -> object:
        found = await call.answered(body, body.texts(), prompt_name=body.prompt_name)
        vectors = self._shortened(np.array(found.answers), body.dimensions)
        vectors = normalized(vectors) if body.normalize else vectors
        return vectors.tolist()

    async def _chunks_of(self, call: Call, chunks: list[str], body: EmbeddingsBody) -> Answered:
        """The inputs as chunks of one text, with a space between them."""
        if any(not isinstance(chunk, str) or not chunk for chunk in chunks):
            raise InputError("late_chunking reads texts that are not empty: give the chunks of one document.")
        self._chunks = self._chunks or ChunkEmbeddings(self.manifest, None)
        ends = np.cumsum([len(chunk) + 1 for chunk in chunks]).tolist()
        spans = [(end - 1 - len(chunk), end - 1) for chunk, end in zip(chunks, ends, strict=True)]
        text = Text(text=" ".join(chunks), spans=spans)
        stride = overlap_of(None, call.tokenizer.max_len)
        return await call.answered(
            body, [text], task=self._chunks, overflow=Overflow.SPLIT, stride=stride, prompt_name=body.prompt_name
        )

    def _shortened(self, vectors: Any, dimensions: int | None) -> Any:
        """The first `dimensions` of vectors, scaled to length 1 again where the bundle's vectors have it."""
        shorter = truncated(vectors, dimensions)
        own = self.manifest.sentence
        return normalized(shorter) if dimensions is not None and own is not None and own.normalize else shorter


class TokenStates(TextTask):
    """The vectors of a text's tokens, special tokens and prompt included: float32 [tokens, hidden_size]."""

    reads_offsets = False
    prompts = True

    def __init__(self, manifest: Manifest) -> None:
        self.outputs = (next(spec.name for spec in manifest.outputs if spec.has_tokens_axis),)
        super().__init__(manifest)

    def answer_of_whole(self, outputs: Outputs, encoding: Encoding, text: Text) -> FloatArray:
        # A copy: a view would hold the batch.
        return outputs[self.outputs[0]].copy()


def _ids_in(given: object) -> int:
    """Most ids that an ``input`` has."""
    if not isinstance(given, list) or not given or isinstance(given[0], str):
        return 0
    return len(given) + sum(len(each) for each in given if isinstance(each, list))


def _texts_or_ids(call: Call, body: EmbeddingsBody) -> list[Text]:
    """OpenAI's ``input``: a text, texts, ids, or lists of ids."""
    given = body.input
    if isinstance(given, str):
        return [Text(text=given)]
    if isinstance(given, list) and given:
        listed: list[Any] = [given] if _is_ids(given) else given
        # First: a body has room for millions. The chunks of one text are counted here, too.
        call.check_number(len(listed))
        if all(isinstance(each, str) for each in listed):
            return [Text(text=each) for each in listed]
        if all(_is_ids(each) for each in listed):
            return _texts_of_ids(call, body, listed)
    raise InputError("input is neither a text, nor a list of texts, of ids, or of lists of ids. Send one of these.")


def _texts_of_ids(call: Call, body: EmbeddingsBody, listed: list[list[int]]) -> list[Text]:
    """Texts as ids of the bundle's tokenizer; LangChain's class sends OpenAI's unless it is told not to."""
    tokenizer = call.tokenizer
    most = body.most_tokens(tokenizer, is_pair=False) if body.overflow is Overflow.TRUNCATE else None
    texts = []
    for number, ids in enumerate(listed):
        try:
            checked = tokenizer.checked_ids(ids, most=most)
            if len(checked) < len(ids):
                call.truncated.add(number)
            texts.append(Text(input_ids=checked))
        except InputError as error:
            raise InputError(
                f"input[{number}]: {error} Send texts, or that tokenizer's ids with special tokens. LangChain's "
                "OpenAIEmbeddings sends OpenAI's ids, and with check_embedding_ctx_length=False texts."
            ) from None
    return texts


def _is_ids(given: object) -> bool:
    return isinstance(given, list) and bool(given) and all(type(each) is int for each in given)
