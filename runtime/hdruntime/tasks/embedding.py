"""One vector per text, pooled by the bundle or of its token vectors; the vectors of a text's tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hdruntime.arrays import FloatArray
from hdruntime.bundle.manifest import Manifest
from hdruntime.tasks.task import Outputs, Pairs, Text, TextTask, Values
from hdruntime.text.pooling import SENTENCE_EMBEDDING, Pooling, embedding_output, embedding_size, pooled_text
from hdruntime.text.tokenization import Encoding

if TYPE_CHECKING:
    import pyarrow as pa


class Embedding(TextTask):
    """The vector of a text, float32 [dimensions]; `pooling` is of tokens' vectors, by default their mean."""

    pools_streams = True
    pairs = Pairs.ALLOWED
    prompts = True

    def __init__(self, manifest: Manifest, pooling: Pooling | None = None) -> None:
        self._output = embedding_output(manifest)
        self.outputs = (self._output.name,)
        super().__init__(manifest)
        self._pooling = pooling or Pooling.MEAN
        self.dimensions = embedding_size(manifest)

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


class TokenStates(TextTask):
    """The vectors of a text's tokens, special tokens and prompt included: float32 [tokens, hidden_size]."""

    prompts = True

    def __init__(self, manifest: Manifest) -> None:
        self.outputs = (next(spec.name for spec in manifest.outputs if spec.has_tokens_axis),)
        super().__init__(manifest)

    def answer_of_whole(self, outputs: Outputs, encoding: Encoding, text: Text) -> FloatArray:
        # A copy: a view would hold the batch.
        return outputs[self.outputs[0]].copy()
