"""A reranker's bundle behind the interface of sentence-transformers: pairs in, scores out, the same numbers by default.

::

    from hdruntime import CrossEncoder

    with CrossEncoder("my-bundle") as encoder:
        scores = encoder.predict([("what is read?", "long documents"), ("who reads?", "nobody")])  # float32 [pairs]
        best = encoder.rank("what is read whole?", ["short texts", "long documents"], top_k=1)

Prompts, the length that pairs are cut to and the activation function are the model's own. Differences from
``CrossEncoder`` there: only activation functions that are given as such need PyTorch, `CrossEncoder.max_seq_length` can
be lifted to the bundle's limit, and documents that are longer can be read in chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hdruntime.arrays import FloatArray
from hdruntime.backends.precision import Precision
from hdruntime.bundle.manifest import Backend
from hdruntime.bundle.reader import Bundle
from hdruntime.bundle_model import BundleModel, also_named, evaluate
from hdruntime.errors import InputError
from hdruntime.gpu.options import GpuOptions
from hdruntime.hub import opened_bundle
from hdruntime.optional import require
from hdruntime.tasks.encode_options import EncodeOptions
from hdruntime.tasks.task import Text
from hdruntime.tasks.text_classification import (
    TextClassification,
    check_classifier,
    check_reranker,
    ranked_documents,
)
from hdruntime.text.checks import checked_choice, plain_name, several
from hdruntime.text.lengths import MaxSeqLength
from hdruntime.text.logits import Activation, activated, softmax
from hdruntime.text.splitting import SplitPooling
from hdruntime.text.tokenization import Overflow

ActivationFunction = Activation | str | Callable[[Any], Any]
"""``sigmoid``, ``softmax``, ``identity``, or a function of tensors [pairs, labels], as ``torch.nn.Sigmoid()``."""


class CrossEncoder(BundleModel):
    """A loaded bundle that scores pairs of texts. Safe to call from several threads; also a context manager.

    Args:
        bundle: as :func:`hdruntime.load` has it; its task is text-classification.
        max_length: see `max_seq_length`; None for its default.
        activation_fn: makes scores of logits: ``sigmoid``, ``softmax``, ``identity``, or a function of PyTorch's
            tensors, as ``torch.nn.Sigmoid()``. None: the model's own, else ``sigmoid`` for one label and ``identity``
            for several.
        backend, threads, precision, device, gpu: as :func:`hdruntime.load` has them.

    Attributes:
        activation_fn: as above.
        prompts: name -> the text before the first text of a pair; by default the model's own.
        default_prompt_name: the prompt of pairs for which none is asked for; None for no prompt.
        num_labels: of the model.
        model_card_data: takes the reports of sentence-transformers' evaluators, and keeps nothing of them.

    Raises:
        BundleError: there is no bundle, or it is damaged or of another format.
        BackendError: the backend cannot run here, or not this bundle.
        InputError: the bundle's task is another, it has no tokenizer, or an option does not fit.
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
        backend: Backend | str = "auto",
        threads: int | None = None,
        precision: Precision | str = Precision.AUTO,
        device: str | None = None,
        gpu: GpuOptions | None = None,
    ) -> None:
        opened = opened_bundle(bundle, backend, precision)
        check_classifier(opened.manifest)
        if activation_fn is not None:
            _checked_function(activation_fn)
        self._task = TextClassification(opened)
        self.num_labels = len(self._task.labels)
        own = opened.manifest.sentence
        by_labels = Activation.SIGMOID if self.num_labels == 1 else Activation.IDENTITY
        default = Activation(own.activation) if own and own.activation else by_labels
        self.activation_fn: ActivationFunction = activation_fn or default
        super().__init__(
            opened,
            max_seq_length=max_length,
            backend=backend,
            threads=threads,
            precision=precision,
            device=device,
            gpu=gpu,
        )

    evaluate = evaluate

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
        """The scores of pairs, the same that sentence-transformers gives.

        Args:
            inputs: one pair of texts, or any number of them.
            prompt_name: which of `prompts` goes before every first text; None for the default.
            prompt: the prompt itself; ``prompt_name`` is then ignored.
            batch_size: most pairs of a batch. None, the default, is as fast or faster: then the number of tokens
                decides. The answers are the same.
            show_progress_bar: on stderr. None: where this module's logger is at INFO or DEBUG.
            activation_fn: as of the class; None for the class' own.
            apply_softmax: of several labels, make scores that sum to 1 of the activation function's results.
            convert_to_numpy: False for a list of PyTorch tensors.
            convert_to_tensor: for one PyTorch tensor, in the CPU's memory.
            device: ``cpu`` or ``cuda``; it has to be where the bundle was loaded.
            pool: None: there are no pools of processes.
            chunk_size: of a pool, without effect.
            overflow: for a pair of more than `max_seq_length` tokens: ``truncate`` cuts the end of the longer text;
                ``split`` cuts the second text into chunks, each of which is read with the whole first text; ``error``
                refuses it.
            stride: tokens that a chunk of a split text repeats from the previous chunk.
            split_pooling: combines the chunks' logits: ``max``, or ``mean``, weighted by tokens.

        Returns:
            of a model of one label a number for one pair, and [pairs] for several; of others [labels] and
            [pairs, labels]; float32.

        Raises:
            InputError: an input is not a pair of texts, the prompt is unknown, or an argument is invalid.
            MissingDependencyError: a tensor is needed, and PyTorch is not installed.
            NonFiniteOutputError: a score is NaN or infinite.
            BackendError: the backend failed, or the encoder is closed.
        """
        pairs, is_one = _pairs_of(inputs)
        self._check_call(batch_size, device, pool)
        from_numpy = require("torch").from_numpy if convert_to_tensor or not convert_to_numpy else None
        encode_options = EncodeOptions.of(
            overflow=overflow, stride=stride, split_pooling=split_pooling, batch_size=batch_size
        )
        prompt = self._prompt(prompt_name, prompt)
        scores = self._scores(
            pairs, encode_options, activation_fn, prompt=prompt, name="inputs", shown=show_progress_bar
        )
        if apply_softmax and scores.ndim > 1 and len(scores):
            scores = softmax(scores)
        result: Any = scores
        if from_numpy is not None:
            result = from_numpy(scores) if convert_to_tensor else list(from_numpy(scores))
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
        """Documents by descending score of each with a query; for models of one label.

        Args:
            query: the first text of each pair.
            documents: the second texts.
            top_k: most documents that are returned; None for all.
            return_documents: whether results have the documents' texts.
            prompt_name, prompt, batch_size, show_progress_bar, activation_fn, device, pool, chunk_size: as of
                :meth:`predict`.
            overflow, stride, split_pooling: likewise.

        Returns:
            for each document a dict with ``corpus_id``, its place in ``documents``, ``score``, and ``text`` if asked
            for.

        Raises:
            InputError: the model has several labels, or as :meth:`predict`.
            MissingDependencyError, NonFiniteOutputError, BackendError: as :meth:`predict`.
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
        found = self._answers(self._task, texts, encode_options, **options)
        if not found:
            return np.empty(0, np.float32)
        logits = np.stack(found)
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
            "function of PyTorch's tensors."
        )
    return function


def _pairs_of(inputs: object) -> tuple[list[tuple[str, str]], bool]:
    """The pairs that were given, and whether it was one alone, not in a list; anything else is refused."""
    given = inputs.tolist() if isinstance(inputs, np.ndarray) else inputs
    found = list(several(given, name="inputs", of="pairs", example="[(query, document)]"))
    is_one = bool(found) and isinstance(found[0], str)
    pairs = [found] if is_one else found
    for place, pair in enumerate(pairs):
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise InputError(f"inputs[{place}] is {pair!r:.60}; it must be a pair of strings: (query, document).")
        for text in pair:
            if not isinstance(text, str):
                raise InputError(f"inputs[{place}] has a text of type {type(text).__name__}; it must be a string.")
    return [tuple(pair) for pair in pairs], is_one
