"""Embeddings of texts, with the interface of sentence-transformers and, by default, its numbers.

::

    from hdruntime import SentenceEncoder

    with SentenceEncoder("my-bundle") as encoder:
        queries = encoder.encode_query(["what is read whole?"])  # float32 [texts, dimensions]
        documents = encoder.encode_document(["long documents", "short ones"])
        scores = encoder.similarity(queries, documents)  # float32 [queries, documents]

Prompts, maximum length, truncation and similarity function are the model's by default. Differences from
``SentenceTransformer``: PyTorch is only needed for tensors, and `SentenceEncoder.max_seq_length` can be raised to the
bundle's maximum.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from hdruntime.arrays import FloatingArray
from hdruntime.bundle.identity import identity_of_bundle
from hdruntime.bundle.reader import Bundle
from hdruntime.bundle_model import EmbeddingModel, EncoderOptions, also_named, conversion, open_for
from hdruntime.errors import InputError, Setting
from hdruntime.tasks.embedding import Embedding, TokenStates
from hdruntime.tasks.encode_options import EncodeOptions
from hdruntime.text.checks import checked_choice, checked_texts, plain_name
from hdruntime.text.embeddings import EmbeddingPrecision, normalized, quantized, truncated
from hdruntime.text.encoding import Overflow
from hdruntime.text.lengths import MaxSeqLength
from hdruntime.text.pooling import PoolingMode, embedding_output
from hdruntime.text.ranges import read_ranges
from hdruntime.text.similarity import similarities, similarities_of_pairs
from hdruntime.text.splitting import SplitPooling


class SentenceEncoder(EmbeddingModel):
    """A loaded bundle that embeds texts, with the interface of ``SentenceTransformer``.

    Args:
        bundle, max_seq_length, load_options: see :class:`hdruntime.bundle_model.BundleModel`, which has further
            attributes and the errors. The option ``precision`` is the backend's precision; :meth:`encode` has a
            parameter of that name for the type of the embeddings.
        pooling: pooling mode of token embeddings, a `PoolingMode` or its value such as ``cls``, for bundles of the task
            feature-extraction; None for ``mean``. Bundles of the task sentence-similarity pool in their graphs and
            accept None only.
        truncate_dim: number of dimensions that are kept; None for the model's number, by default all.

    Attributes:
        truncate_dim: see above.
        similarity_fn_name: ``cosine``, ``dot``, ``euclidean`` or ``manhattan``; by default the model's function.
    """

    def __init__(
        self,
        bundle: Path | str | Bundle,
        *,
        pooling: PoolingMode | str | None = None,
        max_seq_length: int | MaxSeqLength | None = None,
        truncate_dim: int | None = None,
        **load_options: Unpack[EncoderOptions],
    ) -> None:
        opened = open_for(bundle, load_options)
        settings = opened.manifest.sentence
        has_token_embeddings = embedding_output(opened.manifest).name == "last_hidden_state"
        self._task = Embedding(opened.manifest, _checked_pooling(pooling, is_needed=has_token_embeddings))
        self.similarity_fn_name = settings.similarity if settings else "cosine"
        self.truncate_dim = settings.truncate_dim if settings and truncate_dim is None else truncate_dim
        super().__init__(opened, max_seq_length=max_seq_length, **load_options)

    def get_embedding_dimension(self) -> int:
        """Number of dimensions of an embedding."""
        return min(self._task.dimensions, self.truncate_dim or self._task.dimensions)

    # The name until sentence-transformers 5, which callers still use.
    get_sentence_embedding_dimension = get_embedding_dimension

    @also_named(inputs="sentences")
    def encode(
        self,
        sentences: str | Iterable[str],
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        output_value: str = "sentence_embedding",
        precision: EmbeddingPrecision | str | None = "float32",
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        device: object = None,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
        pool: None = None,
        chunk_size: int | None = None,
        ranges: FloatingArray | str | Path | None = None,
        *,
        overflow: Overflow | str = Overflow.TRUNCATE,
        stride: int = 0,
        split_pooling: SplitPooling | str | None = None,
    ) -> Any:
        """Encode texts as embeddings, equal to sentence-transformers'.

        Args:
            sentences: a text, or any number of texts, which may be empty.
            prompt_name: name of the prompt in `prompts`; None for the default.
            prompt: text before every text, such as ``"query: "``; replaces ``prompt_name``.
            batch_size: maximum number of texts per batch, to save memory. None limits the number of tokens instead,
                which is as fast or faster. Results do not depend on it.
            show_progress_bar: show a bar on stderr; None shows it if this module's logger is at INFO or DEBUG.
            output_value: ``sentence_embedding``, or ``token_embeddings`` for the embedding of each token, in float32,
                neither truncated nor normalized.
            precision: ``float32``, ``float16``, ``int8``, ``uint8``, ``binary`` or ``ubinary``; None for ``float32``.
            convert_to_numpy: False returns a list of PyTorch tensors.
            convert_to_tensor: return one PyTorch tensor, in CPU memory.
            device: ``cpu`` or ``cuda``; must be the device of the loaded bundle.
            normalize_embeddings: scale each embedding to length 1.
            truncate_dim: number of dimensions that are kept before normalization; None for the encoder's number.
            pool: must be None: there are no process pools.
            chunk_size: no effect, as it is an option of pools.
            ranges: calibration ranges for ``int8`` and ``uint8``: minimum and maximum of each dimension, [2,
                dimensions], as for sentence-transformers' ``quantize_embeddings``; or a file with them, which is a .npy
                file or an output of ``hdexport run --output-dtype int8``. None takes the ranges of this call's
                embeddings, so that the results of two calls have different scales.
            overflow: handling of texts of more than `max_seq_length` tokens: ``truncate``, as sentence-transformers,
                ``error``, or ``split`` into chunks, whose embeddings are combined.
            stride: number of tokens that consecutive chunks share.
            split_pooling: combines the embeddings of chunks: ``mean``, weighted by tokens, or ``max``; None for
                ``mean``. Embeddings of tokens are those of the chunk in which a token has most context.

        Returns:
            [dimensions] for a single text, [sentences, dimensions] for several, in input order. With
            ``token_embeddings`` [tokens, hidden size] for a single text, and a list of such arrays for several.

        Raises:
            InputError: an input is not a text, the prompt is unknown, an argument is invalid, or, with
                ``overflow="error"``, a text has too many tokens.
            MissingDependencyError: the result is a tensor, and PyTorch is not installed.
            NonFiniteOutputError: an embedding is NaN or infinite.
            BackendError: the backend failed, or the encoder is closed.
        """
        precision = checked_choice(EmbeddingPrecision, precision or "float32", option="precision")
        output_value = plain_name(output_value)
        if output_value not in ("sentence_embedding", "token_embeddings"):
            raise InputError(
                f"output_value is {output_value!r}; it must be 'sentence_embedding' or 'token_embeddings'."
            )
        self._check_call(batch_size, device, pool)
        encode_options = EncodeOptions.of(
            overflow=overflow, stride=stride, split_pooling=split_pooling, batch_size=batch_size
        )
        ranges = self._ranges(ranges, precision, normalize=normalize_embeddings, truncate_dim=truncate_dim)
        of_tokens = output_value == "token_embeddings"
        if of_tokens:
            convert = conversion(to_tensor=convert_to_tensor or not convert_to_numpy, to_numpy=True)
        else:
            convert = conversion(to_tensor=convert_to_tensor, to_numpy=convert_to_numpy)
        texts = checked_texts(sentences, name="sentences", may_be_one=True)
        whole = np.empty((len(texts), self._task.dimensions), np.float32)
        default_dim = self.truncate_dim and self.get_embedding_dimension()
        # A view, and an error before texts are run.
        embeddings = truncated(whole, default_dim if truncate_dim is None else truncate_dim)
        outputs = self._encoded(
            TokenStates(self._session.manifest) if of_tokens else self._task,
            texts,
            prompt_name=prompt_name,
            prompt=prompt,
            encode_options=encode_options,
            name="sentences",
            shown=show_progress_bar,
            into=None if of_tokens else whole,
        )
        if of_tokens:
            result = list(map(convert, outputs))
        else:
            result = convert(
                quantized(normalized(embeddings) if normalize_embeddings else embeddings, precision, ranges)
            )
        return result[0] if isinstance(sentences, str) else result

    def _ranges(
        self,
        ranges: FloatingArray | str | Path | None,
        precision: EmbeddingPrecision,
        *,
        normalize: bool,
        truncate_dim: int | None,
    ) -> FloatingArray | None:
        if ranges is not None and not precision.needs_ranges:
            raise InputError(
                f"ranges are for the precisions int8 and uint8; precision is {precision.value!r}.",
                hint="Leave out ranges, or pass precision='int8'.",
            )
        if not isinstance(ranges, str | Path):
            return ranges
        manifest = self._session.manifest
        settings = manifest.sentence
        is_whole = self.truncate_dim is None and truncate_dim is None
        by_model = settings is not None and settings.normalize and is_whole
        is_normalized = str(normalize or by_model).lower()
        return read_ranges(ranges, bundle=identity_of_bundle(manifest), normalized=is_normalized)

    @contextlib.contextmanager
    def truncate_embeddings(self, truncate_dim: int | None) -> Iterator[None]:
        """Set `truncate_dim` for a ``with`` block; None keeps all dimensions."""
        before, self.truncate_dim = self.truncate_dim, truncate_dim
        try:
            yield
        finally:
            self.truncate_dim = before

    # The name until sentence-transformers 5.
    truncate_sentence_embeddings = truncate_embeddings

    def similarity(self, embeddings1: object, embeddings2: object) -> Any:
        """The similarity of each embedding of the first array with each of the second.

        Args:
            embeddings1: [n, dimensions] or [dimensions]; an array, a PyTorch tensor, or a list of them.
            embeddings2: [m, dimensions] or [dimensions].

        Returns:
            float32 [n, m]; a tensor if an argument is a tensor.
        """
        return similarities(self.similarity_fn_name, embeddings1, embeddings2)

    def similarity_pairwise(self, embeddings1: object, embeddings2: object) -> Any:
        """The similarity of the embeddings with the same index.

        Args:
            embeddings1, embeddings2: [n, dimensions] each, or [dimensions] each.

        Returns:
            float32 [n], or [] for single embeddings; a tensor if an argument is a tensor.
        """
        return similarities_of_pairs(self.similarity_fn_name, embeddings1, embeddings2)

    def _prompt_of(self, side: str) -> str | None:
        # Every model has the prompt `document`, empty by default, as in sentence-transformers; `passage` and `corpus`
        # are for callers who set `prompts` without it.
        names = ("document", "passage", "corpus") if side == "document" else (side,)
        return next((name for name in names if name in self.prompts), None)


def _checked_pooling(pooling: PoolingMode | str | None, *, is_needed: bool) -> PoolingMode | None:
    if pooling is None:
        return PoolingMode.MEAN if is_needed else None
    chosen = checked_choice(PoolingMode, pooling, option="pooling")
    if not is_needed:
        raise InputError(
            f"pooling is {chosen.value!r}, but this bundle pools as its model does.",
            hint=(
                "Leave it out, or build the bundle again with ",
                Setting("task", "feature-extraction", command="build"),
                ".",
            ),
        )
    return chosen
