"""Rows of Parquet files, a few at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from hdruntime.errors import InputError
from hdruntime.jobs.input_files import InputFile
from hdruntime.jobs.places import LocalFile, Place, read_errors_explained

_BATCH_ROWS = 256
"""Rows decoded at a time: of long documents, a few tens of megabytes."""

_PLAIN = (
    pa.types.is_null,
    pa.types.is_boolean,
    pa.types.is_integer,
    pa.types.is_floating,
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_string_view,
)
"""Types whose values convert to Python without loss."""


@dataclass(frozen=True)
class Undecodable:
    """Stands for a string that is not UTF-8, since Parquet writers do not check strings, or for a time too late.

    Attributes:
        reason: the column's, for a message.
    """

    reason: str


@dataclass(frozen=True)
class Cell:
    """A value of a type that Python does not hold without loss, as Arrow has it."""

    scalar: pa.Scalar

    def __reduce__(self) -> tuple[Callable[[pa.Array], Cell], tuple[pa.Array]]:
        # Arrow pickles Python's value of a scalar, without its nanoseconds, and no list of UUIDs.
        return _cell_of_array, (pa.repeat(self.scalar, 1),)

    def __str__(self) -> str:
        return str(self.in_python())

    def in_python(self) -> object:
        """The value in Python; as text if Python has no such value, such as a time in nanoseconds."""
        kind = self.scalar.type
        is_time = pa.types.is_time(kind) or pa.types.is_timestamp(kind)
        try:
            # Python would leave nanoseconds out.
            return self._text() if is_time and kind.unit == "ns" else self.scalar.as_py()
        except UnicodeDecodeError as error:
            return Undecodable(f"is not valid UTF-8: its byte {error.start + 1}, {error.reason}")
        except OverflowError:
            return Undecodable("holds a time outside of the years 1 to 9999")
        except ValueError:
            return self._text()

    def _text(self) -> str:
        return str(self.scalar.cast(pa.string()).as_py())


def _cell_of_array(array: pa.Array) -> Cell:
    return Cell(array[0])


def parquet_values(file: InputFile, names: Sequence[str], *, start: int = 0) -> Iterator[dict[str, Any]]:
    """The named columns of every row; `Undecodable` in place of a string that is not UTF-8.

    Texts, numbers and lists of numbers are Python values; others are a `Cell`. None is null.

    Args:
        file: to read.
        names: of the columns.
        start: number of rows to skip; earlier row groups are not read.

    Raises:
        InputError: the file cannot be read to its end.
    """
    with read_errors_explained(file.name):
        try:
            with opened_parquet(file.place) as opened:
                yield from _rows(opened, names, start)
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"{file.name} cannot be read to its end: {error}.\nWrite the file again.") from error


def opened_parquet(place: Place) -> Any:
    """The file, opened by Arrow.

    Raises:
        ArrowException, OSError: it cannot be read.
    """
    return pa.parquet.ParquetFile(place.file if isinstance(place, LocalFile) else place.opened(), pre_buffer=False)


def _rows(opened: Any, names: Sequence[str], start: int) -> Iterator[dict[str, Any]]:
    group, left_out = _group_of_row(opened.metadata, start)
    # One thread, unbuffered: memory holds only the pages in use, however large a row group is. A scan of
    # pyarrow.dataset reads ahead and cannot begin at a row group.
    batches = opened.iter_batches(
        batch_size=_BATCH_ROWS,
        row_groups=list(range(group, opened.metadata.num_row_groups)),
        columns=names,
        use_threads=False,
    )
    for batch in batches:
        rest = batch.slice(left_out)
        left_out = max(0, left_out - batch.num_rows)
        columns = [_cells(rest.column(name)) for name in names]
        for row in zip(*columns, strict=True) if columns else [()] * len(rest):
            yield dict(zip(names, row, strict=True))


def _group_of_row(metadata: Any, row: int) -> tuple[int, int]:
    """The row group that holds a row, and the row's index in it."""
    for group in range(metadata.num_row_groups):
        rows = metadata.row_group(group).num_rows
        if row < rows:
            return group, row
        row -= rows
    return metadata.num_row_groups, 0


def _cells(column: Any) -> list[Any]:
    kind = column.type
    while hasattr(kind, "value_type") and not isinstance(kind, pa.BaseExtensionType):  # of lists and dictionaries
        kind = kind.value_type
    if not any(is_one(kind) for is_one in _PLAIN):
        return [Cell(scalar) if scalar.is_valid else None for scalar in column]
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        return [Cell(scalar).in_python() for scalar in column]
