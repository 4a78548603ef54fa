"""The classes of texts, or the scores of pairs, by bundles of text-classification; documents ranked by scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from hdruntime.arrays import FloatArray
from hdruntime.bundle.reader import Bundle
from hdruntime.errors import InputError
from hdruntime.tasks.reading import Reading
from hdruntime.tasks.task import Outputs, Pairs, Text, TextTask, Values
from hdruntime.text.classes import activation_of, labels_of
from hdruntime.text.logits import classification
from hdruntime.text.splitting import SplitPooling
from hdruntime.text.tokenization import Encoding, Overflow, TextTokenizer

if TYPE_CHECKING:
    import pyarrow as pa


class TextClassification(TextTask):
    """The logits of a text or a pair, float32 [labels]; a job writes their class and scores.

    Args:
        bundle: the bundle.

    Attributes:
        labels: names of the classes.
        activation: how scores come from logits.

    Raises:
        BundleError: the configuration of the checkpoint is damaged.
    """

    outputs = ("logits",)
    prompts = True
    texts = "which its cross-encoder compares"
    columns = ("query", "document")

    def __init__(self, bundle: Bundle) -> None:
        super().__init__(bundle.manifest)
        self.labels, self.activation = labels_of(bundle.manifest), activation_of(bundle)
        self.pairs = Pairs.ALLOWED if bundle.manifest.sentence is None else Pairs.REQUIRED
        self.pair_pooling = SplitPooling.MAX if len(self.labels) == 1 else SplitPooling.MEAN

    def fields(self) -> tuple[pa.Field, ...]:
        import pyarrow as pa

        scores = pa.struct([(label, pa.float32()) for label in self.labels])
        return tuple(pa.schema({"label": pa.string(), "score": pa.float32(), "scores": scores}))

    def values(self, answer: FloatArray) -> Values:
        return vars(classification(answer, self.labels, activation=self.activation))

    def answer_of_whole(self, outputs: Outputs, encoding: Encoding, text: Text) -> FloatArray:
        return outputs["logits"]


def check_query(query: str, tokenizer: TextTokenizer, reading: Reading, *, prompt: str) -> None:
    """Refuse a query that is no string, or leaves no room for the pieces of documents.

    Raises:
        InputError: the query has as many tokens as a piece, or more, or is not a string.
    """
    if not isinstance(query, str):
        raise InputError(f"query is {query!r:.60}, of type {type(query).__name__}; it must be a string.")
    if reading.overflow is not Overflow.SPLIT:
        return
    (encoded,) = tokenizer.encode([query], [""], overflow=Overflow.SPLIT, prompt=prompt)
    if len(encoded) >= tokenizer.max_len:
        raise InputError(
            f"The query has {len(encoded)} tokens, special tokens, prompt and chat template included where there are "
            f"any; every piece of a document has the whole query and at most {tokenizer.max_len} tokens, so that 1 to "
            f"{tokenizer.max_len - 1} fit.\n"
            "Shorten the query, or cut both texts: overflow='truncate'"
        )


def ranked(
    scores: FloatArray, documents: Sequence[str], *, top_k: int | None, return_documents: bool
) -> list[dict[str, int | float | str]]:
    """Documents by descending scores, as sentence-transformers' CrossEncoder lists them.

    Args:
        scores: float32 [documents].
        documents: the texts.
        top_k: most documents that are listed; None for all.
        return_documents: whether each has its ``text``.

    Returns:
        for each document ``corpus_id``, its place in ``documents``, ``score``, and ``text`` if asked for. Documents of
        one score are in their order.

    Raises:
        InputError: ``top_k`` is negative.
    """
    if top_k is not None and top_k < 0:
        raise InputError(f"top_k is {top_k}; it must be 0 or more, or None for all documents.")
    found: list[dict[str, int | float | str]] = []
    for place in np.argsort(-scores, kind="stable")[:top_k].tolist():
        found.append({"corpus_id": place, "score": float(scores[place])})
        if return_documents:
            found[-1]["text"] = documents[place]
    return found
