"""A row of a batch job: its columns, where it ends in its file, and why it may have failed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from hdruntime.bundle.checked_json import LargeCount
from hdruntime.errors import Message
from hdruntime.tasks.task import Text

ID = "id"
"""Column of the ids, unless another is named."""


class ErrorKind(StrEnum):
    """Why rows fail, for counting; the row's own error has the details."""

    UNREADABLE = "unreadable"
    """The row is not a JSON object, not a CSV record of the header's length, not UTF-8, or has too long a line."""
    COLUMN = "column"
    """A column is missing or has an invalid value."""
    INPUT = "input"
    """The text or its ids do not fit the bundle, mostly because they have too many tokens."""
    NOT_FINITE = "not_finite"
    """The model's output holds NaN or infinity."""
    BACKEND = "backend"
    """The backend failed on this row."""


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The columns of a row. A line of plain text has one column: the text.

    Attributes:
        text: column of the text.
        text_pair: column of the second text, for tasks on pairs.
        id: column of the row's id, of any type; "" numbers rows from 0. None: the column ``id`` if an input has one;
            else rows are numbered, and a later row with an ``id`` fails.
        input_ids: column of a list of token ids, special tokens included, instead of a text.
        spans: column of a list of (start, end) in characters of the text, for late chunking; set by `plan_job`.
        keep: columns that are copied to the output; None for all.
        keeps_all: whether `keep` is all columns that were found, set by `resolved_columns`; rows report others.
    """

    text: str = "text"
    text_pair: str | None = None
    id: str | None = None
    input_ids: str | None = None
    spans: str | None = None
    keep: tuple[str, ...] | None = ()
    keeps_all: bool = False

    @property
    def content(self) -> tuple[str, ...]:
        """The columns that the model reads."""
        if self.input_ids is not None:
            return (self.input_ids,)
        return (self.text,) if self.text_pair is None else (self.text, self.text_pair)

    @property
    def wanted(self) -> tuple[str, ...]:
        """All columns that are read."""
        # A column may have the empty name, as the index that pandas writes to CSV; as `id` it numbers rows.
        names = (self.id or None, *self.content, self.spans, *(self.keep or ()))
        return tuple(dict.fromkeys(name for name in names if name is not None))


class Position(NamedTuple):
    """A place between two rows, where reading can begin. A tuple, which is fast to make, as every row has one.

    Attributes:
        file: index of the file.
        offset: bytes of that file before it, decompressed; for Parquet, rows.
        line: lines of that file before it; for Parquet, 0.
        row: rows of all files before it.
        checksum: CRC-32 of that file's bytes before it; for Parquet, of the values that were read.
    """

    file: LargeCount = 0
    offset: LargeCount = 0
    line: LargeCount = 0
    row: LargeCount = 0
    checksum: LargeCount = 0


class Row(Text, frozen=True, kw_only=True):
    """A text, a pair or ids as they were read.

    Attributes:
        id: its number, a value of JSON, or as `cells_of_column` gives it; None where it could not be read.
        kept: values of kept columns; None for values that could not be read. Columns of Parquet stay columns, in which
            the row has a place: `hdruntime.jobs.kept_columns.AS_COLUMNS` -> a `KeptRow`.
        dropped: if all columns are kept, columns of this row that the output lacks.
        error: why the row cannot be read, else None; of kind `error_kind`.
        end: where the next row begins.
    """

    id: object
    kept: Mapping[str, object] = {}
    dropped: tuple[str, ...] = ()
    error: Message | None = None
    error_kind: ErrorKind = ErrorKind.COLUMN
    end: Position = Position()
