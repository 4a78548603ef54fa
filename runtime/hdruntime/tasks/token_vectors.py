"""A list of vectors per text, one for each token that has one, by bundles of token-similarity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hdruntime.arrays import FloatArray
from hdruntime.bundle.manifest import Manifest
from hdruntime.errors import InputError
from hdruntime.tasks.task import Outputs, Text, TextTask, Values
from hdruntime.text.token_vectors import OUTPUT, Side, TextSide, multi_vector_of
from hdruntime.text.tokenization import Encoding, Overflow, TextTokenizer

if TYPE_CHECKING:
    import pyarrow as pa


class TokenVectors(TextTask):
    """The vectors of a text's tokens, float32 [vectors, dimensions].

    Args:
        manifest: of the bundle.
        side: ``query`` expands queries; None for texts that are neither queries nor documents.
        as_far_as_model: whether queries are read as far as the model reads them, and no further.

    Attributes:
        own_length: tokens that the model cuts such texts to.
        dimensions: of a vector.

    Raises:
        InputError: the bundle's task is another.
    """

    outputs = (OUTPUT,)
    streams = False
    prompts = True
    default_prompt_name = Side.DOCUMENT.value
    reads_by_prompt_name = True

    def __init__(self, manifest: Manifest, side: Side | None, *, as_far_as_model: bool = False) -> None:
        super().__init__(manifest)
        self._rules = TextSide(multi_vector_of(manifest), side)
        self.own_length = self._rules.own_length
        self.dimensions = next(int(spec.shape[-1]) for spec in manifest.outputs if spec.name == OUTPUT)
        self._is_limited = as_far_as_model and side is Side.QUERY
        self._cutting: TextTokenizer | None = None
        self.splits = side is not Side.QUERY

    def fields(self) -> tuple[pa.Field, ...]:
        import pyarrow as pa

        return (pa.field("embedding", pa.list_(pa.list_(pa.float32(), self.dimensions))),)

    def values(self, answer: FloatArray) -> Values:
        return {"embedding": answer}

    def encode(
        self,
        tokenizer: TextTokenizer,
        texts: Sequence[str],
        pairs: Sequence[str] | None,
        *,
        overflow: Overflow,
        prompt: str,
    ) -> list[Encoding]:
        most = min(self.own_length, tokenizer.max_len) if self._is_limited else tokenizer.max_len
        if overflow is not Overflow.ERROR and most != tokenizer.max_len:
            # Kept: a tokenizer that cuts takes long to make.
            self._cutting = self._cutting or tokenizer.limited(most)
            tokenizer = self._cutting
        encodings = tokenizer.encode(texts, pairs, overflow=overflow, prompt=prompt)
        longest = max(map(len, encodings))
        if longest > most and overflow is Overflow.ERROR:
            raise InputError(
                f"The query has {longest} tokens, special tokens and prompt included; the model reads {most} of a "
                "query.\nCut it: --overflow truncate"
            )
        return [self._rules.expanded(each) for each in encodings]

    def answer_of_whole(self, outputs: Outputs, encoding: Encoding, text: Text) -> FloatArray:
        return outputs[OUTPUT][self._rules.has_vector(encoding)]
