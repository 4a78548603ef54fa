"""Detects changes of inputs: by size and modification time, and of a job that continues also by a checksum."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from hdruntime.errors import InputChangedError, InputError
from hdruntime.jobs.input_files import InputFile
from hdruntime.jobs.row_reader import checksum_before, read_rows
from hdruntime.jobs.rows import Columns, Position, Row
from hdruntime.jobs.shards import Shard, split_into_shards

logger = logging.getLogger(__name__)


class InputWatch:
    """Compares a job's inputs with the files at the time when the job was planned; a change is an InputChangedError.

    A file with another size or modification time has changed. When a job continues in the middle of a local file, the
    part that an earlier process read is read again, and its checksum is compared. Files without rows must not get any.
    """

    def __init__(self, files: Sequence[InputFile], columns: Columns, *, without_rows: Sequence[InputFile] = ()) -> None:
        self._files = files
        self._columns = columns
        self._without_rows = without_rows

    def shards(self, start: Position, *, characters: int) -> Iterator[Shard]:
        """The rows after a position, in shards of about so many characters, from files that do not change meanwhile."""
        if start.offset and self._files[start.file].source.is_local:
            _raise_change(self._change_before(start))
        try:
            rows = read_rows(self._files, columns=self._columns, start=start)
            for shard in split_into_shards(rows, characters=characters):
                self.require_unchanged(start, shard.rows)
                yield shard
                start = shard.end
        except InputError:
            # A change may be the cause.
            _raise_change(self._change_of_files(self._files))
            raise

    def require_unchanged(self, start: Position, rows: Sequence[Row]) -> None:
        """Raise if a file changed from which consecutive rows were read, the first of which begins at `start`."""
        last = rows[-1].end.file
        indices = {start.file, last} if start.file == last else {start.file, *(row.end.file for row in rows)}
        # A store is queried only at the end of a file and of the job.
        looked_at = [self._files[i] for i in sorted(indices) if i < last or self._files[i].source.is_local]
        _raise_change(self._change_of_files(looked_at))

    def require_all_unchanged(self) -> None:
        """Raise if any file changed, when all are read, or if a file without rows got its first row."""
        growth = next(filter(None, map(_growth, self._without_rows)), None)
        _raise_change(self._change_of_files(self._files) or growth)

    def _change_of_files(self, files: Sequence[InputFile]) -> str | None:
        return next(filter(None, map(_change, files)), None)

    def _change_before(self, position: Position) -> str | None:
        file = self._files[position.file]
        logger.info("%s is read again up to row %d to detect changes", file.name, position.row)
        try:
            if checksum_before(file, self._columns, position.offset) == position.checksum:
                return None
        except InputError:
            pass  # a file that can no longer be read has changed
        return f"{file.name} has changed: its content differs, though its size and modification time do not"


def _raise_change(change: str | None) -> None:
    if change is not None:
        raise InputChangedError(f"{change}.")


def _growth(file: InputFile) -> str | None:
    """The change of a file without rows; to remove or empty the file changes nothing."""
    try:
        now = file.version_now()
    except InputError:
        return None
    change = file.version.change(now) if now.size_bytes else None
    return change and f"{file.name}, which had no rows, has changed: {change}"


def _change(file: InputFile) -> str | None:
    """How a file changed, by size and modification time."""
    try:
        change = file.version.change(file.version_now())
    except InputError as error:
        reason = getattr(error.__cause__, "strerror", None) or error
        return f"{file.name} has changed: it can no longer be found ({reason})"
    return change and f"{file.name} has changed: {change}"
