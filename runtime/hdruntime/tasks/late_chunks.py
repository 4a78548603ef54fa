"""Late chunking: a text is encoded whole, and each of its chunks has a vector."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hdruntime.bundle.manifest import Manifest
from hdruntime.errors import InputError
from hdruntime.tasks.task import PendingText, Text, TextTask, Values
from hdruntime.text.chunking import SENTENCES, LateChunking, TextChunks, tokens_per_chunk
from hdruntime.text.splitting import SplitEncoding, SplitPooling

if TYPE_CHECKING:
    import pyarrow as pa


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
            raise InputError("The text has no chunk: it has no token, or no chunk is given for it.\nLeave it out.")
        return begun


def column_of_spans(late_chunking: str) -> str | None:
    """The column that an option of late chunking names; None if it is a rule."""
    if not late_chunking:
        raise InputError("--late-chunking is empty.\nType tokens:256, sentences, or the name of a column.")
    is_rule = late_chunking == SENTENCES or tokens_per_chunk(late_chunking) is not None
    return None if is_rule else late_chunking
