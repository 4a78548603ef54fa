"""Token ids of a text, and the treatment of texts with too many of them."""

from __future__ import annotations

import functools
from enum import StrEnum

import numpy as np

from hdruntime.arrays import IntArray

Offsets = list[tuple[int, int]]
SequenceIds = list[int | None]


class Overflow(StrEnum):
    """The treatment of a text of more tokens than the bundle accepts."""

    ERROR = "error"
    """The text is rejected."""
    TRUNCATE = "truncate"
    """The text is truncated on the tokenizer's truncation side. In a pair the longer text is truncated; in a pair in a
    chat template, the part before the end of the template."""
    SPLIT = "split"
    """The text is split into chunks, whose outputs are merged; see :mod:`hdruntime.text.splitting`."""
    RECUR = "recur"
    """The text is streamed in segments, by bundles with recurrent states; see :meth:`hdruntime.Session.stream`."""


class Encoding:
    """Token ids of a text or a pair, without padding.

    Ids and types may be lists or int64 arrays; each form is made from the other when it is first read.

    Args:
        input_ids: [tokens], special tokens included.
        token_type_ids: [tokens], 0 for the first text of a pair, 1 for the second; None for zeros.
        offsets: see below; None if they were not computed.
        sequence_ids: see below; None if they were not computed.
        prompt_tokens, unattended_tokens, is_truncated, given_tokens: see below.

    Attributes:
        input_ids, token_type_ids: lists of ints.
        ids, types: `input_ids` and `token_type_ids` as int64 arrays.
        offsets: [tokens], (start, end) of each token in characters of its text; (0, 0) for special tokens.
        sequence_ids: [tokens], 0 for the first text, 1 for the second, None for special tokens and a template.
        prompt_tokens: number of leading tokens that belong to the prompt, a special token before it included.
        unattended_tokens: number of trailing tokens that no token attends to.
        is_truncated: whether tokens of the text were removed.
        given_tokens: number of tokens before truncation, special tokens and prompt included; None for a truncated text
            that was tokenized in part. Two encodings may be equal without it.
    """

    def __init__(
        self,
        input_ids: list[int] | IntArray,
        token_type_ids: list[int] | IntArray | None = None,
        offsets: Offsets | None = None,
        sequence_ids: SequenceIds | None = None,
        *,
        prompt_tokens: int = 0,
        unattended_tokens: int = 0,
        is_truncated: bool = False,
        given_tokens: int | None = None,
    ) -> None:
        self._ids, self._offsets, self._sequence_ids = input_ids, offsets, sequence_ids
        self._types = [0] * len(input_ids) if token_type_ids is None else token_type_ids
        self.prompt_tokens = prompt_tokens
        self.unattended_tokens = unattended_tokens
        self.is_truncated = is_truncated
        self.given_tokens = given_tokens if is_truncated else len(input_ids)

    @classmethod
    def of_ids(cls, ids: list[int], *, given_tokens: int | None = None) -> Encoding:
        """An encoding of ids without a text: every token belongs to the first text, with the offsets (0, 0).

        Args:
            ids: [tokens], all or the rest of truncated ones.
            given_tokens: number of ids before truncation; None for all.
        """
        is_truncated = given_tokens is not None and given_tokens > len(ids)
        places = [(0, 0)] * len(ids)
        return cls(ids, None, places, [0] * len(ids), is_truncated=is_truncated, given_tokens=given_tokens)

    @functools.cached_property
    def input_ids(self) -> list[int]:
        return self._ids if isinstance(self._ids, list) else self._ids.tolist()

    @functools.cached_property
    def token_type_ids(self) -> list[int]:
        return self._types if isinstance(self._types, list) else self._types.tolist()

    @functools.cached_property
    def ids(self) -> IntArray:
        return np.asarray(self._ids, np.int64)

    @functools.cached_property
    def types(self) -> IntArray:
        return np.asarray(self._types, np.int64)

    @property
    def offsets(self) -> Offsets:
        if self._offsets is None:
            raise AttributeError("The encoding has no offsets: its text was encoded without offsets.")
        return self._offsets

    @property
    def sequence_ids(self) -> SequenceIds:
        if self._sequence_ids is None:
            raise AttributeError("The encoding has no sequence_ids: its text was encoded without offsets.")
        return self._sequence_ids

    def shift_offsets(self, *characters: int) -> None:
        """Add characters to the offsets of the first text, and to the offsets of the second."""
        if not any(characters):
            return
        tokens = zip(self.offsets, self.sequence_ids, strict=True)
        self._offsets = [
            (start, end) if text is None else (start + characters[text], end + characters[text])
            for (start, end), text in tokens
        ]

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self._ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Encoding) and self._content() == other._content()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        names = ("input_ids", "token_type_ids", "prompt_tokens", "unattended_tokens", "is_truncated")
        return f"Encoding({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    def _content(self) -> tuple[object, ...]:
        marginal = self.prompt_tokens, self.unattended_tokens, self.is_truncated
        return self.input_ids, self.token_type_ids, self._offsets, self._sequence_ids, marginal
