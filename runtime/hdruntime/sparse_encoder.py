"""Sparse vectors of texts from a SPLADE bundle, with the interface and the numbers of sentence-transformers.

::

    from hdruntime import SparseEncoder

    with SparseEncoder("my-bundle") as encoder:
        queries = encoder.encode_query(["what is read whole?"])  # [texts], each a SparseVector: indices and values
        documents = encoder.encode_document(["long documents", "short ones"])
        scores = encoder.similarity(queries, documents)  # float32 [queries, documents]
        tokens = encoder.decode(documents[0], top_k=10)  # [("documents", 1.9), ...]

Differences from ``sentence_transformers.SparseEncoder``: results are `SparseVector` by default, PyTorch is only needed
for tensors, and `SparseEncoder.max_seq_length` can be raised to the bundle's maximum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from hdruntime.arrays import AnyArray
from hdruntime.bundle.reader import Bundle
from hdruntime.bundle_model import EmbeddingModel, EncoderOptions, also_named, open_for
from hdruntime.errors import InputError, Setting
from hdruntime.optional import require
from hdruntime.tasks.encode_options import EncodeOptions
from hdruntime.tasks.sparse_similarity import SparseVector, SparseVectors, kept_active_dims, sparse_vector, stacked
from hdruntime.text.checks import checked_texts
from hdruntime.text.encoding import Overflow
from hdruntime.text.lengths import MaxSeqLength
from hdruntime.text.similarity import similarities, similarities_of_pairs

_BLOCK = 256
"""Vectors that are made dense together: 31 MB for a vocabulary of 30522."""


class SparseEncoder(EmbeddingModel):
    """A loaded bundle of the task sparse-similarity, with the interface of sentence-transformers' ``SparseEncoder``.

    Args:
        bundle, max_seq_length, load_options: see :class:`hdruntime.bundle_model.BundleModel`, which has further
            attributes and the errors.
        max_active_dims: number of largest values of a vector that are kept; None for the model's number, by default
            all.

    Attributes:
        max_active_dims: see above.
        similarity_fn_name: ``dot``, ``cosine``, ``euclidean`` or ``manhattan``; by default the model's function.
    """

    def __init__(
        self,
        bundle: Path | str | Bundle,
        *,
        max_active_dims: int | None = None,
        max_seq_length: int | MaxSeqLength | None = None,
        **load_options: Unpack[EncoderOptions],
    ) -> None:
        opened = open_for(bundle, load_options)
        manifest = opened.manifest
        if manifest.task != SparseVectors.name:
            raise InputError(
                f"The bundle's task is {manifest.task}, which has no sparse vectors.",
                hint=("Build a SPLADE model with ", Setting("task", SparseVectors.name, command="build"), "."),
            )
        self.max_active_dims = kept_active_dims(manifest, max_active_dims)
        self.similarity_fn_name = manifest.sentence.similarity if manifest.sentence else "dot"
        self._dimensions = manifest.vocab_size
        super().__init__(opened, max_seq_length=max_seq_length, **load_options)

    def get_embedding_dimension(self) -> int:
        """Number of dimensions: the size of the vocabulary."""
        return self._dimensions

    # The name until sentence-transformers 5, which callers still use.
    get_sentence_embedding_dimension = get_embedding_dimension

    def evaluate(self, evaluator: Callable[..., Any], output_path: str | None = None) -> Any:
        """Raise InputError: evaluators of sentence-transformers need sparse tensors."""
        raise InputError(
            "Evaluators of sentence-transformers need sparse tensors; SparseEncoder.encode returns SparseVector.",
            hint="Convert the vectors: encoder.encode(texts, convert_to_tensor=True)",
        )

    @also_named(sentences="inputs")
    def encode(
        self,
        inputs: str | Iterable[str],
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        convert_to_tensor: bool = False,
        convert_to_sparse_tensor: bool = True,
        save_to_cpu: bool = True,
        device: object = None,
        max_active_dims: int | None = None,
        pool: None = None,
        chunk_size: int | None = None,
        *,
        overflow: Overflow | str = Overflow.TRUNCATE,
        stride: int = 0,
    ) -> Any:
        """Encode texts as sparse vectors, equal to sentence-transformers'.

        Args:
            inputs: a text, or any number of texts, which may be empty.
            prompt_name, prompt, batch_size, show_progress_bar, device, pool, chunk_size: see
                :meth:`SentenceEncoder.encode`.
            convert_to_tensor: return a PyTorch tensor, [inputs, dimensions], or [dimensions] for a single text.
            convert_to_sparse_tensor: with ``convert_to_tensor``, False for a dense tensor.
            save_to_cpu: no effect; results are in CPU memory.
            max_active_dims: number of largest values of a vector that are kept; None for the encoder's number.
            overflow, stride: see :meth:`SentenceEncoder.encode`. A split text has the maximum of each token's weights
                in its chunks, or their sum if the model adds weights.

        Returns:
            a `SparseVector` for a single text, a list of them for several, in input order; or a tensor.

        Raises:
            InputError: see :meth:`SentenceEncoder.encode`.
        """
        self._check_call(batch_size, device, pool)
        encode_options = EncodeOptions.of(overflow=overflow, stride=stride, batch_size=batch_size)
        limit = self.max_active_dims if max_active_dims is None else max_active_dims
        task = SparseVectors(self._session.manifest, limit)
        torch = require("torch") if convert_to_tensor else None
        texts = checked_texts(inputs, name="inputs", may_be_one=True)
        vectors = self._encoded(
            task,
            texts,
            prompt_name=prompt_name,
            prompt=prompt,
            encode_options=encode_options,
            name="inputs",
            shown=show_progress_bar,
        )
        if torch is None:
            return vectors[0] if isinstance(inputs, str) else vectors
        tensor = _tensor(vectors, self._dimensions, torch)
        tensor = tensor if convert_to_sparse_tensor else tensor.to_dense()
        return tensor[0] if isinstance(inputs, str) else tensor

    def similarity(self, embeddings1: object, embeddings2: object) -> Any:
        """The similarity of each vector of the first list with each vector of the second.

        Args:
            embeddings1: [n] `SparseVector`, or a single one; or dense arrays or tensors [n, dimensions].
            embeddings2: [m] vectors of such types.

        Returns:
            float32 [n, m]; a tensor if an argument is a tensor.
        """
        if not (_is_sparse(embeddings1) and _is_sparse(embeddings2)):
            return similarities(self.similarity_fn_name, _dense(embeddings1), _dense(embeddings2))
        first, second = _listed(embeddings1), _listed(embeddings2)
        scores = np.empty((len(first), len(second)), np.float32)
        for rows in _blocks(len(first)):
            dense = stacked(first[rows])
            for columns in _blocks(len(second)):
                scores[rows, columns] = similarities(self.similarity_fn_name, dense, stacked(second[columns]))
        return scores

    def similarity_pairwise(self, embeddings1: object, embeddings2: object) -> Any:
        """The similarity of the vectors with the same index.

        Args:
            embeddings1, embeddings2: [n] vectors each, or a single one each; see :meth:`similarity`.

        Returns:
            float32 [n], or [] for single vectors; a tensor if an argument is a tensor.
        """
        return similarities_of_pairs(self.similarity_fn_name, _dense(embeddings1), _dense(embeddings2))

    def decode(self, embeddings: Any, top_k: int | None = None) -> Any:
        """The tokens of a vector and their weights, by descending weight.

        Args:
            embeddings: a `SparseVector`, or a list of them.
            top_k: maximum number of tokens per vector; None for all.

        Returns:
            list of (token, weight); for several vectors a list of such lists.

        Raises:
            InputError: ``embeddings`` has another type, or ``top_k`` is less than 1.
        """
        if top_k is not None and top_k < 1:
            raise InputError(parameter="top_k", value=top_k, accepted="1 or more, or None for all tokens")
        if isinstance(embeddings, SparseVector):
            return self._weighted_tokens(embeddings, top_k)
        return [self._weighted_tokens(vector, top_k) for vector in _checked_vectors(embeddings)]

    @staticmethod
    def intersection(embeddings_1: SparseVector, embeddings_2: Any) -> Any:
        """The elementwise product of two vectors: weights of their common tokens, for :meth:`decode`.

        Args:
            embeddings_1: a `SparseVector`.
            embeddings_2: a `SparseVector`, or a list of them.

        Returns:
            a `SparseVector`, or a list of them.

        Raises:
            InputError: an argument has another type, or the vectors have different dimensions.
        """
        if not isinstance(embeddings_1, SparseVector):
            raise InputError(f"embeddings_1 is of type {type(embeddings_1).__name__}; it must be one SparseVector.")
        others = _checked_vectors(_listed(embeddings_2))
        products = [sparse_vector(np.prod(stacked([embeddings_1, other]), axis=0)) for other in others]
        return products[0] if isinstance(embeddings_2, SparseVector) else products

    @staticmethod
    def sparsity(embeddings: Any) -> dict[str, float]:
        """The mean number of nonzero values per vector, and the mean ratio of zeros.

        Args:
            embeddings: a `SparseVector`, or a list of them.

        Returns:
            ``active_dims``, nonzero values per vector, and ``sparsity_ratio``, zeros per dimension.

        Raises:
            InputError: ``embeddings`` has another type.
        """
        vectors = _checked_vectors(_listed(embeddings))
        if not vectors:
            return {"active_dims": 0.0, "sparsity_ratio": 1.0}
        active = float(np.mean([len(vector) for vector in vectors]))
        return {"active_dims": active, "sparsity_ratio": 1.0 - active / vectors[0].dimensions}

    def _weighted_tokens(self, vector: SparseVector, top_k: int | None) -> list[tuple[str, float]]:
        largest = np.argsort(-vector.values, kind="stable")[:top_k]
        tokens = [str(self.tokenizer.id_to_token(int(token))) for token in vector.indices[largest]]
        return list(zip(tokens, vector.values[largest].tolist(), strict=True))


def _listed(embeddings: Any) -> Any:
    return [embeddings] if isinstance(embeddings, SparseVector) else embeddings


def _is_sparse(embeddings: Any) -> bool:
    """Whether the argument is a `SparseVector` or a list of them."""
    return isinstance(embeddings, SparseVector) or (
        isinstance(embeddings, Sequence) and all(isinstance(vector, SparseVector) for vector in embeddings)
    )


def _checked_vectors(embeddings: Any) -> list[SparseVector]:
    if not _is_sparse(embeddings):
        raise InputError(
            f"embeddings is of type {type(embeddings).__name__}; it must be a SparseVector or a list of them, as "
            "SparseEncoder.encode gives them."
        )
    return list(embeddings)


def _dense(embeddings: Any) -> Any:
    """Sparse vectors as a dense array, [vectors, dimensions] or [dimensions]."""
    if not _is_sparse(embeddings):
        return embeddings
    return embeddings.dense() if isinstance(embeddings, SparseVector) else stacked(embeddings)


def _blocks(count: int) -> Iterator[slice]:
    return (slice(first, first + _BLOCK) for first in range(0, count, _BLOCK))


def _tensor(vectors: Sequence[SparseVector], dimensions: int, torch: Any) -> Any:
    """A sparse COO tensor [vectors, dimensions]."""
    rows = np.repeat(np.arange(len(vectors)), [len(vector) for vector in vectors])
    columns: AnyArray = np.concatenate([np.empty(0, np.int32), *(vector.indices for vector in vectors)])
    values: AnyArray = np.concatenate([np.empty(0, np.float32), *(vector.values for vector in vectors)])
    indices = torch.from_numpy(np.stack([rows, columns.astype(np.int64)]))
    options = {"size": (len(vectors), dimensions), "is_coalesced": True, "check_invariants": True}
    return torch.sparse_coo_tensor(indices, torch.from_numpy(values), **options)
