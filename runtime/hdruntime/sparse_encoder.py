"""A SPLADE bundle behind the interface of sentence-transformers: texts in, sparse vectors out, the same numbers.

::

    from hdruntime import SparseEncoder

    with SparseEncoder("my-bundle") as encoder:
        queries = encoder.encode_query(["what is read whole?"])  # [texts], each a SparseVector: indices and values
        documents = encoder.encode_document(["long documents", "short ones"])
        scores = encoder.similarity(queries, documents)  # float32 [queries, documents]
        words = encoder.decode(documents[0], top_k=10)  # [("documents", 1.9), ...]

Differences from ``SparseEncoder`` there: results are `SparseVector` unless tensors are asked for, which alone need
PyTorch, and `SparseEncoder.max_seq_length` can be lifted to the bundle's limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hdruntime.arrays import AnyArray
from hdruntime.backends.precision import Precision
from hdruntime.bundle.manifest import Backend
from hdruntime.bundle.reader import Bundle
from hdruntime.bundle_model import TwoSidedModel, also_named
from hdruntime.errors import InputError, Setting
from hdruntime.gpu.options import GpuOptions
from hdruntime.hub import opened_bundle
from hdruntime.optional import require
from hdruntime.tasks.sparse_similarity import (
    SparseVector,
    SparseVectors,
    most_active_dims,
    sparse_vector,
    stacked,
)
from hdruntime.text.checks import checked_texts
from hdruntime.text.lengths import MaxSeqLength
from hdruntime.text.similarity import similarities, similarities_of_pairs

_BLOCK = 256
"""Vectors that are made dense at a time: 31 MB of a vocabulary of 30522."""


class SparseEncoder(TwoSidedModel):
    """A loaded bundle that gives sparse vectors. Safe to call from several threads; also a context manager.

    Args:
        bundle: as :func:`hdruntime.load` has it; its task is sparse-similarity.
        max_active_dims: most values of a vector that are kept, the largest; None for the model's own number, which
            mostly is all.
        max_seq_length: see the property; None for its default.
        backend, threads, precision, device, gpu: as :func:`hdruntime.load` has them.

    Attributes:
        max_active_dims: as above.
        similarity_fn_name: ``dot``, ``cosine``, ``euclidean`` or ``manhattan``; by default the model's own, mostly dot.
        prompts: name -> the text before a text; by default the model's own.
        default_prompt_name: the prompt of texts for which none is asked for; None for no prompt.
        model_card_data: takes the reports of sentence-transformers' evaluators, and keeps nothing of them.

    Raises:
        BundleError: there is no bundle, or it is damaged or of another format.
        BackendError: the backend cannot run here, or not this bundle.
        InputError: the bundle's task is another, it has no tokenizer, or an option does not fit.
    """

    def __init__(
        self,
        bundle: Path | str | Bundle,
        *,
        max_active_dims: int | None = None,
        max_seq_length: int | MaxSeqLength | None = None,
        backend: Backend | str = "auto",
        threads: int | None = None,
        precision: Precision | str = Precision.AUTO,
        device: str | None = None,
        gpu: GpuOptions | None = None,
    ) -> None:
        opened = opened_bundle(bundle, backend, precision)
        manifest = opened.manifest
        if manifest.task != SparseVectors.name:
            raise InputError(
                f"This bundle's task is {manifest.task}, which gives no sparse vectors.",
                hint=(
                    "Build a SPLADE model with ",
                    Setting("task", SparseVectors.name, command="build"),
                    ".",
                ),
            )
        self.max_active_dims = most_active_dims(manifest, max_active_dims)
        self.similarity_fn_name = manifest.sentence.similarity if manifest.sentence else "dot"
        self._dimensions = manifest.vocab_size
        super().__init__(
            opened,
            max_seq_length=max_seq_length,
            backend=backend,
            threads=threads,
            precision=precision,
            device=device,
            gpu=gpu,
        )

    def get_embedding_dimension(self) -> int:
        """Dimensions of a vector with its zeros: the size of the vocabulary."""
        return self._dimensions

    # The name until sentence-transformers 5, which callers still use.
    get_sentence_embedding_dimension = get_embedding_dimension

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
    ) -> Any:
        """One sparse vector per text, with the numbers that sentence-transformers gives.

        Args:
            inputs: one text, or any number of them; an empty string is a text, too.
            prompt_name, prompt, batch_size, show_progress_bar, device, pool, chunk_size: as of
                :meth:`SentenceEncoder.encode`.
            convert_to_tensor: for one PyTorch tensor, [inputs, dimensions] or of one text [dimensions].
            convert_to_sparse_tensor: with ``convert_to_tensor``, False for one with its zeros.
            save_to_cpu: results are in the CPU's memory with any value.
            max_active_dims: most values of a vector that are kept; None for the encoder's own number.

        Returns:
            a `SparseVector` of one text, a list of them of several, in the order given; or a tensor.

        Raises:
            InputError: an input is not a text, the prompt is unknown, or an argument is invalid.
            MissingDependencyError: a tensor is asked for, and PyTorch is not installed.
            NonFiniteOutputError: a vector is NaN or infinite.
            BackendError: the backend failed, or the encoder is closed.
        """
        self._check_call(batch_size, device, pool)
        limit = self.max_active_dims if max_active_dims is None else max_active_dims
        task = SparseVectors(self._session.manifest, limit)
        torch = require("torch") if convert_to_tensor else None
        texts = checked_texts(inputs, name="inputs", may_be_one=True)
        vectors = self._encoded(
            task,
            texts,
            prompt_name=prompt_name,
            prompt=prompt,
            batch_size=batch_size,
            name="inputs",
            shown=show_progress_bar,
        )
        if torch is None:
            return vectors[0] if isinstance(inputs, str) else vectors
        tensor = _tensor(vectors, self._dimensions, torch)
        tensor = tensor if convert_to_sparse_tensor else tensor.to_dense()
        return tensor[0] if isinstance(inputs, str) else tensor

    def similarity(self, embeddings1: object, embeddings2: object) -> Any:
        """The similarity of each vector with each other.

        Args:
            embeddings1: [n] of `SparseVector`, or one; or arrays or tensors [n, dimensions], with their zeros.
            embeddings2: the same, [m].

        Returns:
            float32 [n, m]; a tensor if one was given.
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
        """The similarity of each vector with that at the same place.

        Args:
            embeddings1, embeddings2: [n] each, or one vector each, as of :meth:`similarity`.

        Returns:
            float32 [n], or [] of one vector each; a tensor if one was given.
        """
        return similarities_of_pairs(self.similarity_fn_name, _dense(embeddings1), _dense(embeddings2))

    def decode(self, embeddings: Any, top_k: int | None = None) -> Any:
        """The tokens of a vector with their weights, the largest first.

        Args:
            embeddings: a `SparseVector`, or a list of them.
            top_k: most tokens of a vector; None for all.

        Returns:
            (token as the vocabulary spells it, weight) each; of several vectors a list of such lists.

        Raises:
            InputError: an input is something else, or ``top_k`` is less than 1.
        """
        if top_k is not None and top_k < 1:
            raise InputError(f"top_k is {top_k}; it must be 1 or more, or None for all tokens.")
        if isinstance(embeddings, SparseVector):
            return self._words(embeddings, top_k)
        return [self._words(vector, top_k) for vector in _checked_vectors(embeddings)]

    @staticmethod
    def intersection(embeddings_1: SparseVector, embeddings_2: Any) -> Any:
        """The products of the weights of the tokens that two vectors share, for :meth:`decode`.

        Args:
            embeddings_1: one `SparseVector`.
            embeddings_2: another one, or a list of them.

        Returns:
            a `SparseVector`, or a list of them.

        Raises:
            InputError: an input is something else, or the vectors are of several models.
        """
        if not isinstance(embeddings_1, SparseVector):
            raise InputError(f"embeddings_1 is of type {type(embeddings_1).__name__}; it must be one SparseVector.")
        several = _checked_vectors(_listed(embeddings_2))
        found = [sparse_vector(np.prod(stacked([embeddings_1, each]), axis=0)) for each in several]
        return found[0] if isinstance(embeddings_2, SparseVector) else found

    @staticmethod
    def sparsity(embeddings: Any) -> dict[str, float]:
        """How many values are not 0, on average.

        Args:
            embeddings: a `SparseVector`, or a list of them.

        Returns:
            ``active_dims``, the mean number of values that are not 0, and ``sparsity_ratio``, the part of the values
            that are.

        Raises:
            InputError: an input is something else.
        """
        vectors = _checked_vectors(_listed(embeddings))
        if not vectors:
            return {"active_dims": 0.0, "sparsity_ratio": 1.0}
        active = float(np.mean([len(vector) for vector in vectors]))
        return {"active_dims": active, "sparsity_ratio": 1.0 - active / vectors[0].dimensions}

    def _words(self, vector: SparseVector, top_k: int | None) -> list[tuple[str, float]]:
        best = np.argsort(-vector.values, kind="stable")[:top_k]
        spelled = [str(self.tokenizer.id_to_token(int(token))) for token in vector.indices[best]]
        return list(zip(spelled, vector.values[best].tolist(), strict=True))


def _listed(embeddings: Any) -> Any:
    return [embeddings] if isinstance(embeddings, SparseVector) else embeddings


def _is_sparse(embeddings: Any) -> bool:
    """Whether it is a `SparseVector`, or a list of nothing else."""
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
    """Dense vectors of sparse ones; a vector alone stays alone."""
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
    places = torch.from_numpy(np.stack([rows, columns.astype(np.int64)]))
    options = {"size": (len(vectors), dimensions), "is_coalesced": True, "check_invariants": True}
    return torch.sparse_coo_tensor(places, torch.from_numpy(values), **options)
