"""Texts of more tokens than a bundle accepts, cut into chunks that fit; the chunks' outputs are merged.

::

    for split in session.split(texts, stride=64):
        outputs = session.infer(split.chunks)  # one dict per chunk
        whole = merged(split, outputs, specs=session.manifest.outputs, pooling=SplitPooling.MEAN)

Every chunk is run by itself: it has special tokens and the prompt, and chunks of a pair the whole first text.
Nothing is carried from chunk to chunk. Bundles that remember earlier tokens are streamed instead, see
:meth:`hdruntime.Session.stream`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import numpy as np

from hdruntime.arrays import FloatArray
from hdruntime.bundle.manifest import TensorSpec
from hdruntime.errors import InputError
from hdruntime.text.checks import TRUNCATE
from hdruntime.text.encoding import Encoding
from hdruntime.text.pooling import SENTENCE_EMBEDDING

_UNIT_TOLERANCE = 1e-3
"""How far from 1 the length of a normalised vector may be: float16 has it within 5e-4."""


class SplitPooling(str, Enum):
    """How the chunks' vectors are combined, or their logits if a text has one row of logits."""

    MEAN = "mean"
    """The mean of the chunks' vectors, each weighted by the chunk's number of tokens."""
    MAX = "max"
    """The largest value of each dimension."""


SUM: Literal["sum"] = "sum"
"""The sum, for weights that the model itself sums over the tokens of a text. Callers cannot choose it."""

ChunkPooling = SplitPooling | Literal["sum"]


@dataclass(frozen=True, kw_only=True)
class SplitEncoding:
    """A text and the chunks that it is run in.

    Attributes:
        whole: the text's tokens, of any number.
        chunks: one or more; the only chunk of a text that fits is ``whole`` itself.
        step: tokens from a chunk's start to the next one's: the text's token ``i`` is token ``i - k * step`` of chunk
            ``k``.
        boundaries: [chunks + 1], ascending from 0 to the text's tokens: tokens ``boundaries[k]`` up to
            ``boundaries[k + 1]`` see most of the text in chunk ``k``, whose outputs they have.
    """

    whole: Encoding
    chunks: list[Encoding]
    step: int
    boundaries: list[int]


def split_encodings(encodings: Sequence[Encoding], *, max_len: int, stride: int, is_pair: bool) -> list[SplitEncoding]:
    """Cut every text of more than `max_len` tokens, as the tokenizers library does with ``truncation`` and a stride.

    Args:
        encodings: whole texts or pairs, special tokens included.
        max_len: most tokens of a chunk, special tokens included; all chunks but the last have as many.
        stride: tokens that a chunk repeats of the one before it; a new token must be left.
        is_pair: the second text is cut, and every chunk has the whole first one (``only_second``).
    """
    return [
        _split(encoding, f"Text {index}" if len(encodings) > 1 else "The text", max_len, stride, is_pair)
        for index, encoding in enumerate(encodings)
    ]


def as_single_chunk(encoding: Encoding) -> SplitEncoding:
    """A text that is run whole."""
    return SplitEncoding(whole=encoding, chunks=[encoding], step=1, boundaries=[0, len(encoding)])


def merged(
    split: SplitEncoding,
    outputs: Sequence[Mapping[str, FloatArray]],
    *,
    specs: Sequence[TensorSpec],
    pooling: ChunkPooling,
) -> dict[str, FloatArray]:
    """The outputs of a text from the outputs of its chunks.

    Args:
        split: the text.
        outputs: [chunks], each one's outputs without batch axis and padding, as ``Session.infer`` gives them.
        specs: the manifest's outputs: they tell which have a tokens axis.
        pooling: for outputs without one.

    Returns:
        name -> float32 array. With a tokens axis, it has an entry for every token of the text, from the chunk in which
        the token sees most of the text, and special tokens from the first chunk or the last. Others are pooled; a
        sentence embedding as :func:`pooled_embedding` does it.
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
    """A text's vector, float32 [dimensions], from its chunks' vectors, [chunks] of [dimensions]; where all of these
    have length 1, it has length 1, too.

    Means weighted by length, then made as long as the vectors were, is what people do by hand; see "Embedding texts
    that are longer than the model's maximum context length" in OpenAI's cookbook.
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
    """A text's row of logits from its chunks' rows, [chunks], each float32 [labels]."""
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
    # The room beside a first text is its own; that beside special tokens alone is every text's.
    if stride < 0 or (stride >= room and not (fits and is_pair)):
        raise _room_error(name, max_len, stride, room)
    if fits:
        return as_single_chunk(whole)
    step = room - stride
    # A chunk starts wherever the one before it does not reach the end.
    starts = range(start, end - stride, step)
    chunks = [_chunk(whole, start, first, min(first + room, end), end) for first in starts]
    # In the middle of the overlap: tokens before it have more context in the first chunk, later ones in the second.
    boundaries = [0, *(first + stride // 2 for first in starts[1:]), len(whole)]
    return SplitEncoding(whole=whole, chunks=chunks, step=step, boundaries=boundaries)


def _split_range(whole: Encoding, sequence: int) -> tuple[int, int]:
    """The range of a text's own tokens: special tokens and the prompt are before it, special tokens after it."""
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
