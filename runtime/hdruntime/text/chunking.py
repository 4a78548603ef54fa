"""Late chunking: a text is encoded whole, and each of its chunks gets the mean of its own tokens' states.

Guenther et al., "Late Chunking: Contextual Chunk Embeddings Using Long-Context Embedding Models", arXiv 2409.04701. As
in the authors' implementation, special tokens and the prompt before the text belong to a chunk with the text's first
token, special tokens after it to a chunk with its last: one chunk of the whole text has the vector of the text. Unlike
there, every macro chunk of a longer text has special tokens and the prompt, and a token that two macro chunks share has
its state from the one whose border is farther away.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hdruntime.arrays import FloatArray, IntArray
from hdruntime.bundle.manifest import Manifest, Role, TensorSpec
from hdruntime.errors import InputError, Message, Setting
from hdruntime.text.embeddings import normalized
from hdruntime.text.pooling import embedding_output, embedding_size
from hdruntime.text.sentences import sentence_spans
from hdruntime.text.splitting import SplitEncoding

SENTENCES = "sentences"
"""The rule whose chunks are sentences by :mod:`hdruntime.text.sentences`."""

_OVERLAP = 256
"""Default tokens that consecutive macro chunks share; at most a quarter of a macro chunk."""

_BUILD_FOR_TOKENS: Message = (
    "Use a model of mean pooling, or token embeddings, whose mean is then taken: build the bundle again with ",
    Setting("task", "feature-extraction", command="build"),
    ".",
)

Spans = Sequence[Sequence[int]]
"""(start, end) of each chunk, in characters of the text, end exclusive."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TextChunks:
    """The chunks of a text, in order.

    Attributes:
        starts, ends: int64 [chunks], in characters of the text, ends exclusive.
        tokens: int64 [chunks], how many of the text's tokens have a character in the chunk.
        vectors: float32 [chunks, dimensions].
    """

    starts: IntArray
    ends: IntArray
    tokens: IntArray
    vectors: FloatArray

    def __len__(self) -> int:
        """Number of chunks."""
        return len(self.starts)


def tokens_per_chunk(rule: str) -> int | None:
    """N of the rule ``tokens:N``; None for other strings. An N that is no whole number, 1 or more, is rejected."""
    if not rule.startswith("tokens:"):
        return None
    number = rule.removeprefix("tokens:")
    if not re.fullmatch("0*[1-9][0-9]{0,8}", number):
        raise InputError(f"{rule!r} has no valid number of tokens per chunk.", hint="Write, for example, tokens:256.")
    return int(number)


def overlap_of(overlap: int | None, max_len: int) -> int:
    """Tokens that consecutive macro chunks of ``max_len`` tokens share; None: 256, or a quarter of them if less."""
    return min(_OVERLAP, max_len // 4) if overlap is None else overlap


def joined_chunks(chunks: Sequence[str]) -> tuple[str, list[tuple[int, int]]]:
    """The text of chunks in their order, and the (start, end) of each; a space separates two chunks that have no white
    space between them."""
    parts: list[str] = []
    spans: list[tuple[int, int]] = []
    size = 0
    for chunk in chunks:
        if parts and not (parts[-1][-1:].isspace() or chunk[:1].isspace()):
            parts.append(" ")
            size += 1
        spans.append((size, size + len(chunk)))
        parts.append(chunk)
        size += len(chunk)
    return "".join(parts), spans


class LateChunking:
    """Late chunking with a bundle whose vectors are the mean of their tokens' states; other bundles are rejected.

    Attributes:
        output: the output with the states of tokens.
    """

    def __init__(self, manifest: Manifest) -> None:
        pooled = embedding_output(manifest)
        settings = manifest.sentence
        if not pooled.has_tokens_axis:
            if settings is None:
                raise _pooling_error("does not state how it pools tokens", "Build it again.")
            if settings.pooling != ("mean",):
                raise _pooling_error(f"pools tokens by {' and '.join(settings.pooling)}")
            if settings.dense or embedding_size(manifest) != manifest.hidden_size:
                raise _pooling_error("has a Dense layer or LayerNorm after the mean of the tokens")
        self.output: TensorSpec = next(spec for spec in manifest.outputs if spec.name == "last_hidden_state")
        self._normalizes = not pooled.has_tokens_axis and settings is not None and settings.normalize
        self._pools_prompt = manifest.input_of(Role.POOLED) is None

    def begin(self, split: SplitEncoding, text: str, chunks: str | Spans | None, *, prompt: str) -> LateChunks:
        """The chunks of a text, to which the states of its tokens are then added.

        Args:
            split: the text's macro chunks, with the prompt.
            text: without the prompt.
            chunks: ``tokens:N``, ``sentences``, or (start, end) of each, within the text and with a token; None is
                rejected as any other value is.
            prompt: before the text.
        """
        own = _OwnTokens(split, text, prompt)
        if not isinstance(chunks, str):
            spans = _checked_spans(chunks, text)
            first, last = own.inside(spans)
            if (first >= last).any():
                start, end = spans[int((first >= last).argmax())]
                raise InputError(
                    f"The chunk [{start}, {end}] has no token: {text[start:end]!r:.40}.", hint="Leave it out."
                )
        elif chunks == SENTENCES:
            spans = np.array(sentence_spans(text), np.int64).reshape(-1, 2)
            first, last = own.inside(spans)
            spans, first, last = (each[first < last] for each in (spans, first, last))
        elif number := tokens_per_chunk(chunks):
            first = np.arange(0, len(own.spans), number)
            last = np.minimum(first + number, len(own.spans))
            spans = np.stack([own.spans[first, 0], own.spans[last - 1, 1]], axis=1)
        else:
            raise InputError(
                f"There is no rule {chunks!r} for chunks.",
                hint=f"Use 'tokens:256' (any number), '{SENTENCES}', or (start, end) of each chunk, in characters.",
            )
        before = 0 if self._pools_prompt else min(split.whole.prompt_tokens, own.start)
        pooled_first = np.where(first == 0, before, own.start + first)
        pooled_last = np.where(last == len(own.spans), len(split.whole), own.start + last)
        return LateChunks(
            split,
            spans=spans,
            tokens=last - first,
            pooled=np.stack([pooled_first, pooled_last], axis=1),
            output=self.output,
            normalizes=self._normalizes,
        )


class LateChunks:
    """The chunks of a text while its macro chunks are run; made by :meth:`LateChunking.begin`.

    Only sums are held, not the states of all tokens: a text may have millions.

    Args:
        split: the text's macro chunks.
        spans: int64 [chunks, 2], in characters.
        tokens: int64 [chunks], number of the text's own tokens.
        pooled: int64 [chunks, 2], first token and the one after the last, special tokens and the prompt counted.
        output: the states of tokens.
        normalizes: whether vectors have length 1.
    """

    def __init__(
        self,
        split: SplitEncoding,
        *,
        spans: IntArray,
        tokens: IntArray,
        pooled: IntArray,
        output: TensorSpec,
        normalizes: bool,
    ) -> None:
        self._split, self._spans, self._tokens, self._pooled = split, spans, tokens, pooled
        self._sums = np.zeros((len(spans), int(output.shape[-1])), np.float64)
        self._output, self._normalizes = output.name, normalizes

    def __len__(self) -> int:
        """Number of chunks."""
        return len(self._spans)

    def add(self, macro_chunk: int, outputs: Mapping[str, FloatArray]) -> None:
        """Add the states of a macro chunk's tokens, float32 [tokens of the macro chunk, dimensions]; each macro chunk
        is added once, in any order."""
        states = outputs[self._output]
        low, high = self._split.boundaries[macro_chunk], self._split.boundaries[macro_chunk + 1]
        offset = macro_chunk * self._split.step
        first, last = self._pooled.clip(low, high).T - offset
        for chunk in np.flatnonzero(first < last):
            self._sums[chunk] += states[first[chunk] : last[chunk]].sum(axis=0, dtype=np.float64)

    def finished(self) -> TextChunks:
        """The chunks, when every macro chunk was added."""
        counts = self._pooled[:, 1] - self._pooled[:, 0]
        vectors = (self._sums / counts[:, np.newaxis]).astype(np.float32)
        return TextChunks(
            starts=self._spans[:, 0],
            ends=self._spans[:, 1],
            tokens=self._tokens,
            vectors=normalized(vectors).astype(np.float32) if self._normalizes else vectors,
        )


class _OwnTokens:
    """The tokens of a text, without special tokens and the prompt.

    Attributes:
        start: number of the first, special tokens and the prompt counted.
        spans: int64 [tokens, 2], characters of the text, without white space around a token.
    """

    def __init__(self, split: SplitEncoding, text: str, prompt: str) -> None:
        whole = split.whole
        with_prompt = [token for token, sequence in enumerate(whole.sequence_ids) if sequence == 0]
        own = (token for token in with_prompt if whole.offsets[token][1] > len(prompt))
        self.start = next(own, len(whole))
        offsets = whole.offsets[self.start : with_prompt[-1] + 1] if with_prompt else []
        self.spans = np.array([_trimmed(text, *each, len(prompt)) for each in offsets], np.int64).reshape(-1, 2)

    def inside(self, spans: IntArray) -> tuple[IntArray, IntArray]:
        """The first token with a character in each span, and the one after the last: int64 [spans] each."""
        # Monotonic by construction, as the search needs them; offsets of a normalised text rarely are not.
        ends = np.maximum.accumulate(self.spans[:, 1])
        starts = np.minimum.accumulate(self.spans[::-1, 0])[::-1]
        return np.searchsorted(ends, spans[:, 0], side="right"), np.searchsorted(starts, spans[:, 1], side="left")


def _trimmed(text: str, start: int, end: int, before: int) -> tuple[int, int]:
    """A token's characters in the text, of which ``before`` characters of a prompt are not counted."""
    start, end = max(start - before, 0), end - before
    token = text[start:end]
    if stripped := token.strip():
        start += len(token) - len(token.lstrip())
        end = start + len(stripped)
    return start, max(end, start + 1)


def _checked_spans(spans: Spans | None, text: str) -> IntArray:
    """int64 [spans, 2]; rejects spans that are not pairs of integers within the text."""
    if not isinstance(spans, Sequence | np.ndarray):
        raise InputError(
            f"chunks is of type {type(spans).__name__}; it must have (start, end) of each chunk, in characters."
        )
    checked = np.empty((len(spans), 2), np.int64)
    for number, span in enumerate(spans):
        try:
            start, end = map(operator.index, span)
        except (TypeError, ValueError):
            raise InputError(
                f"Chunk {number} is {span!r:.60}; it must be a pair of whole numbers: [start, end], in characters."
            ) from None
        if not 0 <= start < end <= len(text):
            raise InputError(
                f"Chunk {number} is [{start}, {end}]; the text has {len(text)} characters.",
                hint=f"Give 0 <= start < end <= {len(text)}, the end exclusive; characters are counted, not bytes.",
            )
        checked[number] = start, end
    return checked


def _pooling_error(reason: str, hint: Message = _BUILD_FOR_TOKENS) -> InputError:
    return InputError(
        f"Late chunking needs a model that pools by the mean of all tokens; this bundle {reason}.", hint=hint
    )
