"""Dense, sparse and token embeddings of a text from one run of the model, as BGE-M3 has them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from hdruntime.arrays import FloatArray
from hdruntime.bundle.manifest import Manifest, Task
from hdruntime.bundle.reader import Bundle
from hdruntime.errors import InputError, Setting
from hdruntime.tasks.embedding import Embedding
from hdruntime.tasks.sparse_similarity import SparseVector
from hdruntime.tasks.task import Encoder, Outputs, TaskOptions, Text, TextTask, Values
from hdruntime.text.checks import checked_choice
from hdruntime.text.embeddings import normalized, truncated
from hdruntime.text.encoding import Encoding
from hdruntime.text.pooling import SENTENCE_EMBEDDING

if TYPE_CHECKING:
    import pyarrow as pa

_WEIGHTS, _TOKENS = "token_weights", "token_embeddings"


class EmbeddingKind(StrEnum):
    """A kind of embeddings; FlagEmbedding's keys are ``return_dense``, ``return_sparse``, ``return_colbert_vecs``."""

    DENSE = "dense"
    SPARSE = "sparse"
    COLBERT = "colbert"


_OUTPUTS = {
    EmbeddingKind.DENSE: SENTENCE_EMBEDDING,
    EmbeddingKind.SPARSE: _WEIGHTS,
    EmbeddingKind.COLBERT: _TOKENS,
}


@dataclass(frozen=True, kw_only=True, eq=False)
class HybridEmbedding:
    """The embeddings of a text; a kind that was not requested is None.

    Attributes:
        dense: float32 [dimensions].
        sparse: the largest weight of each token of the vocabulary that is in the text, without special tokens.
        colbert: float32 [tokens - 1, token dimensions], one for each token but the first.
    """

    dense: FloatArray | None
    sparse: SparseVector | None
    colbert: FloatArray | None


class HybridDense(Embedding):
    """The dense vector of a text, for interfaces that give a text one vector."""

    name = Task.HYBRID_SIMILARITY
    encoder = Encoder("SentenceEncoder", "SentenceTransformer", "texts", "encode(texts)")
    job_options = ("returns",)

    @classmethod
    def of_job(cls, bundle: Bundle, options: TaskOptions) -> TextTask:
        kinds = checked_kinds([EmbeddingKind.DENSE] if options.returns is None else options.returns)
        return cls(bundle.manifest) if kinds == (EmbeddingKind.DENSE,) else HybridEmbeddings(bundle.manifest, kinds)


TASK = HybridDense


class HybridEmbeddings(TextTask):
    """Kinds of embeddings of a text, from one run.

    Args:
        manifest: manifest of a bundle of this task; others are rejected.
        kinds: at least one.
    """

    name = Task.HYBRID_SIMILARITY
    reads_offsets = False
    streams = False
    prompts = True

    def __init__(self, manifest: Manifest, kinds: Iterable[EmbeddingKind]) -> None:
        if manifest.task != self.name or manifest.sentence is None:
            raise InputError(
                f"Bundles of {self.name} give several kinds of embeddings; this bundle's task is {manifest.task}.",
                hint=(
                    "Build BGE-M3, or a model that was made of it, with ",
                    Setting("task", self.name, command="build"),
                ),
            )
        self.kinds = frozenset(kinds)
        self.outputs = tuple(output for kind, output in _OUTPUTS.items() if kind in self.kinds)
        super().__init__(manifest)
        self._sizes = {spec.name: spec.shape[-1] for spec in manifest.outputs}
        self._is_weighted = np.ones(manifest.vocab_size, bool)
        self._is_weighted[[each for each in manifest.sentence.unweighted_ids if each < manifest.vocab_size]] = False

    def fields(self) -> tuple[pa.Field, ...]:
        import pyarrow as pa

        def vector(output: str) -> pa.DataType:
            return pa.list_(pa.float32(), int(self._sizes[output]))

        columns = {
            EmbeddingKind.DENSE: {"embedding": vector(SENTENCE_EMBEDDING)},
            EmbeddingKind.SPARSE: {"indices": pa.list_(pa.int32()), "values": pa.list_(pa.float32())},
            EmbeddingKind.COLBERT: {"token_embeddings": pa.list_(vector(_TOKENS))},
        }
        return tuple(
            pa.schema({name: of for kind in EmbeddingKind if kind in self.kinds for name, of in columns[kind].items()})
        )

    def values(self, answer: HybridEmbedding) -> Values:
        values: Values = {}
        if answer.dense is not None:
            values["embedding"] = answer.dense
        if answer.sparse is not None:
            values |= {"indices": answer.sparse.indices, "values": answer.sparse.values}
        if answer.colbert is not None:
            values["token_embeddings"] = answer.colbert
        return values

    def answer_of_whole(self, outputs: Outputs, encoding: Encoding, text: Text) -> HybridEmbedding:
        has = self.kinds.__contains__
        return HybridEmbedding(
            dense=outputs[SENTENCE_EMBEDDING] if has(EmbeddingKind.DENSE) else None,
            sparse=self.sparse(encoding, outputs) if has(EmbeddingKind.SPARSE) else None,
            colbert=self.tokens(outputs) if has(EmbeddingKind.COLBERT) else None,
        )

    @property
    def token_dimensions(self) -> int:
        return int(self._sizes[_TOKENS])

    def tokens(self, outputs: Outputs) -> FloatArray:
        """The vectors of all tokens but the first, from a text's outputs."""
        # A copy: a view would hold the batch.
        return outputs[_TOKENS][1:].copy()

    def sparse(self, encoding: Encoding, outputs: Outputs) -> SparseVector:
        """The largest weight of each token whose weight is above 0, from a text's outputs."""
        ids, places = np.unique(encoding.input_ids, return_inverse=True)
        largest = np.zeros(len(ids), np.float32)
        np.maximum.at(largest, places, outputs[_WEIGHTS][:, 0])
        kept = (largest > 0) & self._is_weighted[ids]
        return SparseVector(ids[kept].astype(np.int32), largest[kept], self.manifest.vocab_size)


class _OneKind(TextTask):
    """One kind of embedding of a text.

    Args:
        manifest: the bundle's manifest.
        kind: the kind of embedding.
    """

    name = Task.HYBRID_SIMILARITY
    reads_offsets = False
    streams = False
    prompts = True

    def __init__(self, manifest: Manifest, kind: EmbeddingKind) -> None:
        self._all = HybridEmbeddings(manifest, [kind])
        self.outputs = self._all.outputs
        super().__init__(manifest)


class HybridSparse(_OneKind):
    """The sparse vector of a text alone."""

    def __init__(self, manifest: Manifest) -> None:
        super().__init__(manifest, EmbeddingKind.SPARSE)

    def answer_of_whole(self, outputs: Outputs, encoding: Encoding, text: Text) -> SparseVector:
        return self._all.sparse(encoding, outputs)


class HybridTokens(_OneKind):
    """The vectors of a text's tokens alone, float32 [tokens - 1, token dimensions]."""

    def __init__(self, manifest: Manifest) -> None:
        super().__init__(manifest, EmbeddingKind.COLBERT)
        self.dimensions = self._all.token_dimensions

    def truncated(self, vectors: FloatArray, dimensions: int | None) -> FloatArray:
        """The first `dimensions` of vectors, scaled to length 1; None: all."""
        return vectors if dimensions is None else normalized(truncated(vectors, dimensions))

    def answer_of_whole(self, outputs: Outputs, encoding: Encoding, text: Text) -> FloatArray:
        return self._all.tokens(outputs)


def checked_kinds(kinds: Iterable[EmbeddingKind | str]) -> tuple[EmbeddingKind, ...]:
    """The kinds, each once, in the order of `EmbeddingKind`; others, and none, are rejected."""
    named = {checked_choice(EmbeddingKind, kind, option="returns") for kind in kinds}
    if not named:
        raise InputError(Setting("returns"), " names no kind of embeddings.", hint="Name dense, sparse or colbert.")
    return tuple(kind for kind in EmbeddingKind if kind in named)
