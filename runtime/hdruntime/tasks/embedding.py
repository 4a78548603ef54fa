"""Vectors of texts, of their tokens and of their chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hdruntime.arrays import FloatArray
from hdruntime.bundle.manifest import Manifest
from hdruntime.errors import InputError, Setting
from hdruntime.tasks.task import Outputs, Pairs, PendingText, Text, TextTask, Values
from hdruntime.text.chunking import SENTENCES, LateChunking, TextChunks, tokens_per_chunk
from hdruntime.text.embeddings import normalized, truncated
from hdruntime.text.encoding import Encoding
from hdruntime.text.pooling import (
    LAST_HIDDEN_STATE,
    SENTENCE_EMBEDDING,
    PoolingMode,
    embedding_output,
    embedding_size,
    pooled_text,
)
from hdruntime.text.splitting import SplitEncoding, SplitPooling

if TYPE_CHECKING:
    import pyarrow as pa


class ChunkEmbeddings(TextTask):
    """The chunks of a text; each is a row of a job.

    Args:
        manifest: manifest of a bundle whose vectors are the mean of their tokens' states; others are rejected.
        rule: ``tokens:N`` or ``sentences``; None for the spans of each text.
        some: whether a text without a chunk is rejected.
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
                "The text has no chunk: it has no token, or an empty list of chunks.", hint="Leave it out."
            )
        return begun


def column_of_spans(late_chunking: str) -> str | None:
    """The column that an option of late chunking names; None if it is a rule."""
    if not late_chunking:
        raise InputError(
            Setting("late_chunking"), " is empty.", hint="Give tokens:256, sentences, or the name of a column."
        )
    is_rule = late_chunking == SENTENCES or tokens_per_chunk(late_chunking) is not None
    return None if is_rule else late_chunking


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

    @property
    def normalizes(self) -> bool:
        """Whether the bundle's vectors have length 1."""
        own = self.manifest.sentence
        return own is not None and own.normalize and not self._output.has_tokens_axis

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

    def truncated(self, vectors: FloatArray, dimensions: int | None) -> FloatArray:
        """The first `dimensions` of vectors, scaled to length 1 where the bundle's vectors have length 1; None: all."""
        shorter = truncated(vectors, dimensions)
        return normalized(shorter) if dimensions is not None and self.normalizes else shorter


class TokenStates(TextTask):
    """The vectors of a text's tokens, special tokens and prompt included: float32 [tokens, hidden_size]."""

    reads_offsets = False
    prompts = True

    def __init__(self, manifest: Manifest) -> None:
        if not any(spec.name == LAST_HIDDEN_STATE for spec in manifest.outputs):
            raise InputError(
                f"The bundle's task is {manifest.task}, whose graphs do not give the states of tokens.",
                hint=("Build it again with ", Setting("task", "sentence-similarity", command="build"), "."),
            )
        self.outputs = (LAST_HIDDEN_STATE,)
        super().__init__(manifest)

    def answer_of_whole(self, outputs: Outputs, encoding: Encoding, text: Text) -> FloatArray:
        # A copy: a view would hold the batch.
        return outputs[self.outputs[0]].copy()
