"""What a row of a batch job is: where its parts are, where it ends in its file, and why it may have failed."""

from __future__ import annotations

__all__ = ["Columns", "ErrorKind", "Position", "Row"]

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from hdruntime.bundle.manifest import LargeCount


class ErrorKind(str, Enum):
    """Why rows fail, for counting; the row's own error says it in full."""

    UNREADABLE = "unreadable"
    """The row is no JSON object, no CSV record of the header's length or no UTF-8, or longer than is read of a line."""
    COLUMN = "column"
    """A column is missing, or holds nothing usable."""
    INPUT = "input"
    """The text or its ids do not fit the bundle, mostly because there are too many tokens."""
    NOT_FINITE = "not_finite"
    """The model's output holds NaN or infinity."""
    BACKEND = "backend"
    """The backend failed on this row."""


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Where a row's parts are. A line of plain text has one column: the text.

    Attributes:
        text: column of the text.
        text_pair: column of the second text, for tasks on pairs.
        id: column of the row's id, a string or an integer; "" numbers rows from 0. None: the column ``id`` if every
            input has one, else numbers.
        input_ids: column of a list of token ids, special tokens included, which then takes the text's place.
        keep: columns that the output has as well; None for all.
    """

    text: str = "text"
    text_pair: str | None = None
    id: str | None = None
    input_ids: str | None = None
    keep: tuple[str, ...] | None = ()

    @property
    def content(self) -> tuple[str, ...]:
        """The columns of what the model reads."""
        if self.input_ids is not None:
            return (self.input_ids,)
        return (self.text,) if self.text_pair is None else (self.text, self.text_pair)

    @property
    def wanted(self) -> tuple[str, ...]:
        """All that are read."""
        return tuple(dict.fromkeys(filter(None, (self.id, *self.content, *(self.keep or ())))))


class Position(NamedTuple):
    """Between two rows: reading can begin there. A tuple, because every row has one, and these are made the fastest.

    Attributes:
        file: index of the file.
        offset: bytes of that file, decompressed, that come before; for Parquet, rows.
        line: lines of that file that come before; for Parquet, 0.
        row: rows of all files that come before.
        checksum: CRC-32 of what comes before in that file: of its bytes; for Parquet, of the values that were read.
    """

    file: LargeCount = 0
    offset: LargeCount = 0
    line: LargeCount = 0
    row: LargeCount = 0
    checksum: LargeCount = 0


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row as it was read.

    Attributes:
        id: None where it could not be read.
        text, text_pair: what the model reads,
        input_ids: unless it reads these.
        kept: values of the columns that the output has as well, None for those that could not be read; None for no
            columns.
        error: why there is nothing to read, else None; of kind `error_kind`.
        end: where the next row begins.
    """

    id: str | int | None
    text: str = ""
    text_pair: str | None = None
    input_ids: list[int] | None = None
    kept: Mapping[str, object] | None = None
    error: str | None = None
    error_kind: ErrorKind = ErrorKind.COLUMN
    end: Position = field(default=Position(), compare=False, repr=False)
