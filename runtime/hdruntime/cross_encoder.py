"""Scores of text pairs from a reranker, with the interface of sentence-transformers and, by default, its numbers.

::

    from hdruntime import CrossEncoder

    with CrossEncoder("my-bundle") as encoder:
        scores = encoder.predict([("what is read?", "long documents"), ("who reads?", "nobody")])  # float32 [pairs]
        best = encoder.rank("what is read whole?", ["short texts", "long documents"], top_k=1)

Prompts, maximum length and activation function are the model's by default. Differences from
``sentence_transformers.CrossEncoder``: PyTorch is only needed for tensors and for PyTorch's activation functions,
`CrossEncoder.max_seq_length` can be raised to the bundle's maximum, and longer documents can be split into chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from hdruntime.arrays import FloatArray
from hdruntime.bundle.reader import Bundle
from hdruntime.bundle_model import BundleModel, EncoderOptions, also_named, conversion, open_for
from hdruntime.errors import InputError
from hdruntime.optional import require
from hdruntime.tasks.encode_options import EncodeOptions
from hdruntime.tasks.task import Text
from hdruntime.tasks.text_classification import TextClassification, check_classifier, check_reranker, ranked_documents
from hdruntime.text.checks import checked_choice, plain_name, several
from hdruntime.text.encoding import Overflow
from hdruntime.text.lengths import MaxSeqLength
from hdruntime.text.logits import Activation, activated, softmax
from hdruntime.text.splitting import SplitPooling

ActivationFunction = Activation | str | Callable[[Any], Any]
"""``sigmoid``, ``softmax``, ``identity``, or a function of tensors [pairs, labels] such as ``torch.nn.Sigmoid()``."""


class CrossEncoder(BundleModel):
    """A loaded bundle of the task text-classification that scores pairs of texts. A prompt precedes the first text.

    Args:
        bundle, load_options: see :class:`hdruntime.bundle_model.BundleModel`, which has further attributes and the
            errors.
        max_length: see `max_seq_length`; None for its default.
        activation_fn: makes scores of logits: ``sigmoid``, ``softmax``, ``identity``, or a function of PyTorch tensors
            such as ``torch.nn.Sigmoid()``. None for the model's function, or without one ``sigmoid`` for one label and
            ``identity`` for several.

    Attributes:
        activation_fn: see above.
        num_labels: number of the model's labels.
    """

    _length_argument = "max_length"
    _has_pairs = True
    _progress_name = "Scoring"

    def __init__(
        self,
        bundle: Path | str | Bundle,
        *,
        max_length: int | MaxSeqLength | None = None,
        activation_fn: ActivationFunction | None = None,
        **load_options: Unpack[EncoderOptions],
    ) -> None:
        opened = open_for(bundle, load_options)
        check_classifier(opened.manifest)
        if activation_fn is not None:
            _checked_function(activation_fn)
        self._task = TextClassification(opened)
        self.num_labels = len(self._task.labels)
        settings = opened.manifest.sentence
        by_labels = Activation.SIGMOID if self.num_labels == 1 else Activation.IDENTITY
        default = Activation(settings.activation) if settings and settings.activation else by_labels
        self.activation_fn: ActivationFunction = activation_fn or default
        super().__init__(opened, max_seq_length=max_length, **load_options)

    @property
    def max_length(self) -> int:
        """The value of `max_seq_length`, by its name until sentence-transformers 5."""
        return self.max_seq_length

    @max_length.setter
    def max_length(self, tokens: int | MaxSeqLength) -> None:
        self.max_seq_length = tokens

    @also_named(sentences="inputs", activation_fct="activation_fn")
    def predict(
        self,
        inputs: Iterable[Sequence[str]] | Sequence[str],
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        activation_fn: ActivationFunction | None = None,
        apply_softmax: bool | None = False,
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        device: object = None,
        pool: None = None,
        chunk_size: int | None = None,
        *,
        overflow: Overflow | str = Overflow.TRUNCATE,
        stride: int = 0,
        split_pooling: SplitPooling | str = SplitPooling.MAX,
    ) -> Any:
        """Score pairs of texts; scores equal sentence-transformers'.

        Args:
            inputs: a pair of texts, or any number of pairs.
            prompt_name, prompt, batch_size, show_progress_bar: see :meth:`SentenceEncoder.encode`.
            convert_to_numpy, convert_to_tensor, device, pool, chunk_size: see :meth:`SentenceEncoder.encode`.
            activation_fn: see the class; None for the encoder's function.
            apply_softmax: apply a softmax over several labels to the results of the activation function.
            overflow: handling of pairs of more than `max_seq_length` tokens: ``truncate`` truncates the longer text,
                ``split`` splits the second text into chunks, each scored with the whole first text, ``error`` raises.
            stride: number of tokens that consecutive chunks share.
            split_pooling: combines the logits of chunks: ``max``, or ``mean``, weighted by tokens.

        Returns:
            float32; for a model of one label a number for a single pair and [pairs] for several, for other models
            [labels] and [pairs, labels].

        Raises:
            InputError: see :meth:`SentenceEncoder.encode`; also for an input that is not a pair of texts.
        """
        pairs, is_one = _pairs_of(inputs)
        self._check_call(batch_size, device, pool)
        convert = conversion(to_tensor=convert_to_tensor, to_numpy=convert_to_numpy)
        encode_options = EncodeOptions.of(
            overflow=overflow, stride=stride, split_pooling=split_pooling, batch_size=batch_size
        )
        prompt = self._prompt(prompt_name, prompt)
        scores = self._scores(
            pairs, encode_options, activation_fn, prompt=prompt, name="inputs", shown=show_progress_bar
        )
        if apply_softmax and scores.ndim > 1 and len(scores):
            scores = softmax(scores)
        result = convert(scores)
        return result[0] if is_one else result

    @also_named(activation_fct="activation_fn")
    def rank(
        self,
        query: str,
        documents: Iterable[str],
        top_k: int | None = None,
        return_documents: bool = False,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        activation_fn: ActivationFunction | None = None,
        device: object = None,
        pool: None = None,
        chunk_size: int | None = None,
        *,
        overflow: Overflow | str = Overflow.TRUNCATE,
        stride: int = 0,
        split_pooling: SplitPooling | str = SplitPooling.MAX,
    ) -> list[dict[str, int | float | str]]:
        """Rank documents by their score with a query, highest first; for models of one label.

        Args:
            query: first text of each pair.
            documents: second texts.
            top_k: maximum number of results; None for all documents.
            return_documents: whether results have the texts of the documents.
            prompt_name, prompt, batch_size, show_progress_bar, activation_fn, device, pool: see :meth:`predict`.
            chunk_size, overflow, stride, split_pooling: see :meth:`predict`.

        Returns:
            a dict per document: ``corpus_id``, its index in ``documents``, ``score``, and, with
            ``return_documents``, ``text``.

        Raises:
            InputError: see :meth:`predict`; also for a model of several labels.
        """
        check_reranker(self._session.manifest)
        self._check_call(batch_size, device, pool)
        encode_options = EncodeOptions.of(
            overflow=overflow, stride=stride, split_pooling=split_pooling, batch_size=batch_size
        )
        prompt = self._prompt(prompt_name, prompt)
        options = {"prompt": prompt, "name": "documents", "shown": show_progress_bar}
        return ranked_documents(
            query,
            documents,
            tokenizer=self._tokenizer,
            encode_options=encode_options,
            prompt=prompt,
            scores_of=lambda pairs: self._scores(pairs, encode_options, activation_fn, **options),
            top_k=top_k,
            return_documents=return_documents,
        )

    def _texts_and_pairs(self, inputs: object) -> tuple[list[str], list[str] | None]:
        pairs, is_one = _pairs_of(inputs)
        if is_one:
            raise InputError("inputs is one pair; it must be a list of pairs: [(query, document)]")
        return [first for first, _ in pairs], [second for _, second in pairs]

    def _scores(
        self,
        pairs: list[tuple[str, str]],
        encode_options: EncodeOptions,
        activation_fn: ActivationFunction | None,
        **options: Any,
    ) -> FloatArray:
        """float32 [pairs] of one label, else [pairs, labels]; ``options`` are those of `_answers`."""
        function = _checked_function(activation_fn or self.activation_fn)
        texts = [Text(text=first, text_pair=second) for first, second in pairs]
        outputs = self._answers(self._task, texts, encode_options, **options)
        if not outputs:
            return np.empty(0, np.float32)
        logits = np.stack(outputs)
        if isinstance(function, Activation):
            scores = activated(logits, function)
        else:
            scores = function(require("torch").from_numpy(logits)).detach().numpy().astype(np.float32)
        return scores[:, 0] if self.num_labels == 1 and scores.ndim > 1 else scores


def _checked_function(function: ActivationFunction) -> Activation | Callable[[Any], Any]:
    function = plain_name(function)
    if isinstance(function, str):
        return checked_choice(Activation, function, option="activation_fn")
    if not callable(function):
        raise InputError(
            f"activation_fn is of type {type(function).__name__}; it must be 'sigmoid', 'softmax', 'identity', or a "
            "function of PyTorch tensors."
        )
    return function


def _pairs_of(inputs: object) -> tuple[list[tuple[str, str]], bool]:
    """The pairs of the inputs, and whether the inputs are a single pair; rejects other types."""
    inputs = inputs.tolist() if isinstance(inputs, np.ndarray) else inputs
    items = list(several(inputs, name="inputs", of="pairs", example="[(query, document)]"))
    is_one = bool(items) and isinstance(items[0], str)
    pairs = [items] if is_one else items
    for index, pair in enumerate(pairs):
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise InputError(f"inputs[{index}] is {pair!r:.60}; it must be a pair of strings: (query, document).")
        for text in pair:
            if not isinstance(text, str):
                raise InputError(f"inputs[{index}] has a text of type {type(text).__name__}; it must be a string.")
    return [tuple(pair) for pair in pairs], is_one
