"""A bundle of late interaction behind the interface of sentence-transformers: texts in, a vector for each token out.

::

    from hdruntime import MultiVectorEncoder

    with MultiVectorEncoder("my-bundle") as encoder:
        queries = encoder.encode_query(["what is read whole?"])  # [queries], each float32 [query tokens, dimensions]
        documents = encoder.encode_document(["long documents", "short ones"])
        scores = encoder.similarity(queries, documents)  # MaxSim, float32 [queries, documents]

Prompts, lengths, the expansion of queries and the tokens that are left out are the model's own. Differences from
``MultiVectorEncoder`` there: results are NumPy arrays unless tensors are asked for, which alone need PyTorch, and
`MultiVectorEncoder.document_length` can be lifted to the bundle's limit.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hdruntime.arrays import AnyArray
from hdruntime.backends.precision import Precision
from hdruntime.bundle.manifest import Backend
from hdruntime.bundle.reader import Bundle
from hdruntime.bundle_model import TwoSidedModel, evaluate
from hdruntime.errors import InputError
from hdruntime.gpu.options import GpuOptions
from hdruntime.hub import opened_bundle
from hdruntime.optional import require
from hdruntime.tasks.token_similarity import Side, TokenVectors, settings_of
from hdruntime.text.checks import checked_choice, checked_texts
from hdruntime.text.embeddings import normalized
from hdruntime.text.lengths import MaxSeqLength
from hdruntime.text.similarity import maxsim, maxsim_of_pairs
from hdruntime.text.tokenization import Overflow, TextTokenizer


class MultiVectorEncoder(TwoSidedModel):
    """A loaded bundle that gives a vector for each token. Safe to call from several threads; also a context manager.

    Args:
        bundle: as :func:`hdruntime.load` has it; its task is token-similarity.
        query_length, document_length: see the properties; None for their defaults.
        max_seq_length: the same for texts that are neither; None for its default.
        backend, threads, precision, device, gpu: as :func:`hdruntime.load` has them.

    Attributes:
        similarity_fn_name: ``maxsim``, or ``meanmaxsim`` for MaxSim divided by the vectors of the query; by default the
            model's own.
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
        query_length: int | MaxSeqLength | None = None,
        document_length: int | MaxSeqLength | None = None,
        max_seq_length: int | MaxSeqLength | None = None,
        backend: Backend | str = "auto",
        threads: int | None = None,
        precision: Precision | str = Precision.AUTO,
        device: str | None = None,
        gpu: GpuOptions | None = None,
    ) -> None:
        opened = opened_bundle(bundle, backend, precision)
        settings = settings_of(opened.manifest)
        self._tasks = {side: TokenVectors(opened.manifest, side) for side in (Side.QUERY, Side.DOCUMENT, None)}
        assert settings.multi_vector is not None, "settings_of checks it"
        self.similarity_fn_name = settings.multi_vector.similarity
        super().__init__(
            opened,
            max_seq_length=max_seq_length,
            backend=backend,
            threads=threads,
            precision=precision,
            device=device,
            gpu=gpu,
        )
        try:
            self._tokenizers = {
                Side.QUERY: self._tokenizer_of(Side.QUERY, query_length),
                Side.DOCUMENT: self._tokenizer_of(Side.DOCUMENT, document_length),
            }
        except BaseException:
            self.close()
            raise

    evaluate = evaluate

    @property
    def query_length(self) -> int:
        """Tokens that a query is cut to, special tokens and prompt included; by default the model's own number.

        Set it to another number, or to ``"bundle"`` for all that the bundle serves. Short queries are expanded to the
        model's own number.

        Raises:
            InputError: when set to more than the bundle serves, or to so few that no token of a text has room.
        """
        return self._tokenizers[Side.QUERY].max_len

    @query_length.setter
    def query_length(self, tokens: int | MaxSeqLength) -> None:
        self._tokenizers = {**self._tokenizers, Side.QUERY: self._tokenizer_of(Side.QUERY, tokens)}

    @property
    def document_length(self) -> int:
        """Tokens that a document is cut to, special tokens and prompt included; by default as of `max_seq_length`.

        Set it to another number, to ``"model"`` for the model's own, or to ``"bundle"`` for all that the bundle serves.

        Raises:
            InputError: as of `query_length`.
        """
        return self._tokenizers[Side.DOCUMENT].max_len

    @document_length.setter
    def document_length(self, tokens: int | MaxSeqLength) -> None:
        self._tokenizers = {**self._tokenizers, Side.DOCUMENT: self._tokenizer_of(Side.DOCUMENT, tokens)}

    def _tokenizer_of(self, side: Side, tokens: int | MaxSeqLength | None) -> TextTokenizer:
        return self._tokenizer_for(tokens, name=f"{side.value}_length", role=side.value)

    def get_embedding_dimension(self) -> int:
        """Dimensions of a vector."""
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
    ) -> Any:
        """The vectors of each text's tokens, the same that sentence-transformers gives.

        Args:
            inputs: one text, or any number of them; an empty string is a text, too.
            prompt_name, prompt, batch_size, show_progress_bar, device, pool, chunk_size: as of
                :meth:`SentenceEncoder.encode`.
            output_value: ``token_embeddings``.
            convert_to_numpy: False for PyTorch tensors.
            normalize_embeddings: bring each vector to length 1, for models that do not.
            token_pooling: None: vectors are not pooled.
            task: ``query``, ``document``, or None for texts that are neither.

        Returns:
            float32 [tokens, dimensions] of one text, a list of such arrays of several, in the order given. Tokens that
            the model leaves out have none, so that a text of those alone has [0, dimensions].

        Raises:
            InputError: an input is not a text, the prompt is unknown, or an argument is invalid.
            MissingDependencyError: a tensor is asked for, and PyTorch is not installed.
            NonFiniteOutputError: a vector is NaN or infinite.
            BackendError: the backend failed, or the encoder is closed.
        """
        side = None if task is None else checked_choice(Side, task, option="task")
        if output_value != "token_embeddings":
            raise InputError(f"output_value is {output_value!r}; it must be 'token_embeddings'.")
        self._check_call(batch_size, device, pool)
        if token_pooling is not None:
            raise InputError(
                f"token_pooling is of type {type(token_pooling).__name__}; it must be None.",
                hint="Bundles pool no tokens: call it with what encode returns.",
            )
        from_numpy = None if convert_to_numpy else require("torch").from_numpy
        texts = checked_texts(inputs, name="inputs", may_be_one=True)
        vectors = self._encoded(
            self._tasks[side],
            texts,
            prompt_name=prompt_name,
            prompt=prompt,
            batch_size=batch_size,
            name="inputs",
            shown=show_progress_bar,
            tokenizer=None if side is None else self._tokenizers[side],
            length=None if side is None else f"{side.value}_length",
        )
        if normalize_embeddings:
            vectors = [normalized(each) for each in vectors]
        found: list[Any] = vectors if from_numpy is None else [from_numpy(each) for each in vectors]
        return found[0] if isinstance(inputs, str) else found

    def preprocess(
        self, inputs: Iterable[Any], prompt: str | None = None, task: Side | str | None = None
    ) -> dict[str, AnyArray]:
        """The tokens of texts, as graphs take them: ``session(**tokens)``.

        Args:
            inputs: any number of texts.
            prompt: the text before every text; None for none.
            task: as of :meth:`encode`; queries are expanded.

        Returns:
            as `SentenceEncoder.preprocess`.

        Raises:
            InputError: an input is not a text.
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
        """As :meth:`preprocess`."""
        return self.preprocess(texts, prompt, task)

    def similarity(self, embeddings1: object, embeddings2: object) -> Any:
        """MaxSim of each query with each document; see :func:`hdruntime.text.similarity.maxsim`.

        Args:
            embeddings1: of queries, [n], each [query tokens, dimensions], or of one query; arrays or PyTorch tensors.
            embeddings2: of documents, [m], each [document tokens, dimensions], or of one document.

        Returns:
            float32 [n, m]; a tensor if one was given.
        """
        return maxsim(embeddings1, embeddings2, mean=self._is_mean())

    def similarity_pairwise(self, embeddings1: object, embeddings2: object) -> Any:
        """MaxSim of each query with the document at the same place.

        Args:
            embeddings1, embeddings2: as of :meth:`similarity`, as many of one as of the other.

        Returns:
            float32 [n]; a tensor if one was given.
        """
        return maxsim_of_pairs(embeddings1, embeddings2, mean=self._is_mean())

    def _options_of_side(self, side: str) -> dict[str, Any]:
        return {"task": side}

    def _is_mean(self) -> bool:
        if self.similarity_fn_name not in ("maxsim", "meanmaxsim"):
            raise InputError(f"similarity_fn_name is {self.similarity_fn_name!r}; it must be 'maxsim' or 'meanmaxsim'.")
        return self.similarity_fn_name == "meanmaxsim"
