"""Late interaction (ColBERT): an embedding per token, with the interface of sentence-transformers.

::

    from hdruntime import MultiVectorEncoder

    with MultiVectorEncoder("my-bundle") as encoder:
        queries = encoder.encode_query(["what is read whole?"])  # [queries], each float32 [query tokens, dimensions]
        documents = encoder.encode_document(["long documents", "short ones"])
        scores = encoder.similarity(queries, documents)  # MaxSim, float32 [queries, documents]

Prompts, lengths, query expansion and skipped tokens are the model's. Differences from
``sentence_transformers.MultiVectorEncoder``: PyTorch is only needed for tensors, and
`MultiVectorEncoder.document_length` can be raised to the bundle's maximum.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Unpack

from hdruntime.arrays import AnyArray
from hdruntime.bundle.reader import Bundle
from hdruntime.bundle_model import EmbeddingModel, EncoderOptions, conversion, open_for
from hdruntime.errors import InputError
from hdruntime.tasks.encode_options import EncodeOptions
from hdruntime.tasks.token_similarity import Side, TokenVectors, settings_of
from hdruntime.text.checks import TRUNCATE, checked_choice, checked_texts
from hdruntime.text.embeddings import normalized
from hdruntime.text.encoding import Overflow
from hdruntime.text.lengths import MaxSeqLength
from hdruntime.text.similarity import maxsim, maxsim_of_pairs
from hdruntime.text.tokenization import TextTokenizer


class MultiVectorEncoder(EmbeddingModel):
    """A loaded bundle of the task token-similarity, which embeds each token.

    Args:
        bundle, max_seq_length, load_options: see :class:`hdruntime.bundle_model.BundleModel`, which has further
            attributes and the errors. `max_seq_length` is for texts that are neither queries nor documents.
        query_length, document_length: see the properties; None for their defaults.

    Attributes:
        similarity_fn_name: ``maxsim``, or ``meanmaxsim`` for MaxSim divided by the number of query embeddings; by
            default the model's function.
    """

    def __init__(
        self,
        bundle: Path | str | Bundle,
        *,
        query_length: int | MaxSeqLength | None = None,
        document_length: int | MaxSeqLength | None = None,
        max_seq_length: int | MaxSeqLength | None = None,
        **load_options: Unpack[EncoderOptions],
    ) -> None:
        opened = open_for(bundle, load_options)
        settings = settings_of(opened.manifest)
        self._tasks = {side: TokenVectors(opened.manifest, side) for side in (Side.QUERY, Side.DOCUMENT, None)}
        assert settings.multi_vector is not None, "settings_of checks it"
        self.similarity_fn_name = settings.multi_vector.similarity
        super().__init__(opened, max_seq_length=max_seq_length, **load_options)
        try:
            self._tokenizers = {
                Side.QUERY: self._tokenizer_of(Side.QUERY, query_length),
                Side.DOCUMENT: self._tokenizer_of(Side.DOCUMENT, document_length),
            }
        except BaseException:
            self.close()
            raise

    @property
    def query_length(self) -> int:
        """Maximum tokens of a query, special tokens and prompt included; longer queries are truncated.

        The default is the model's number, to which short queries are expanded. May be set to a number, or to
        ``"bundle"`` for the bundle's maximum.

        Raises:
            InputError: the number is more than the bundle's maximum, or leaves no room for a token of a text.
        """
        return self._tokenizers[Side.QUERY].max_len

    @query_length.setter
    def query_length(self, tokens: int | MaxSeqLength) -> None:
        self._tokenizers = {**self._tokenizers, Side.QUERY: self._tokenizer_of(Side.QUERY, tokens)}

    @property
    def document_length(self) -> int:
        """Maximum tokens of a document, special tokens and prompt included; the default is that of `max_seq_length`.

        May be set to a number, to ``"model"`` for the model's number, or to ``"bundle"`` for the bundle's maximum.

        Raises:
            InputError: see `query_length`.
        """
        return self._tokenizers[Side.DOCUMENT].max_len

    @document_length.setter
    def document_length(self, tokens: int | MaxSeqLength) -> None:
        self._tokenizers = {**self._tokenizers, Side.DOCUMENT: self._tokenizer_of(Side.DOCUMENT, tokens)}

    def _tokenizer_of(self, side: Side, tokens: int | MaxSeqLength | None) -> TextTokenizer:
        return self._tokenizer_for(tokens, name=f"{side.value}_length", role=side.value)

    def get_embedding_dimension(self) -> int:
        """Number of dimensions of an embedding."""
        return self._tasks[None].dimensions

    def encode(
        self,
        inputs: str | Iterable[str],
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        output_value: str = "token_embeddings",
        convert_to_numpy: bool = True,
        device: object = None,
        normalize_embeddings: bool = False,
        pool: None = None,
        chunk_size: int | None = None,
        token_pooling: None = None,
        task: Side | str | None = None,
        *,
        overflow: Overflow | str = Overflow.TRUNCATE,
        stride: int = 0,
    ) -> Any:
        """Encode texts as one embedding per token, equal to sentence-transformers'.

        Args:
            inputs: a text, or any number of texts, which may be empty.
            prompt_name, prompt, batch_size, show_progress_bar, device, pool, chunk_size: see
                :meth:`SentenceEncoder.encode`.
            output_value: must be ``token_embeddings``.
            convert_to_numpy: False returns PyTorch tensors.
            normalize_embeddings: scale each embedding to length 1, for models that do not.
            token_pooling: must be None.
            task: ``query``, ``document``, or None for texts that are neither.
            overflow, stride: see :meth:`SentenceEncoder.encode`; queries are not split.

        Returns:
            float32 [tokens, dimensions] for a single text, a list of such arrays for several, in input order. Tokens
            that the model skips have no embedding; a text of such tokens has [0, dimensions].

        Raises:
            InputError: see :meth:`SentenceEncoder.encode`.
        """
        side = None if task is None else checked_choice(Side, task, option="task")
        if output_value != "token_embeddings":
            raise InputError(parameter="output_value", value=output_value, accepted="'token_embeddings'")
        self._check_call(batch_size, device, pool)
        if token_pooling is not None:
            raise InputError(
                f"token_pooling is of type {type(token_pooling).__name__}; it must be None.",
                hint="Call the function with the result of encode.",
            )
        encode_options = EncodeOptions.of(overflow=overflow, stride=stride, batch_size=batch_size)
        if encode_options.overflow is Overflow.SPLIT and not self._tasks[side].splits:
            raise InputError("Queries of late interaction are not split.", hint=("Truncate them: ", TRUNCATE, "."))
        convert = conversion(to_tensor=not convert_to_numpy, to_numpy=True)
        texts = checked_texts(inputs, name="inputs", may_be_one=True)
        vectors = self._encoded(
            self._tasks[side],
            texts,
            prompt_name=prompt_name,
            prompt=prompt,
            encode_options=encode_options,
            name="inputs",
            shown=show_progress_bar,
            tokenizer=None if side is None else self._tokenizers[side],
            length=None if side is None else f"{side.value}_length",
        )
        if normalize_embeddings:
            vectors = map(normalized, vectors)
        embeddings = list(map(convert, vectors))
        return embeddings[0] if isinstance(inputs, str) else embeddings

    def preprocess(
        self, inputs: Iterable[Any], prompt: str | None = None, task: Side | str | None = None
    ) -> dict[str, AnyArray]:
        """Tokenize texts, see `SentenceEncoder.preprocess`; queries are expanded.

        Args:
            inputs: any number of texts.
            prompt: text before every text; None for no prompt.
            task: see :meth:`encode`.
        """
        side = None if task is None else checked_choice(Side, task, option="task")
        texts, _ = self._texts_and_pairs(inputs)
        if not texts:
            return {}
        tokenizer = self._tokenizer if side is None else self._tokenizers[side]
        encode = self._tasks[side].encode
        return self._arrays(encode(tokenizer, texts, None, overflow=Overflow.TRUNCATE, prompt=prompt or ""))

    def tokenize(
        self, texts: Iterable[Any], prompt: str | None = None, task: Side | str | None = None
    ) -> dict[str, AnyArray]:
        """Call :meth:`preprocess`."""
        return self.preprocess(texts, prompt, task)

    def similarity(self, embeddings1: object, embeddings2: object) -> Any:
        """MaxSim of each query with each document.

        Args:
            embeddings1: [n] queries, each [query tokens, dimensions], or a single one; arrays or PyTorch tensors.
            embeddings2: [m] documents, each [document tokens, dimensions], or a single one.

        Returns:
            float32 [n, m]; a tensor if an argument is a tensor.
        """
        return maxsim(embeddings1, embeddings2, mean=self._is_mean())

    def similarity_pairwise(self, embeddings1: object, embeddings2: object) -> Any:
        """MaxSim of each query with the document of the same index.

        Args:
            embeddings1, embeddings2: see :meth:`similarity`; equal in number.

        Returns:
            float32 [n]; a tensor if an argument is a tensor.
        """
        return maxsim_of_pairs(embeddings1, embeddings2, mean=self._is_mean())

    def _options_of_side(self, side: str) -> dict[str, Any]:
        return {"task": side}

    def _is_mean(self) -> bool:
        if self.similarity_fn_name not in ("maxsim", "meanmaxsim"):
            name = self.similarity_fn_name
            raise InputError(parameter="similarity_fn_name", value=name, accepted="'maxsim' or 'meanmaxsim'")
        return self.similarity_fn_name == "meanmaxsim"
