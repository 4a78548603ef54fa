"""Texts to ids, tokenised or checked in chunks, with an error for each text that does not fit."""

from __future__ import annotations

__all__ = ["TextEncoder", "size_of"]

import dataclasses
from collections.abc import Sequence

from hdruntime.batch_session import BatchSession
from hdruntime.errors import InputError
from hdruntime.inference.batching import grouped
from hdruntime.inference.inputs import checked_inputs
from hdruntime.inference.marks import check_texts_for_marks
from hdruntime.inference.streaming import check_document_length
from hdruntime.tasks.reading import Reading
from hdruntime.tasks.task import Task, Text
from hdruntime.text.checks import check_text_lengths
from hdruntime.text.splitting import SplitEncoding, in_one_piece, split_encodings
from hdruntime.text.tokenization import Encoding, Overflow, TextTokenizer

_CHARACTERS_PER_TOKEN = 4
"""Characters of a token in English; only the size of windows depends on it."""

_CHUNK_TEXTS = 512
"""Texts tokenised together."""

_CHUNK_CHARACTERS = 2**16
"""Upper bound on characters of a chunk of several texts."""


def size_of(text: Text) -> int:
    """Characters of a text, or of both; an id counts as four."""
    if text.input_ids is not None:
        return _CHARACTERS_PER_TOKEN * len(text.input_ids)
    return len(text.text) + len(text.text_pair or "")


class TextEncoder:
    """Encodes texts for a session.

    Args:
        session: with the limits.
        task: that reads the texts.
        reading: the treatment of long texts.
        prompt: before every text; ids include it already.
        tokenizer: with its own limit; None for the session's.
    """

    def __init__(
        self,
        session: BatchSession,
        task: Task,
        reading: Reading,
        *,
        prompt: str,
        tokenizer: TextTokenizer | None,
    ) -> None:
        self._session, self._task, self._reading, self._prompt = session, task, reading, prompt
        self._tokenizer = tokenizer

    def encode(self, texts: Sequence[Text]) -> list[SplitEncoding | InputError]:
        """For each text, in order: its pieces (one unless it was split), or its error."""
        # A very long text is encoded alone: if it is too long, no other is encoded twice.
        sizes = [size_of(text) for text in texts]
        chunks = grouped(sizes, most=_CHUNK_TEXTS, most_in_all=_CHUNK_CHARACTERS)
        return [encoded for chunk in chunks for encoded in self._encode(texts[chunk])]

    def _encode(self, texts: Sequence[Text]) -> list[SplitEncoding | InputError]:
        try:
            return [*self._encoded(texts)]
        except InputError as error:
            if len(texts) == 1:
                return [error]
        # A text does not fit: try each alone.
        return [self._encode([text])[0] for text in texts]

    def _encoded(self, texts: Sequence[Text]) -> list[SplitEncoding]:
        reading = self._reading
        if texts[0].input_ids is not None:
            splits = [in_one_piece(self._from_ids(text.input_ids or [])) for text in texts]
        else:
            splits = self._tokenized(texts)
        for split in splits:
            for piece in split.pieces:
                if reading.overflow is Overflow.RECUR:
                    check_document_length(len(piece), self._session.manifest)
                self._check(piece.input_ids)
        return splits

    def _tokenized(self, texts: Sequence[Text]) -> list[SplitEncoding]:
        reading = self._reading
        tokenizer = self._tokenizer or self._session.tokenizer
        pairs = [text.text_pair for text in texts if text.text_pair is not None] or None
        encodings = self._task.encode(
            tokenizer, [text.text for text in texts], pairs, overflow=reading.overflow, prompt=self._prompt
        )
        if reading.overflow is Overflow.SPLIT:
            return split_encodings(
                encodings, max_len=tokenizer.max_len, stride=reading.stride, is_pair=pairs is not None
            )
        if reading.overflow is not Overflow.RECUR:
            check_text_lengths([len(encoding) for encoding in encodings], self._session.max_len)
        return [in_one_piece(encoding) for encoding in encodings]

    def _from_ids(self, ids: list[int]) -> Encoding:
        overflow, most = self._reading.overflow, self._session.max_len
        is_cut = overflow is Overflow.TRUNCATE and len(ids) > most
        if is_cut:
            ids = ids[:most]
        if overflow is not Overflow.RECUR:
            check_text_lengths([len(ids)], most)
        return dataclasses.replace(Encoding.of_ids(ids), is_cut=is_cut)

    def _check(self, ids: Sequence[int]) -> None:
        """Refuse texts that would fail a whole batch: an id beyond the vocabulary, no question where it is marked."""
        manifest = self._session.manifest
        if not 0 <= min(ids) <= max(ids) < manifest.vocab_size:
            checked_inputs({manifest.ids: [ids]}, manifest, max_len=len(ids), memory=0)
        check_texts_for_marks([ids], manifest)
