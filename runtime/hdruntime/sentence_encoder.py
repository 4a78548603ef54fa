"""A bundle behind the interface of sentence-transformers: texts in, vectors out, the same numbers by default.

::

    from hdruntime import SentenceEncoder

    with SentenceEncoder("my-bundle") as encoder:
        queries = encoder.encode_query(["what is read whole?"])  # float32 [texts, dimensions]
        documents = encoder.encode_document(["long documents", "short ones"])
        scores = encoder.similarity(queries, documents)  # float32 [queries, documents]

Prompts, the length that texts are cut to, truncation and similarity are the model's own. Differences from
``SentenceTransformer``: results are NumPy arrays unless tensors are asked for, which alone need PyTorch, and
`SentenceEncoder.max_seq_length` can be lifted to the bundle's limit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hdruntime.arrays import FloatingArray
from hdruntime.backends.precision import Precision
from hdruntime.bundle.identity import identity_of_bundle
from hdruntime.bundle.manifest import Backend
from hdruntime.bundle.reader import Bundle
from hdruntime.bundle_model import TwoSidedModel, also_named, evaluate
from hdruntime.errors import InputError, Setting
from hdruntime.gpu.options import GpuOptions
from hdruntime.hub import opened_bundle
from hdruntime.optional import require
from hdruntime.tasks.embedding import Embedding, TokenStates
from hdruntime.text.checks import checked_choice, checked_texts, plain_name
from hdruntime.text.embeddings import EmbeddingPrecision, normalized, quantized, truncated
from hdruntime.text.lengths import MaxSeqLength
from hdruntime.text.pooling import PoolingMode, embedding_output
from hdruntime.text.ranges import read_ranges
from hdruntime.text.similarity import similarities, similarities_of_pairs


class SentenceEncoder(TwoSidedModel):
    """A loaded bundle that encodes texts. Safe to call from several threads; also a context manager.

    Args:
        bundle: as :func:`hdruntime.load` has it.
        pooling: pooling mode of token vectors, a `PoolingMode` or its name such as ``cls``, for a bundle of the task
            feature-extraction (default ``mean``). A bundle of the task sentence-similarity has its model's pooling, and
            takes None.
        max_seq_length: see the property; None for its default.
        truncate_dim: dimensions of a vector that are kept; None for the model's own number, which mostly is all.
        backend, threads, precision, device, gpu: as :func:`hdruntime.load` has them. The ``precision`` of
            :meth:`encode` is another: the type of the vectors.

    Attributes:
        truncate_dim: as above.
        similarity_fn_name: ``cosine``, ``dot``, ``euclidean`` or ``manhattan``; by default the model's own.
        prompts: name -> the text before a text; by default the model's own.
        default_prompt_name: the prompt of texts for which none is asked for; None for no prompt.
        model_card_data: takes the reports of sentence-transformers' evaluators, and keeps nothing of them.

    Raises:
        BundleError: there is no bundle, or it is damaged or of another format.
        BackendError: the backend cannot run here, or not this bundle.
        InputError: the bundle gives no embeddings, has no tokenizer, or pools by itself; or an option does not fit.
    """

    def __init__(
        self,
        bundle: Path | str | Bundle,
        *,
        pooling: PoolingMode | str | None = None,
        max_seq_length: int | MaxSeqLength | None = None,
        truncate_dim: int | None = None,
        backend: Backend | str = "auto",
        threads: int | None = None,
        precision: Precision | str = Precision.AUTO,
        device: str | None = None,
        gpu: GpuOptions | None = None,
    ) -> None:
        opened = opened_bundle(bundle, backend, precision)
        own = opened.manifest.sentence
        is_pooled_here = embedding_output(opened.manifest).name == "last_hidden_state"
        self._task = Embedding(opened.manifest, _checked_pooling(pooling, is_needed=is_pooled_here))
        self.similarity_fn_name = own.similarity if own else "cosine"
        self.truncate_dim = own.truncate_dim if own and truncate_dim is None else truncate_dim
        super().__init__(
            opened,
            max_seq_length=max_seq_length,
            backend=backend,
            threads=threads,
            precision=precision,
            device=device,
            gpu=gpu,
        )

    evaluate = evaluate

    def get_embedding_dimension(self) -> int:
        """Dimensions of a vector."""
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
    ) -> Any:
        """One vector per text, the same that sentence-transformers gives.

        Args:
            sentences: one text, or any number of them; an empty string is a text, too.
            prompt_name: which of `prompts` goes before every text; None for the default.
            prompt: the text before every text, such as ``"query: "``; ``prompt_name`` is then not looked at.
            batch_size: most texts of a batch, for callers that need to save memory. None, the default, is as fast or
                faster: then the number of tokens decides. The answers are the same.
            show_progress_bar: on stderr. None: where this module's logger is at INFO or DEBUG.
            output_value: ``sentence_embedding``, or ``token_embeddings`` for the vectors of each text's tokens, which
                are float32, and neither truncated nor normalised.
            precision: ``float32``, ``float16``, ``int8``, ``uint8``, ``binary`` or ``ubinary``; None for ``float32``.
            convert_to_numpy: False for a list of PyTorch tensors.
            convert_to_tensor: for one PyTorch tensor, in the CPU's memory.
            device: ``cpu`` or ``cuda``; it has to be where the bundle was loaded.
            normalize_embeddings: bring each vector to length 1.
            truncate_dim: dimensions that are kept, before vectors are normalised; None for the encoder's own number.
            pool: None: there are no pools of processes.
            chunk_size: of a pool, without effect.
            ranges: for ``int8`` and ``uint8``, each dimension's minimum and maximum, [2, dimensions], as
                ``quantize_embeddings`` of sentence-transformers takes them; or a file with them: an output of
                ``hdexport run --output-dtype int8``, or a .npy file. None: the ranges of these texts' vectors, so that
                vectors of two calls have two scales.

        Returns:
            [dimensions] of one text; [sentences, dimensions] of several, in the order given. With ``token_embeddings``
            [tokens, width] of one text, and a list of such arrays of several.

        Raises:
            InputError: an input is not a text, the prompt is unknown, or an argument is invalid.
            MissingDependencyError: a tensor is asked for, and PyTorch is not installed.
            NonFiniteOutputError: a vector is NaN or infinite.
            BackendError: the backend failed, or the encoder is closed.
        """
        precision = checked_choice(EmbeddingPrecision, precision or "float32", option="precision")
        output_value = plain_name(output_value)
        if output_value not in ("sentence_embedding", "token_embeddings"):
            raise InputError(
                f"output_value is {output_value!r}; it must be 'sentence_embedding' or 'token_embeddings'."
            )
        self._check_call(batch_size, device, pool)
        ranges = self._ranges(ranges, precision, normalize=normalize_embeddings, truncate_dim=truncate_dim)
        from_numpy = require("torch").from_numpy if convert_to_tensor or not convert_to_numpy else None
        texts = checked_texts(sentences, name="sentences", may_be_one=True)
        of_tokens = output_value == "token_embeddings"
        whole = np.empty((len(texts), self._task.dimensions), np.float32)
        own = self.truncate_dim and self.get_embedding_dimension()
        # A view, and an error before texts are run.
        embeddings = truncated(whole, own if truncate_dim is None else truncate_dim)
        found = self._encoded(
            TokenStates(self._session.manifest) if of_tokens else self._task,
            texts,
            prompt_name=prompt_name,
            prompt=prompt,
            batch_size=batch_size,
            name="sentences",
            shown=show_progress_bar,
            into=None if of_tokens else whole,
        )
        if of_tokens:
            result: Any = found if from_numpy is None else [from_numpy(each) for each in found]
        else:
            result = quantized(normalized(embeddings) if normalize_embeddings else embeddings, precision, ranges)
            if from_numpy is not None:
                result = from_numpy(result) if convert_to_tensor else list(from_numpy(result))
        return result[0] if isinstance(sentences, str) else result

    def _ranges(
        self,
        given: FloatingArray | str | Path | None,
        precision: EmbeddingPrecision,
        *,
        normalize: bool,
        truncate_dim: int | None,
    ) -> FloatingArray | None:
        if given is not None and not precision.needs_ranges:
            raise InputError(
                f"ranges are for the precisions int8 and uint8, and precision is {precision.value!r}.",
                hint="Leave ranges out, or ask for precision='int8'.",
            )
        if not isinstance(given, str | Path):
            return given
        manifest = self._session.manifest
        own = manifest.sentence
        is_whole = self.truncate_dim is None and truncate_dim is None
        by_model = own is not None and own.normalize and is_whole
        is_normalized = str(normalize or by_model).lower()
        return read_ranges(given, bundle=identity_of_bundle(manifest), normalized=is_normalized)

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
        """The similarity of each vector with each other; see :func:`hdruntime.text.similarity.similarities`.

        Args:
            embeddings1: [n, dimensions], or one vector: [dimensions]; arrays, PyTorch tensors, or lists of them.
            embeddings2: [m, dimensions], or one vector: [dimensions].

        Returns:
            float32 [n, m]; a tensor if one was given.
        """
        return similarities(self.similarity_fn_name, embeddings1, embeddings2)

    def similarity_pairwise(self, embeddings1: object, embeddings2: object) -> Any:
        """The similarity of each vector with that at the same place.

        Args:
            embeddings1, embeddings2: [n, dimensions] each, or one vector each: [dimensions].

        Returns:
            float32 [n], or [] of one vector each; a tensor if one was given.
        """
        return similarities_of_pairs(self.similarity_fn_name, embeddings1, embeddings2)

    def _prompt_of(self, side: str) -> str | None:
        # As in sentence-transformers, every model has `document`, empty unless it says otherwise, so that its prompt
        # `passage` has to be asked for. It is taken where `prompts` was set and lacks that.
        names = ("document", "passage", "corpus") if side == "document" else (side,)
        return next((name for name in names if name in self.prompts), None)


def _checked_pooling(pooling: PoolingMode | str | None, *, is_needed: bool) -> PoolingMode | None:
    if pooling is None:
        return PoolingMode.MEAN if is_needed else None
    try:
        chosen = PoolingMode(plain_name(pooling))
    except ValueError:
        valid = ", ".join(f"'{each.value}'" for each in PoolingMode)
        raise InputError(f"pooling is {pooling!r}; it must be {valid}, or None for the bundle's own.") from None
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
