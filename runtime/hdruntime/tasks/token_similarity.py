"""Vectors of a text's tokens, for late interaction; queries and documents have different tokens."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from hdruntime.arrays import FloatArray
from hdruntime.bundle.manifest import Manifest, Task
from hdruntime.bundle.reader import Bundle
from hdruntime.bundle.sentence_settings import SentenceSettings
from hdruntime.errors import InputError, Setting
from hdruntime.tasks.task import Encoder, Outputs, TaskOptions, Text, TextTask, Values
from hdruntime.text.embeddings import normalized, truncated
from hdruntime.text.encoding import Encoding, Overflow
from hdruntime.text.lengths import Role
from hdruntime.text.tokenization import TextTokenizer

if TYPE_CHECKING:
    import pyarrow as pa

_OUTPUT = "token_embeddings"


class Side(StrEnum):
    """The kind of a text, by the names of sentence-transformers' ``task``, and of the prompts."""

    QUERY = "query"
    DOCUMENT = "document"


class TextSide:
    """How the texts of one side become tokens with vectors, as in sentence-transformers' ``MultiVectorEncoder``.

    Args:
        settings: settings of a model with a vector for each token.
        side: None for texts that are neither queries nor documents; tokens are left out as of documents.

    Attributes:
        skipped_ids: tokens that have no vectors.
    """

    def __init__(self, settings: SentenceSettings, side: Side | None) -> None:
        own = settings.multi_vector
        assert own is not None, "settings_of checks it"
        self.expansion = own.expansion if side is Side.QUERY else None
        named = Side.DOCUMENT if side is None else side
        self.skipped_ids = own.skipped_ids if named.value in own.skipped_in else ()

    def expanded(self, encoding: Encoding) -> Encoding:
        """A text's tokens with the tokens that are added to a short query."""
        expansion = self.expansion
        missing = 0 if expansion is None else expansion.length - len(encoding)
        if expansion is None or missing <= 0:
            return encoding
        return Encoding(
            np.append(encoding.ids, np.full(missing, expansion.token_id)),
            np.append(encoding.types, np.zeros(missing, np.int64)),
            prompt_tokens=encoding.prompt_tokens,
            unattended_tokens=0 if expansion.attend else missing,
            is_truncated=encoding.is_truncated,
            given_tokens=encoding.given_tokens,
        )


class TokenVectors(TextTask):
    """The vectors of a text's tokens, float32 [vectors, dimensions].

    Args:
        manifest: manifest of a bundle of this task; others are rejected.
        side: ``query`` expands queries; None for texts that are neither queries nor documents.

    Attributes:
        dimensions: dimensions of a vector.
    """

    name = Task.TOKEN_SIMILARITY
    reads_offsets = False
    encoder = Encoder("MultiVectorEncoder", "MultiVectorEncoder", "documents", "encode_document(texts)")
    streams = False
    prompts = True
    role: Role | None = Side.DOCUMENT.value

    def __init__(self, manifest: Manifest, side: Side | None) -> None:
        super().__init__(manifest)
        self._rules = TextSide(settings_of(manifest), side)
        self.role = None if side is None else side.value
        self.dimensions = next(int(spec.shape[-1]) for spec in manifest.outputs if spec.name == _OUTPUT)
        # [vocab_size]: which tokens have vectors.
        self._has_vector = np.ones(manifest.vocab_size, bool)
        self._has_vector[[each for each in self._rules.skipped_ids if each < manifest.vocab_size]] = False
        self.splits = side is not Side.QUERY

    @classmethod
    def of_job(cls, bundle: Bundle, options: TaskOptions) -> TokenVectors:
        side = Side.QUERY if options.prompt_name == Side.QUERY.value else Side.DOCUMENT
        return cls(bundle.manifest, side)

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
        encodings = super().encode(tokenizer, texts, pairs, overflow=overflow, prompt=prompt)
        return [self._rules.expanded(each) for each in encodings]

    def truncated(self, vectors: FloatArray, dimensions: int | None) -> FloatArray:
        """The first `dimensions` of vectors, scaled to length 1 where the bundle's vectors have length 1; None: all."""
        shorter = truncated(vectors, dimensions)
        return normalized(shorter) if dimensions is not None and settings_of(self.manifest).normalize else shorter

    def answer_of_whole(self, outputs: Outputs, encoding: Encoding, text: Text) -> FloatArray:
        return outputs[_OUTPUT][self._has_vector[encoding.input_ids]]


TASK = TokenVectors


def settings_of(manifest: Manifest) -> SentenceSettings:
    """The settings of a bundle that gives a vector for each token; bundles of other tasks are rejected."""
    settings = manifest.sentence
    if manifest.task != TokenVectors.name or settings is None or settings.multi_vector is None:
        raise InputError(
            f"Bundles of token-similarity return vectors of tokens, and this bundle's task is {manifest.task}.",
            hint=(
                "Build it again from a ColBERT, PyLate or MultiVectorEncoder checkpoint with ",
                Setting("task", "token-similarity", command="build"),
                ".",
            ),
        )
    return settings
