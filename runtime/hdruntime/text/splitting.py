"""Splitting of texts with more tokens than a bundle accepts into chunks, and merging of the chunks' outputs.

::

    for split in session.split(texts, stride=64):
        outputs = session.infer(split.chunks)  # one dict per chunk
        whole = merged(split, outputs, specs=session.manifest.outputs, pooling=SplitPooling.MEAN)

Every chunk is run independently, with special tokens and the prompt; chunks of a pair have the whole first text.
Bundles with recurrent states can stream texts instead; see :meth:`hdruntime.Session.stream`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

import numpy as np

from hdruntime.arrays import FloatArray
from hdruntime.bundle.manifest import TensorSpec
from hdruntime.errors import InputError
from hdruntime.text.checks import TRUNCATE
from hdruntime.text.encoding import Encoding
from hdruntime.text.pooling import SENTENCE_EMBEDDING

_UNIT_TOLERANCE = 1e-3
"""Tolerance for the norm 1 of a vector: in float16 the norm is within 5e-4."""


class SplitPooling(StrEnum):
    """Combination of the embeddings, or of the text logits, of chunks."""

    MEAN = "mean"
    """The mean, weighted by the numbers of tokens."""
    MAX = "max"
    """The maximum of each dimension."""


SUM: Literal["sum"] = "sum"
"""The sum, for sparse weights that the model sums over the tokens of a text. Not an option for callers."""

ChunkPooling = SplitPooling | Literal["sum"]


@dataclass(frozen=True, kw_only=True)
class SplitEncoding:
    """A text and its chunks.

    Attributes:
        whole: the encoding of the text.
        chunks: one or more; a text that fits has the single chunk ``whole``.
        step: number of tokens between the starts of consecutive chunks: token ``i`` of the text is token
            ``i - k * step`` of chunk ``k``.
        boundaries: [chunks + 1], ascending from 0 to the text's tokens: tokens ``boundaries[k]`` up to
            ``boundaries[k + 1]`` have most context in chunk ``k``, whose outputs are used for them.
    """

    whole: Encoding
    chunks: list[Encoding]
    step: int
    boundaries: list[int]


def split_encodings(encodings: Sequence[Encoding], *, max_len: int, stride: int, is_pair: bool) -> list[SplitEncoding]:
    """Split every text of more than `max_len` tokens, as tokenizers does with truncation and a stride.

    Args:
        encodings: texts or pairs, special tokens included.
        max_len: maximum tokens of a chunk, special tokens included; only the last chunk may have fewer.
        stride: number of tokens that consecutive chunks share.
        is_pair: split the second text, and put the whole first text into every chunk (``only_second``).
    """
    return [
        _split(encoding, f"Text {index}" if len(encodings) > 1 else "The text", max_len, stride, is_pair)
        for index, encoding in enumerate(encodings)
    ]


def as_single_chunk(encoding: Encoding) -> SplitEncoding:
    """A text as its only chunk."""
    return SplitEncoding(whole=encoding, chunks=[encoding], step=1, boundaries=[0, len(encoding)])


def merged(
    split: SplitEncoding,
    outputs: Sequence[Mapping[str, FloatArray]],
    *,
    specs: Sequence[TensorSpec],
    pooling: ChunkPooling,
) -> dict[str, FloatArray]:
    """Merge the outputs of a text's chunks.

    Args:
        split: the text.
        outputs: [chunks], outputs without batch axis and padding, from ``Session.infer``.
        specs: outputs of the manifest.
        pooling: combines outputs without a tokens axis.

    Returns:
        name -> float32 array. An output with a tokens axis has an entry for every token of the text, from the chunk
        with most context of the token; special tokens come from the first or the last chunk. Other outputs are pooled,
        a sentence embedding by :func:`pooled_embedding`.
    """
    if len(split.chunks) == 1:
        return dict(outputs[0])
    with_tokens = {spec.name for spec in specs if spec.has_tokens_axis}
    whole = {}
    for name in outputs[0]:
        values = [of_chunk[name] for of_chunk in outputs]
        if name in with_tokens:
            whole[name] = _stitched(split, values)
        else:
            pool = pooled_embedding if name == SENTENCE_EMBEDDING else _pooled_logits
            whole[name] = pool(split, values, pooling)
    return whole


def pooled_embedding(split: SplitEncoding, vectors: Sequence[FloatArray], pooling: ChunkPooling) -> FloatArray:
    """The embedding of a text, float32 [dimensions], from the embeddings of its chunks, [chunks] of [dimensions].

    The result has norm 1 if all embeddings have. A normalized mean, weighted by length, is common practice; see
    "Embedding texts that are longer than the model's maximum context length" in OpenAI's cookbook.
    """
    if len(split.chunks) == 1:
        return vectors[0]
    pooled = _pooled_logits(split, vectors, pooling)
    lengths = np.linalg.norm(np.stack(vectors).astype(np.float64), axis=1)
    if (np.abs(lengths - 1) > _UNIT_TOLERANCE).any():
        return pooled
    # Opposite vectors may cancel out; zeros stay zeros.
    length = np.linalg.norm(pooled.astype(np.float64))
    return (pooled / max(length, np.finfo(np.float32).tiny)).astype(np.float32)


def _pooled_logits(split: SplitEncoding, logits: Sequence[FloatArray], pooling: ChunkPooling) -> FloatArray:
    """The logits of a text from the logits of its chunks, [chunks] of float32 [labels]."""
    stacked = np.stack(logits)
    if pooling is SplitPooling.MAX:
        return stacked.max(axis=0)
    if pooling == SUM:
        return stacked.astype(np.float64).sum(axis=0).astype(np.float32)
    tokens = [len(chunk) for chunk in split.chunks]
    return np.average(stacked.astype(np.float64), axis=0, weights=tokens).astype(np.float32)


def _split(whole: Encoding, name: str, max_len: int, stride: int, is_pair: bool) -> SplitEncoding:
    start, end = _split_range(whole, sequence=1 if is_pair else 0)
    room = max_len - (len(whole) - (end - start))
    fits = len(whole) <= max_len
    # Beside special tokens every text has equal room for a stride; beside a first text the room differs per pair.
    if stride < 0 or (stride >= room and not (fits and is_pair)):
        raise _room_error(name, max_len, stride, room)
    if fits:
        return as_single_chunk(whole)
    step = room - stride
    # A chunk starts wherever the one before it does not reach the end.
    starts = range(start, end - stride, step)
    chunks = [_chunk(whole, start, first, min(first + room, end), end) for first in starts]
    # The middle of the overlap: tokens before it have more context in the first chunk, later ones in the second.
    boundaries = [0, *(first + stride // 2 for first in starts[1:]), len(whole)]
    return SplitEncoding(whole=whole, chunks=chunks, step=step, boundaries=boundaries)


def _split_range(whole: Encoding, sequence: int) -> tuple[int, int]:
    """The range of tokens without the prompt and the special tokens before and after it."""
    sequences = whole.sequence_ids
    if sequence not in sequences:
        return 0, 0
    end = len(sequences) - sequences[::-1].index(sequence)
    return min(max(sequences.index(sequence), whole.prompt_tokens), end), end


def _chunk(whole: Encoding, start: int, first: int, last: int, end: int) -> Encoding:
    def part(values: list[Any]) -> list[Any]:
        return values[:start] + values[first:last] + values[end:]

    return Encoding(
        part(whole.input_ids),
        part(whole.token_type_ids),
        part(whole.offsets),
        part(whole.sequence_ids),
        prompt_tokens=min(whole.prompt_tokens, start),
    )


def _room_error(name: str, max_len: int, stride: int, room: int) -> InputError:
    if room < 1:
        return InputError(
            f"{name} cannot be split: the special tokens, the prompt and, of a pair, the first text, which every chunk "
            f"repeats, leave no token of the {max_len} of a chunk.",
            hint=("Shorten the prompt or the first text, or truncate the text: ", TRUNCATE, "."),
        )
    return InputError(
        f"{name} cannot be split with a stride or overlap of {stride} tokens; it must be 0 to {room - 1}.",
        hint=f"A chunk has {max_len} tokens; each chunk repeats {max_len - room} tokens of prompt and special tokens.",
    )


def _stitched(split: SplitEncoding, values: Sequence[FloatArray]) -> FloatArray:
    """[tokens of the text, ...] from [tokens of the chunk, ...] of each chunk."""
    parts = []
    for chunk, array in enumerate(values):
        offset = chunk * split.step
        parts.append(array[split.boundaries[chunk] - offset : split.boundaries[chunk + 1] - offset])
    return np.concatenate(parts)
