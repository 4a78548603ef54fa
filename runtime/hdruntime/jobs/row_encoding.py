"""Rows to ids, tokenised or checked in chunks, with an error for each row that does not fit."""

from __future__ import annotations

__all__ = ["RowEncoder", "size_of_row"]

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

from hdruntime.errors import InputError
from hdruntime.inference.inputs import checked_inputs
from hdruntime.inference.marks import check_texts_for_marks
from hdruntime.inference.streaming import check_document_length
from hdruntime.jobs.rows import Row
from hdruntime.session import Session
from hdruntime.text.checks import check_text_lengths
from hdruntime.text.splitting import SplitEncoding, in_one_piece
from hdruntime.text.tokenization import Encoding, Overflow

_CHARACTERS_PER_TOKEN = 4
"""Characters of a token in English; only the size of windows depends on it."""

_CHUNK_ROWS = 64
"""Rows tokenised together."""

_CHUNK_CHARACTERS = 2**20
"""Upper bound on characters of a chunk of several rows."""


def size_of_row(row: Row) -> int:
    """Characters of a row's texts; an id counts as four."""
    if row.input_ids is not None:
        return _CHARACTERS_PER_TOKEN * len(row.input_ids)
    return len(row.text) + len(row.text_pair or "")


class RowEncoder:
    """Encodes rows for a session.

    Args:
        session: with the tokenizer and the limits.
        overflow, stride: see `WindowOptions`.
        prompt: before every text; rows of ids include it already.
        encode: in place of the session's tokenizer, see `TaskResults`.
    """

    def __init__(
        self,
        session: Session,
        *,
        overflow: Overflow,
        stride: int,
        prompt: str = "",
        encode: Callable[[Sequence[str], Overflow, str], list[Encoding]] | None = None,
    ) -> None:
        self._session = session
        self._overflow = overflow
        self._stride = stride
        self._prompt = prompt
        self._encode_texts = encode

    def encode(self, rows: Sequence[Row]) -> list[SplitEncoding | InputError]:
        """For each row, in order: its pieces (one unless it was split), or its error."""
        return [encoded for chunk in _chunks(rows) for encoded in self._encode(chunk)]

    def _encode(self, rows: Sequence[Row]) -> list[SplitEncoding | InputError]:
        try:
            return [*self._encoded(rows)]
        except InputError as error:
            if len(rows) == 1:
                return [error]
        # A row does not fit: try each alone.
        return [self._encode([row])[0] for row in rows]

    def _encoded(self, rows: Sequence[Row]) -> list[SplitEncoding]:
        texts = [row.text for row in rows]
        pairs = [row.text_pair for row in rows if row.text_pair is not None] or None
        if rows[0].input_ids is not None:
            split = [in_one_piece(self._from_ids(row.input_ids or [])) for row in rows]
        elif self._encode_texts is not None:
            encodings = self._encode_texts(texts, self._overflow, self._prompt)
            check_text_lengths([len(encoding) for encoding in encodings], self._session.max_len)
            split = [in_one_piece(encoding) for encoding in encodings]
        elif self._overflow is Overflow.SPLIT:
            split = self._session.split(texts, pairs, stride=self._stride, prompt=self._prompt)
        else:
            encodings = self._session.tokenize(texts, pairs, overflow=self._overflow, prompt=self._prompt)
            split = [in_one_piece(encoding) for encoding in encodings]
        for text in split:
            for piece in text.pieces:
                if self._overflow is Overflow.RECUR:
                    check_document_length(len(piece), self._session.manifest)
                self._check(piece.input_ids)
        return split

    def _from_ids(self, ids: list[int]) -> Encoding:
        is_cut = self._overflow is Overflow.TRUNCATE and len(ids) > self._session.max_len
        if is_cut:
            ids = ids[: self._session.max_len]
        if self._overflow is not Overflow.RECUR:
            check_text_lengths([len(ids)], self._session.max_len)
        return dataclasses.replace(Encoding.of_ids(ids), is_cut=is_cut)

    def _check(self, ids: Sequence[int]) -> None:
        """Refuse rows that would fail a whole batch: an id beyond the vocabulary, no question where it is marked."""
        manifest = self._session.manifest
        if not 0 <= min(ids) <= max(ids) < manifest.vocab_size:
            checked_inputs({manifest.ids: [ids]}, manifest, max_len=len(ids), memory=0)
        check_texts_for_marks([ids], manifest)


def _chunks(rows: Iterable[Row]) -> Iterator[list[Row]]:
    chunk: list[Row] = []
    size = 0
    for row in rows:
        # A very long text is encoded alone: if it is too long, no other is encoded twice.
        if chunk and (len(chunk) == _CHUNK_ROWS or size + size_of_row(row) > _CHUNK_CHARACTERS):
            yield chunk
            chunk, size = [], 0
        chunk.append(row)
        size += size_of_row(row)
    if chunk:
        yield chunk
