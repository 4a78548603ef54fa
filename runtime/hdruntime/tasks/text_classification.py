"""The classes of texts, or the scores of pairs; documents ranked by a query's scores with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hdruntime.arrays import FloatArray
from hdruntime.bundle.manifest import Manifest, Task
from hdruntime.bundle.reader import Bundle, read_config
from hdruntime.errors import InputError, Setting
from hdruntime.tasks.encode_options import EncodeOptions
from hdruntime.tasks.task import Encoder, Outputs, Pairs, TaskOptions, Text, TextTask, Values
from hdruntime.text.checks import checked_texts
from hdruntime.text.encoding import Encoding, Overflow
from hdruntime.text.logits import Activation, activated, labels_of, shortest
from hdruntime.text.splitting import SplitPooling
from hdruntime.text.tokenization import TextTokenizer

if TYPE_CHECKING:
    import pyarrow as pa


class Classification(NamedTuple):
    """The best class of a text, and the score of every class in the order of the labels."""

    label: str
    score: float
    scores: dict[str, float]


class TextClassification(TextTask):
    """The logits of a text or a pair, float32 [labels]; a job writes their class and scores.

    Attributes:
        labels: names of the classes.
        activation: how scores come from logits.
    """

    name = Task.TEXT_CLASSIFICATION
    reads_offsets = False
    encoder = Encoder("CrossEncoder", "CrossEncoder", "pairs", 'predict([("query", "document")])')
    prompts = True
    columns = ("query", "document")

    def __init__(self, bundle: Bundle) -> None:
        super().__init__(bundle.manifest)
        self.labels, self.activation = labels_of(bundle.manifest), _activation_of(bundle)
        self.pairs = Pairs.ALLOWED if bundle.manifest.sentence is None else Pairs.REQUIRED
        self.pair_pooling = SplitPooling.MAX if len(self.labels) == 1 else SplitPooling.MEAN

    @classmethod
    def encoder_of(cls, manifest: Manifest) -> Encoder | None:
        return None if manifest.sentence is None else cls.encoder

    @classmethod
    def of_job(cls, bundle: Bundle, options: TaskOptions) -> TextClassification:
        return cls(bundle)

    def fields(self) -> tuple[pa.Field, ...]:
        import pyarrow as pa

        scores = pa.struct([(label, pa.float32()) for label in self.labels])
        return tuple(pa.schema({"label": pa.string(), "score": pa.float32(), "scores": scores}))

    def values(self, answer: FloatArray) -> Values:
        return classification(answer, self.labels, activation=self.activation)._asdict()

    def answer_of_whole(self, outputs: Outputs, encoding: Encoding, text: Text) -> FloatArray:
        return outputs["logits"]

    def scores(self, logits: Sequence[FloatArray]) -> FloatArray:
        """The scores of pairs, float32 [pairs], by a model of one label."""
        return activated(_columns(logits), self.activation)[:, 0]


TASK = TextClassification


def classification(
    logits: FloatArray, labels: Sequence[str], *, activation: Activation = Activation.SOFTMAX
) -> Classification:
    """The class of a text with logits float32 [labels]; the activation decides the scores, never the label."""
    scores = [shortest(score) for score in activated(logits, activation)]
    best = int(logits.argmax())
    return Classification(label=labels[best], score=scores[best], scores=dict(zip(labels, scores, strict=True)))


def ranked_documents(
    query: str,
    documents: object,
    *,
    tokenizer: TextTokenizer,
    encode_options: EncodeOptions,
    prompt: str,
    scores_of: Callable[[list[tuple[str, str]]], FloatArray],
    top_k: int | None,
    return_documents: bool,
) -> list[dict[str, int | float | str]]:
    """Documents by descending scores, as sentence-transformers' CrossEncoder lists them.

    Each has ``corpus_id``, its place in `documents`, ``score``, and ``text`` if asked for; of one score they are in
    their order. `scores_of` pairs are float32 [pairs]; a `top_k` of None lists all documents.
    """
    _check_query(query, tokenizer, encode_options, prompt=prompt)
    texts = checked_texts(documents, name="documents")
    scores = scores_of([(query, document) for document in texts])
    if top_k is not None and top_k < 0:
        raise InputError(parameter="top_k", value=top_k, accepted="0 or more, or None for all documents")
    ranked: list[dict[str, int | float | str]] = []
    for place in np.argsort(-scores, kind="stable")[:top_k].tolist():
        ranked.append({"corpus_id": place, "score": float(scores[place])})
        if return_documents:
            ranked[-1]["text"] = texts[place]
    return ranked


def check_classifier(manifest: Manifest) -> None:
    """Reject bundles that do not score texts."""
    if manifest.task != TextClassification.name:
        raise InputError(
            f"This bundle's task is {manifest.task}, which gives no scores of pairs.",
            hint=(
                "Build a checkpoint with a head for them: ",
                Setting("task", "text-classification", command="build"),
                ".",
            ),
        )


def check_reranker(manifest: Manifest) -> None:
    """Reject bundles that do not give one score per pair of texts."""
    check_classifier(manifest)
    labels = labels_of(manifest)
    if len(labels) != 1:
        raise InputError(
            f"Ranking needs one score per pair, and this bundle has {len(labels)} classes: {', '.join(labels)}.",
            hint="Use CrossEncoder.predict, and rank by the class that you want.",
        )


def _check_query(query: str, tokenizer: TextTokenizer, encode_options: EncodeOptions, *, prompt: str) -> None:
    """Reject a query that is no string, or leaves no room for the chunks of documents."""
    if not isinstance(query, str):
        raise InputError(f"query is {query!r:.60}, of type {type(query).__name__}; it must be a string.")
    if encode_options.overflow is not Overflow.SPLIT:
        return
    (encoded,) = tokenizer.encode([query], [""], overflow=Overflow.SPLIT, prompt=prompt)
    if len(encoded) >= tokenizer.max_len:
        raise InputError(
            f"The query has {len(encoded)} tokens, special tokens, prompt and chat template included where there are "
            f"any; every chunk of a document has the whole query and at most {tokenizer.max_len} tokens, so that 1 to "
            f"{tokenizer.max_len - 1} fit.",
            hint="Shorten the query, or cut both texts: overflow='truncate'",
        )


def _columns(logits: Sequence[FloatArray]) -> FloatArray:
    """float32 [pairs, 1], also of no pair."""
    return np.array(logits, np.float32).reshape(len(logits), 1)


def _activation_of(bundle: Bundle) -> Activation:
    """The cross-encoder's, or Hugging Face's pipeline's choice by the checkpoint's configuration."""
    settings = bundle.manifest.sentence
    if settings is not None and settings.activation is not None:
        return Activation(settings.activation)
    config = read_config(bundle)
    if config.get("problem_type") == "regression":
        return Activation.IDENTITY
    if config.get("problem_type") == "multi_label_classification" or len(labels_of(bundle.manifest)) == 1:
        return Activation.SIGMOID
    return Activation.SOFTMAX
