"""A bundle behind the interface of sentence-transformers: texts in, vectors out.

::

    from hdruntime import SentenceEncoder

    with SentenceEncoder("my-bundle") as encoder:
        vectors = encoder.encode(sentences, normalize_embeddings=True)  # float32 [sentences, dimensions]
        scores = encoder.similarity(vectors, vectors)  # float32 [sentences, sentences]

What differs from ``SentenceTransformer``: a text may have as many tokens as the bundle serves, unless `max_seq_length`
is set; the result is always a NumPy array; and a model's default prompt is not in the bundle, so it has to be given.
"""

from __future__ import annotations

__all__ = ["SentenceEncoder"]

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from hdruntime.bundle.manifest import Backend
from hdruntime.bundle.reader import Bundle, open_bundle
from hdruntime.errors import InputError
from hdruntime.gpu.options import GpuOptions
from hdruntime.session import load
from hdruntime.text.pooling import Pooling, embedding_output, embedding_size, pooled
from hdruntime.text.tokenization import Encoding, Overflow, TextTokenizer

logger = logging.getLogger(__name__)

_WINDOW_TEXTS = 4096
_WINDOW_CHARACTERS = 2_000_000
"""What is tokenised at a time: half a million tokens are about 100 MB as lists of ids and offsets."""

_SMALLEST_NORM = 1e-12
"""A shorter vector is not brought to length 1; PyTorch's ``normalize`` has the same bound."""

FloatArray = npt.NDArray[np.float32]


class SentenceEncoder:
    """A loaded bundle that encodes texts. Safe to call from several threads; also a context manager.

    Args:
        bundle: its directory, or what :func:`open_bundle` returned.
        pooling: ``mean``, ``cls`` or ``max`` of the token vectors, for a bundle of the task feature-extraction (default
            ``mean``). One of the task sentence-similarity has its model's own pooling, and takes None.
        max_seq_length: see the property.
        backend, threads, gpu: as :func:`hdruntime.load` has them.

    Raises:
        BundleError: there is no bundle, or it is damaged or too new.
        BackendError: the backend cannot run here, or not this bundle.
        InputError: the bundle gives no embeddings, has no tokenizer, or pools by itself; or an option is none of those
            that there are.
    """

    def __init__(
        self,
        bundle: Path | str | Bundle,
        *,
        pooling: Pooling | str | None = None,
        max_seq_length: int | None = None,
        backend: Backend | str = "auto",
        threads: int | None = None,
        gpu: GpuOptions | None = None,
    ) -> None:
        opened = bundle if isinstance(bundle, Bundle) else open_bundle(Path(bundle))
        self._output = embedding_output(opened.manifest)
        self._dimensions = embedding_size(opened.manifest)
        self._pooling = _checked_pooling(pooling, is_needed=self._output.name == "last_hidden_state")
        info = opened.manifest.tokenizer
        if info is None:
            raise InputError(f"The bundle {opened.path} has no tokenizer.\nUse hdruntime.load, and give it input_ids.")
        self._tokenizer_path = opened.file(info.file)
        self._session = load(opened, backend, threads=threads, gpu=gpu)
        self._max_seq_length = self._session.max_len
        self._tokenizer = TextTokenizer(self._tokenizer_path, max_len=self._max_seq_length)
        if max_seq_length is not None:
            try:
                self.max_seq_length = max_seq_length
            except InputError:
                self.close()
                raise

    @property
    def max_seq_length(self) -> int:
        """Tokens that a text is cut to without a word, special tokens included; by default all that the bundle serves.

        sentence-transformers takes the default from the checkpoint, which may be less: 256 for all-MiniLM-L6-v2.

        Raises:
            InputError: when set to more than the bundle serves, or to so few that no token of a text has room.
        """
        return self._max_seq_length

    @max_seq_length.setter
    def max_seq_length(self, tokens: int) -> None:
        (a_word,) = self._tokenizer.encode(["a"], overflow=Overflow.TRUNCATE)
        fewest = 1 + a_word.sequence_ids.count(None)
        most = self._session.max_len
        if not fewest <= tokens <= most:
            advice = f"\nRebuild the bundle with --max-len {tokens}." if tokens > most else ""
            raise InputError(f"max_seq_length is {tokens}; this bundle takes {fewest} to {most} tokens.{advice}")
        self._tokenizer = TextTokenizer(self._tokenizer_path, max_len=tokens)
        self._max_seq_length = tokens

    def get_embedding_dimension(self) -> int:
        """Dimensions of a vector."""
        return self._dimensions

    # The name until sentence-transformers 5, which callers still use.
    get_sentence_embedding_dimension = get_embedding_dimension

    def encode(
        self,
        sentences: str | Iterable[str],
        *,
        prompt: str | None = None,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        normalize_embeddings: bool = False,
        precision: str = "float32",
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
    ) -> FloatArray:
        """One vector a text, the same that sentence-transformers gives.

        Args:
            sentences: one text, or any number of them; an empty string is a text, too.
            prompt: what to put before every text, such as ``"query: "``.
            batch_size: texts that are tokenised and run at a time, for callers that need to save memory. None, the
                default, is as fast or faster: then the number of tokens decides. The answers are the same.
            show_progress_bar: on stderr. None: where this module's logger is at INFO or DEBUG.
            normalize_embeddings: bring each vector to length 1.
            precision: ``float32``; there is no other.
            convert_to_numpy, convert_to_tensor: the result is a NumPy array; asking for another is an error.

        Returns:
            float32 [dimensions] of one text; [sentences, dimensions] of several, in the order given.

        Raises:
            InputError: something that is no text, or an argument that does not fit.
            NonFiniteOutputError: a vector is NaN or infinite.
            BackendError: the backend failed, or the encoder is closed.
        """
        _check_result_type(precision, convert_to_numpy=convert_to_numpy, convert_to_tensor=convert_to_tensor)
        if batch_size is not None and batch_size < 1:
            raise InputError(f"batch_size is {batch_size}; it must be 1 or more.\nLeave it out for what is fastest.")
        texts = _checked_texts(sentences)
        if prompt:
            texts = [prompt + text for text in texts]
        if show_progress_bar is None:
            show_progress_bar = logger.getEffectiveLevel() in (logging.INFO, logging.DEBUG)
        embeddings = np.empty((len(texts), self._dimensions), dtype=np.float32)
        with _progress_bar(len(texts)) if show_progress_bar else contextlib.nullcontext() as bar:
            for rows, values in self._batches(texts, batch_size):
                embeddings[rows] = values
                if bar is not None:
                    bar.advance(bar.task_ids[0], len(rows))
        if normalize_embeddings:
            embeddings = _normalized(embeddings)
        return embeddings[0] if isinstance(sentences, str) else embeddings

    def similarity(self, embeddings1: npt.ArrayLike, embeddings2: npt.ArrayLike) -> FloatArray:
        """The cosine of each vector with each other.

        Args:
            embeddings1: [n, dimensions], or one vector: [dimensions].
            embeddings2: [m, dimensions], or one vector: [dimensions].

        Returns:
            float32 [n, m].
        """
        first, second = (np.atleast_2d(np.asarray(each, np.float32)) for each in (embeddings1, embeddings2))
        return _normalized(first) @ _normalized(second).T

    def close(self) -> None:
        """Free the backend's memory; what is encoded afterwards raises BackendError."""
        self._session.close()

    def __enter__(self) -> SentenceEncoder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _batches(self, texts: list[str], batch_size: int | None) -> Iterator[tuple[list[int], FloatArray]]:
        """Yields indices of texts and their vectors."""
        tokenizer = self._tokenizer  # Another thread may set `max_seq_length`.
        for window in _windows(texts, batch_size or _WINDOW_TEXTS):
            encodings = _encodings(tokenizer, texts, window)
            for result in self._session.run_batches(encodings, outputs=[self._output.name]):
                for row, error in result.errors.items():
                    raise type(error)(f"sentences[{window[row]}]: {error}") from error
                values = result.outputs[self._output.name]
                if self._pooling is not None:
                    values = pooled(values, result.attention_mask, self._pooling)
                yield [window[row] for row in result.rows], values


def _checked_pooling(pooling: Pooling | str | None, *, is_needed: bool) -> Pooling | None:
    if pooling is None:
        return Pooling.MEAN if is_needed else None
    try:
        chosen = Pooling(pooling)
    except ValueError:
        valid = ", ".join(f"'{each.value}'" for each in Pooling)
        raise InputError(f"pooling is {pooling!r}; it must be {valid}, or None for what the bundle has.") from None
    if not is_needed:
        raise InputError(
            f"pooling is {chosen.value!r}, but this bundle pools as its model does.\n"
            "Leave it out, or rebuild the bundle with --task feature-extraction."
        )
    return chosen


def _check_result_type(precision: str, *, convert_to_numpy: bool, convert_to_tensor: bool) -> None:
    if precision != "float32":
        raise InputError(f"precision is {precision!r}; it must be 'float32'.\nQuantise the result.")
    if convert_to_tensor or not convert_to_numpy:
        raise InputError("The result is a NumPy array.\nFor a tensor: torch.from_numpy(encoder.encode(sentences))")


def _checked_texts(sentences: object) -> list[str]:
    if isinstance(sentences, str):
        return [sentences]
    if not isinstance(sentences, Iterable):
        raise InputError(f"sentences is of type {type(sentences).__name__}; it must be a string, or a list of strings.")
    texts = list(sentences)
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise InputError(f"sentences[{index}] is of type {type(text).__name__}; it must be a string.")
    return texts


def _windows(texts: Sequence[str], most_texts: int) -> Iterator[list[int]]:
    """Indices of texts, the longest first, as many at a time as are tokenised together."""
    window: list[int] = []
    characters = 0
    for index in sorted(range(len(texts)), key=lambda index: -len(texts[index])):
        characters += len(texts[index])
        if window and (len(window) == most_texts or characters > _WINDOW_CHARACTERS):
            yield window
            window, characters = [], len(texts[index])
        window.append(index)
    if window:
        yield window


def _encodings(tokenizer: TextTokenizer, texts: Sequence[str], window: Sequence[int]) -> list[Encoding]:
    try:
        return tokenizer.encode([texts[index] for index in window], overflow=Overflow.TRUNCATE)
    except InputError:
        # It counts from the start of the window, which says nothing to the caller.
        for index in window:
            try:
                tokenizer.encode([texts[index]], overflow=Overflow.TRUNCATE)
            except InputError as error:
                raise InputError(f"sentences[{index}]: {error}") from None
        raise


def _normalized(vectors: FloatArray) -> FloatArray:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), np.float32(_SMALLEST_NORM))


def _progress_bar(total: int) -> Any:
    """A bar on stderr, with one task."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress

    bar = Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=Console(stderr=True))
    bar.add_task("Encoding", total=total)
    return bar
