"""Notices that an input changes while a job reads it: its size, its time of change, its inode, what was read of it."""

from __future__ import annotations

__all__ = ["InputWatch", "Stamp"]

import logging
from collections.abc import Sequence

from hdruntime.errors import InputError
from hdruntime.jobs.input_files import InputFile
from hdruntime.jobs.places import read_errors_explained
from hdruntime.jobs.row_reader import checksum_before
from hdruntime.jobs.rows import Columns, Position, Row

logger = logging.getLogger(__name__)

Stamp = tuple[int, int]
"""A file's inode, and the time in nanoseconds when that changed, which nobody can set back."""


class InputWatch:
    """Compares a job's inputs with what was found when the job was planned.

    A file of another size or time of change has changed. Where only its inode is another, or only that was touched, as
    a backup, a copy or ``chmod`` does, its content decides: what was read of it is read again, and checksums compared.

    Every method returns in words what has changed; None where nothing has.

    Args:
        files: the job's inputs, as they were found.
        columns: which of their columns are read.
    """

    def __init__(self, files: Sequence[InputFile], columns: Columns) -> None:
        self._files = files
        self._columns = columns
        self._touched: dict[int, Stamp] = {}

    def stamp(self, index: int) -> Stamp:
        """The latest stamp under which a file held what was read of it."""
        return self._touched.get(index, self._files[index].version.stamp)

    def change_since(self, position: Position, stamp: Stamp | None) -> str | None:
        """Of the file in which an earlier process of the job stopped.

        Args:
            position: where it stopped.
            stamp: of the file there and then; None has what was read before compared in any case.
        """
        if not position.offset or stamp == self.stamp(position.file):
            return None
        return self._change_of_content(position)

    def change(self, start: Position, rows: Sequence[Row]) -> str | None:
        """Of the files that rows came from, which have been read.

        Args:
            start: where the first of them begins.
            rows: that follow each other.
        """
        ends = {start.file: start}
        if rows[-1].end.file != start.file:
            ends |= {row.end.file: row.end for row in rows}
        ends[rows[-1].end.file] = rows[-1].end
        changes = (self._change(end, whole=end.file < rows[-1].end.file) for end in ends.values())
        return next(filter(None, changes), None)

    def final_change(self, end: Position) -> str | None:
        """Of any file, when all are read up to `end`."""
        return self.change_of_files() or self._change(end, whole=True)

    def change_of_files(self) -> str | None:
        """Of any file, read or not, as far as its size and its time of change tell."""
        return next(filter(None, (_seen(file)[0] for file in self._files)), None)

    def _change(self, end: Position, *, whole: bool) -> str | None:
        file = self._files[end.file]
        if not (whole or file.place.is_local):
            return None  # a store is asked once, at the file's end, and once more at the job's
        change, stamp = _seen(file)
        if change is not None:
            return change
        # Of a file that was touched, some was in a buffer and not in the checksum yet: so once more at its end.
        if stamp == self.stamp(end.file) and not (whole and end.file in self._touched):
            return None
        self._touched[end.file] = stamp
        return self._change_of_content(end)

    def _change_of_content(self, end: Position) -> str | None:
        file = self._files[end.file]
        logger.info("%s is read again up to row %d, to see whether it has changed", file.name, end.row)
        try:
            if checksum_before(file, self._columns, end.offset) == end.checksum:
                return None
        except InputError:
            pass  # what was read once, and cannot be read again, has changed
        return f"{file.name} has changed: its content is another, though not its size and its time of change"


def _seen(file: InputFile) -> tuple[str | None, Stamp]:
    """What has changed of a file, by its size and its time of change; and its stamp."""
    try:
        with read_errors_explained(file.name):
            now = file.place.version()
    except InputError as error:
        reason = getattr(error.__cause__, "strerror", None) or error
        return f"{file.name} has changed: it cannot be found any more ({reason})", (0, 0)
    change = file.version.change(now)
    if change is None:
        return None, now.stamp
    replaced = " (another file has taken its place)" if now.stamp[0] != file.version.stamp[0] else ""
    return f"{file.name} has changed: {change}{replaced}", now.stamp
