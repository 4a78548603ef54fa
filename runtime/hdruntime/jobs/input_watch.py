"""Detects changes of inputs during a job, by size, modification time, inode and checksum of the part that was read."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence

from hdruntime.errors import InputChangedError, InputError
from hdruntime.jobs.input_files import InputFile
from hdruntime.jobs.row_reader import checksum_before, read_rows
from hdruntime.jobs.rows import Columns, Position, Row
from hdruntime.jobs.shards import Shard, split_into_shards

logger = logging.getLogger(__name__)

Stamp = tuple[int, int]
"""A file's inode and its change time in nanoseconds, which programs cannot set."""


class InputWatch:
    """Compares a job's inputs with the files at the time when the job was planned; a change is an InputChangedError.

    A file with another size or modification time has changed. If only its inode or the inode's change time differs, as
    after a backup, a copy or ``chmod``, the content decides: the read part is read again, and checksums are compared.
    Files that had no row then must not have one now. Rows may be read in one thread and checked again in another.
    """

    def __init__(self, files: Sequence[InputFile], columns: Columns, *, without_rows: Sequence[InputFile] = ()) -> None:
        self._files = files
        self._columns = columns
        self._without_rows = without_rows
        self._touched: dict[int, Stamp] = {}
        self._lock = threading.Lock()

    def shards(self, start: Position, stamp: Stamp | None, *, characters: int) -> Iterator[Shard]:
        """The rows after a position, in shards of about so many characters, from files that do not change meanwhile.

        The stamp is that of the file at the position when an earlier process of the job stopped there; None compares
        checksums in any case.
        """
        if start.offset and stamp != self.stamp(start.file):
            _refuse(self._change_of_content(start))
        try:
            rows = read_rows(self._files, columns=self._columns, start=start)
            for shard in split_into_shards(rows, characters=characters):
                self.require_unchanged(start, shard.rows)
                yield shard
                start = shard.end
        except InputError:
            # A change may be the cause.
            _refuse(self._change_of_files())
            raise

    def stamp(self, index: int) -> Stamp:
        """The latest stamp of a file that is known to be unchanged."""
        return self._touched.get(index, self._files[index].version.stamp)

    def require_unchanged(self, start: Position, rows: Sequence[Row]) -> None:
        """Refuse a change of the files of consecutive rows that were read, the first of which begins at `start`."""
        ends = {start.file: start}
        if rows[-1].end.file != start.file:
            ends |= {row.end.file: row.end for row in rows}
        ends[rows[-1].end.file] = rows[-1].end
        changes = (self._change(end, whole=end.file < rows[-1].end.file) for end in ends.values())
        _refuse(next(filter(None, changes), None))

    def require_all_unchanged(self, end: Position) -> None:
        """Refuse a change of any file, when all are read up to `end`, and a first row in a file that had none."""
        grown = next(filter(None, map(_growth, self._without_rows)), None)
        _refuse(self._change_of_files() or self._change(end, whole=True) or grown)

    def _change_of_files(self) -> str | None:
        """A change of any file, read or not, by size and modification time."""
        return next(filter(None, (_seen(file)[0] for file in self._files)), None)

    def _change(self, end: Position, *, whole: bool) -> str | None:
        file = self._files[end.file]
        if not (whole or file.source.is_local):
            return None  # a store is queried only at the end of the file and of the job
        # The thread that finds a new stamp compares the content before any other takes the stamp for a known one.
        with self._lock:
            change, stamp = _seen(file)
            if change is not None:
                return change
            # Part of a touched file was buffered and not in the checksum yet: compare once more at its end.
            if stamp == self.stamp(end.file) and not (whole and end.file in self._touched):
                return None
            change = self._change_of_content(end)
            if change is None:
                self._touched[end.file] = stamp
            return change

    def _change_of_content(self, end: Position) -> str | None:
        file = self._files[end.file]
        logger.info("%s is read again up to row %d to detect changes", file.name, end.row)
        try:
            if checksum_before(file, self._columns, end.offset) == end.checksum:
                return None
        except InputError:
            pass  # a file that can no longer be read has changed
        return f"{file.name} has changed: its content differs, though its size and modification time do not"


def _refuse(change: str | None) -> None:
    if change is not None:
        raise InputChangedError(change)


def _growth(file: InputFile) -> str | None:
    """The change of a file without rows; to remove or empty it changes nothing."""
    try:
        now = file.version_now()
    except InputError:
        return None
    change = file.version.change(now) if now.size_bytes else None
    return change and f"{file.name}, which had no rows, has changed: {change}"


def _seen(file: InputFile) -> tuple[str | None, Stamp]:
    """A file's change, by size and modification time, and its stamp."""
    try:
        now = file.version_now()
    except InputError as error:
        reason = getattr(error.__cause__, "strerror", None) or error
        return f"{file.name} has changed: it can no longer be found ({reason})", (0, 0)
    change = file.version.change(now)
    if change is None:
        return None, now.stamp
    replaced = " (another file has replaced it)" if now.stamp[0] != file.version.stamp[0] else ""
    return f"{file.name} has changed: {change}{replaced}", now.stamp
