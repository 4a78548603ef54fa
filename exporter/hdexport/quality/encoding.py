"""Similarities of queries and documents, for each way to embed a long document."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from itertools import islice
from typing import Protocol

import numpy as np

from hdexport.quality.queries import Collection
from hdruntime.arrays import FloatingArray
from hdruntime.session import Session
from hdruntime.text.encoding import Encoding
from hdruntime.text.pooling import PoolingMode, embedding_output, embedding_size, pooled_text
from hdruntime.text.prompts import chosen_prompt, prompts_of
from hdruntime.text.similarity import similarities
from hdruntime.text.splitting import SplitEncoding, SplitPooling, pooled_embedding, split_encodings


class LongTextMode(StrEnum):
    """How a document of more tokens than the model was trained with is embedded."""

    TRUNCATED = "truncated"
    """Truncated to the trained positions."""
    SPLIT = "split"
    """Read in chunks of the trained positions; the mean of their vectors, weighted by tokens."""
    WHOLE = "whole"
    """Read at once, as far as the bundle takes it."""


class ProgressLine(Protocol):
    """Shows progress; `hdexport.cli.progress.StatusLine` is one."""

    def begin(self, text: str, *, total: float | None = None) -> None:
        """Something of `total` units begins."""

    def show(self, text: str) -> None:
        """The work goes on under another name."""

    def did(self, amount: float) -> None:
        """So many units more are done."""


def similarities_by_mode(
    session: Session,
    collection: Collection,
    *,
    trained: int,
    modes: Sequence[LongTextMode],
    begin: Callable[[int], None],
    line: ProgressLine,
) -> dict[LongTextMode, dict[str, FloatingArray]]:
    """Mode -> kind of query -> [queries, documents], by the model's own similarity and prompts; equal inputs run once.
    `trained` is the number of tokens of a truncated document, and of a chunk; `begin` receives the number of tokens
    before any of them runs, and `line` the tokens that are done."""
    manifest = session.manifest
    prompts, default = prompts_of(manifest)
    prompt, query_prompt = (chosen_prompt(prompts, default, name=name, prompt=None) for name in ("document", "query"))
    documents = session.split(collection.documents, prompt=prompt)
    by_trained = split_encodings(
        [document.whole for document in documents], max_len=min(trained, manifest.max_len), stride=0, is_pair=False
    )
    # The first chunk of a split text is the part that truncation leaves.
    chunks = {
        LongTextMode.TRUNCATED: [split.chunks[:1] for split in by_trained],
        LongTextMode.SPLIT: [split.chunks for split in by_trained],
        LongTextMode.WHOLE: [split.chunks[:1] for split in documents],
    }
    query_texts = [text for queries in collection.queries.values() for text in queries.texts]
    encodings = [chunk for mode in modes for of_document in chunks[mode] for chunk in of_document]
    encodings += [split.chunks[0] for split in session.split(query_texts, prompt=query_prompt)]
    vectors = iter(vectors_of(session, encodings, begin=begin, line=line))
    of_documents = {mode: np.stack([_vector(mode, split, vectors) for split in by_trained]) for mode in modes}
    of_queries = {kind: list(islice(vectors, len(queries.texts))) for kind, queries in collection.queries.items()}
    function = manifest.sentence.similarity if manifest.sentence else "cosine"
    return {
        mode: {
            kind: similarities(function, np.array(each), of_documents[mode])
            for kind, each in of_queries.items()
            if each
        }
        for mode in modes
    }


def _vector(mode: LongTextMode, split: SplitEncoding, vectors: Iterator[FloatingArray]) -> FloatingArray:
    """A document's vector, from as many of the next ones as it needs."""
    if mode is not LongTextMode.SPLIT:
        return next(vectors)
    return pooled_embedding(split, list(islice(vectors, len(split.chunks))), SplitPooling.MEAN)


def vectors_of(
    session: Session, encodings: Sequence[Encoding], *, begin: Callable[[int], None], line: ProgressLine
) -> FloatingArray:
    """[encodings, dimensions], float32, in order; equal encodings run once, and all in batches of similar length. The
    error of the first encoding that fails is raised."""
    output = embedding_output(session.manifest)
    unique = {tuple(encoding.input_ids): encoding for encoding in encodings}
    texts = list(unique.values())
    places = {ids: place for place, ids in enumerate(unique)}
    begin(sum(map(len, unique)))
    vectors = np.empty((len(unique), embedding_size(session.manifest)), np.float32)
    for result in session.run_batches(texts, outputs=[output.name]):
        if result.errors:
            raise next(iter(result.errors.values()))
        for index, row in enumerate(result.rows):
            values = session.outputs_of_row(result, index, len(texts[row]))[output.name]
            vectors[row] = pooled_text(values, PoolingMode.MEAN) if output.has_tokens_axis else values
        line.did(int(result.attention_mask.sum()))
    return vectors[[places[tuple(encoding.input_ids)] for encoding in encodings]]
