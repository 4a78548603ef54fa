"""One vector per text; for a text in pieces, the pooled vectors of its pieces."""

from __future__ import annotations

__all__ = ["embeddings"]

from collections.abc import Sequence
from itertools import islice

import numpy as np

from hdruntime.arrays import FloatArray
from hdruntime.bundle.manifest import TensorSpec
from hdruntime.errors import InputError
from hdruntime.inference.text_runner import TextRunner
from hdruntime.text.checks import checked_choice
from hdruntime.text.pooling import embedding_output, embedding_size, mean_over_tokens
from hdruntime.text.prompts import chosen_prompt, prompts_of
from hdruntime.text.splitting import SplitPooling, pooled_embedding
from hdruntime.text.tokenization import Encoding, Overflow


def embeddings(
    runner: TextRunner,
    texts: Sequence[str],
    *,
    batch_tokens: int | None,
    overflow: Overflow | str,
    stride: int,
    split_pooling: SplitPooling | str,
    segment: int | None,
    prompt_name: str | None,
    prompt: str | None,
) -> FloatArray:
    """See :meth:`hdruntime.Session.embed`.

    Returns:
        float32 [texts, dimensions].
    """
    manifest = runner.manifest
    output = embedding_output(manifest)
    pooling = checked_choice(SplitPooling, split_pooling, option="split_pooling")
    prompt = chosen_prompt(*prompts_of(manifest), name=prompt_name, prompt=prompt)
    if segment is not None and overflow != Overflow.RECUR:
        raise InputError(f"segment is {segment}, but only overflow='recur' has segments.")
    if overflow == Overflow.RECUR and not stride:
        encodings = runner.tokenize(texts, overflow=overflow, prompt=prompt)
        vectors = runner.streams.vectors(encodings, segment=segment, batch_tokens=batch_tokens)
    else:
        splits = runner.pieces(texts, overflow=overflow, stride=stride, prompt=prompt)
        text_of_piece = [text for text, split in enumerate(splits) for _ in split.pieces]
        pieces = [piece for split in splits for piece in split.pieces]
        of_pieces = iter(_vectors(runner, output, pieces, text_of_piece, batch_tokens))
        vectors = [pooled_embedding(split, list(islice(of_pieces, len(split.pieces))), pooling) for split in splits]
    return np.stack(vectors) if vectors else np.empty((0, embedding_size(manifest)), dtype=np.float32)


def _vectors(
    runner: TextRunner,
    output: TensorSpec,
    encodings: Sequence[Encoding],
    numbers: Sequence[int],
    batch_tokens: int | None,
) -> FloatArray:
    """[encodings, dimensions], one vector per encoding; errors use their ``numbers``."""
    vectors = np.empty((len(encodings), embedding_size(runner.manifest)), dtype=np.float32)
    for result in runner.good_batches(encodings, numbers, batch_tokens=batch_tokens, outputs=[output.name]):
        values = result.outputs[output.name]
        vectors[result.rows] = mean_over_tokens(values, result.attention_mask) if output.has_tokens_axis else values
    return vectors
