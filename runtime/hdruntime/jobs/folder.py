"""The folder beside a job's output that keeps what is done, so that a job that was killed can go on."""

from __future__ import annotations

__all__ = [
    "JobFolder",
    "check_job_folder",
    "has_job_folder",
    "kept_rows",
    "opened_job_folder",
    "tidy_job_folder",
    "was_published",
]

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from hdruntime.errors import HdexportError, InputError
from hdruntime.jobs.disk_errors import disk_errors_explained
from hdruntime.jobs.files import (
    FINISHED_FILE,
    JOB_FILE,
    LOCK_FILE,
    RANGES_FILE,
    RESULTS_FILE,
    SAVED_FILE,
    OpenFolder,
    damaged,
    opened_folder,
)
from hdruntime.jobs.identity import Identity, difference
from hdruntime.jobs.input_watch import Stamp
from hdruntime.jobs.lock import locked_folder
from hdruntime.jobs.progress import RowCounts
from hdruntime.jobs.receipt import leave_receipt
from hdruntime.jobs.rows import Position
from hdruntime.jobs.saved import Saved, json_from_saved
from hdruntime.jobs.vectors import Ranges
from hdruntime.jobs.writers import ResultEncoding, check_output

_COMMIT_SECONDS = 0.5
"""Least time between two commits: what a killed job has to do again, and a window."""

_COMMIT_SHARE = 50
"""A commit is followed by this many times its own duration without one: on a slow disk they cost 2%, too."""


def has_job_folder(output: Path) -> bool:
    """Whether there is one, of whatever job.

    Raises:
        HdexportError: in its place is something else, or it is another user's.
    """
    with opened_folder(output) as folder:
        return folder is not None


def kept_rows(output: Path) -> int:
    """Rows of an unfinished job that are safe.

    Raises:
        HdexportError: as `has_job_folder`, or the folder is damaged.
    """
    with opened_folder(output) as folder:
        if folder is None:
            return 0
        saved = folder.saved()
        length = max(folder.size_bytes(RESULTS_FILE), folder.size_bytes(FINISHED_FILE) if saved.complete else 0)
        return saved.counts.rows if length >= saved.result_bytes else 0


def was_published(output: Path, identity: Identity) -> bool:
    """Whether the file at `output` is the result of this very job, which was killed before it could tidy up."""
    with opened_folder(output) as folder:
        if folder is None or not (folder.is_published() and output.exists()):
            return False
        return difference(folder.identity(), identity) is None


def tidy_job_folder(output: Path) -> None:
    """Remove the folder of a job that was killed while it did that itself.

    Raises:
        OutputExistsError: another process is at work on this output.
        HdexportError: in the folder's place is something else, or it is another user's.
    """
    with opened_folder(output) as folder:
        if folder is None or folder.has(JOB_FILE):
            return
    with locked_folder(output) as (folder, _), disk_errors_explained(output):
        if not folder.has(JOB_FILE):
            folder.remove_all()


def check_job_folder(output: Path, identity: Identity) -> None:
    """Refuse what `opened_job_folder` would, without making or changing anything.

    Raises:
        OutputExistsError: another process is at work on this output.
        InputError: an unfinished job of other inputs or options is kept there.
    """
    if has_job_folder(output):
        with locked_folder(output) as (folder, _):
            _require_same_job(folder, output, identity)


@contextlib.contextmanager
def opened_job_folder(output: Path, identity: Identity, *, restart: bool) -> Iterator[JobFolder]:
    """The folder of a job, this process's alone; made if there is none.

    If the block raises, what was appended is committed, and the folder stays for the same job to continue; a folder
    without any row goes.

    Args:
        output: what the job shall write.
        identity: of the job.
        restart: throw away what is there.

    Raises:
        OutputExistsError: another process is at work on this output.
        InputError: an unfinished job of other inputs or options is kept there.
        HdexportError: the folder cannot be written.
    """
    with locked_folder(output) as (files, lock):
        if not restart:
            _require_same_job(files, output, identity)
        folder = JobFolder(files, lock, output)
        try:
            folder.begin(identity, fresh=restart or _is_stale(files, output, identity))
            yield folder
        finally:
            folder.close()


class JobFolder:
    """What `opened_job_folder` opens.

    The results are one file that only grows. A commit brings it to the disk and then replaces, in one step, the note
    of how long it is and where in the inputs reading goes on. So the note never tells of results that are not there.

    Attributes:
        path: where it is, for messages.
        saved: what is done; not all of it need be committed.
        ranges: that vectors are quantised with; None where they need none, or no vector is done.
    """

    def __init__(self, files: OpenFolder, lock: int, output: Path) -> None:
        self.path = files.path
        self._files = files
        self._lock = lock
        self._output = output
        self._results: int | None = None
        self._published = False
        self._committed = Saved()
        self._committed_at = time.monotonic()
        self._commit_seconds = 0.0
        self.saved = Saved()
        self.ranges: Ranges | None = None

    def begin(self, identity: Identity, *, fresh: bool) -> None:
        """Open the results: those that are committed, or none.

        Raises:
            HdexportError: the folder cannot be written, or has lost results.
        """
        with disk_errors_explained(self._output):
            if fresh:
                self._files.remove_all(keep=(LOCK_FILE,))
                self._replace(JOB_FILE, json.dumps(identity))
            self.saved = self._committed = self._files.saved()
            self._published = self._files.is_published()
            self.ranges = self._files.ranges()
            if self.saved.complete:
                return
            self._results = self._files.open(RESULTS_FILE, os.O_RDWR | os.O_CREAT)
            if os.fstat(self._results).st_size < self.saved.result_bytes:
                raise damaged(self.path, "results are missing")
            self._cut_results(self._results)

    def append(self, data: bytes, *, position: Position, stamp: Stamp, counts: RowCounts, seconds: float) -> None:
        """Add the results of rows.

        Args:
            data: encoded.
            position: where reading goes on after them.
            stamp: of the file there.
            counts: of all rows before that.
            seconds: that these took.

        Raises:
            HdexportError: the disk does not take them.
        """
        assert self._results is not None, "a complete job appends nothing"
        view = memoryview(data)
        with disk_errors_explained(self._output):
            while view:
                view = view[os.write(self._results, view) :]
        # One assignment: an interrupt is before it, and what was written does not count, or after it.
        length = self.saved.result_bytes + len(data)
        self.saved = Saved(position=position, stamp=stamp, counts=counts, seconds=seconds, result_bytes=length)

    def keep_ranges(self, ranges: Ranges) -> None:
        """Keep what vectors are quantised with, before the first of them is appended.

        Raises:
            HdexportError: the disk does not take it.
        """
        with disk_errors_explained(self._output):
            self._replace(RANGES_FILE, json.dumps(ranges.tolist()))
        self.ranges = ranges

    def commit_if_due(self) -> None:
        """Commit, if the last time is long enough ago for what it cost.

        Raises:
            HdexportError: the disk does not take it, or somebody has removed what is kept.
        """
        pause = max(_COMMIT_SECONDS, _COMMIT_SHARE * self._commit_seconds)
        if time.monotonic() - self._committed_at >= pause:
            with disk_errors_explained(self._output):
                self._commit()

    def complete(self) -> None:
        """Commit that there are no more rows.

        Raises:
            HdexportError: as `commit_if_due`.
        """
        with disk_errors_explained(self._output):
            self.saved = dataclasses.replace(self.saved, complete=True)
            self._commit()

    def publish(self, encoding: ResultEncoding, *, force: bool, metadata: Mapping[str, str]) -> None:
        """Make the output of the results of a complete job, move it into place and remove the folder.

        After a kill at any step, the same again does the steps that are left.

        Raises:
            OutputExistsError: somebody has put something at the output meanwhile, and it may not be replaced.
            HdexportError: the disk does not take it, or somebody has removed what is kept.
        """
        with disk_errors_explained(self._output):
            if not self._published:
                if not self._files.has(FINISHED_FILE):
                    self._require_in_place()
                    encoding.finish(self._files, RESULTS_FILE, FINISHED_FILE, metadata=metadata)
                # Without either, the job counts as published: the one is on the disk before the other goes.
                self._files.sync()
                self._files.remove(RESULTS_FILE)
                self._leave_receipt()
                check_output(self._output, force=force)
                self._files.move_out(FINISHED_FILE, self._output.resolve())
            self._files.remove_all()

    def close(self) -> None:
        """Commit what was appended, if the disk takes it; remove a folder that keeps nothing."""
        if self._results is None:
            return
        if self.saved != self._committed:
            with contextlib.suppress(OSError, HdexportError):
                self._commit()
        os.close(self._results)
        self._results = None
        if not self._committed.counts.rows:
            self._files.remove_all()

    def _commit(self) -> None:
        assert self._results is not None, "a complete job commits nothing"
        began = time.monotonic()
        self._require_in_place()
        self._cut_results(self._results)
        os.fsync(self._results)
        try:
            self._replace(SAVED_FILE, json_from_saved(self.saved))
        except FileNotFoundError:
            self._require_in_place()  # it may have been removed this moment
            raise
        self._committed = self.saved
        self._committed_at = time.monotonic()
        self._commit_seconds = self._committed_at - began

    def _cut_results(self, results: int) -> None:
        """Drop what was written after the last rows that count."""
        os.ftruncate(results, self.saved.result_bytes)
        os.lseek(results, self.saved.result_bytes, os.SEEK_SET)

    def _replace(self, name: str, text: str) -> None:
        with self._files.replacing(name) as file:
            file.write(text.encode())

    def _leave_receipt(self) -> None:
        finished = self._files.open(FINISHED_FILE, os.O_RDONLY)
        try:
            leave_receipt(finished, self._files.identity(), self.saved)
        finally:
            os.close(finished)

    def _require_in_place(self) -> None:
        """Refuse to count on what somebody has removed, or put something else in its place, since it was opened."""
        if not self._files.is_in_place():
            raise HdexportError(
                f"{self.path}, where the job keeps what is done, was removed or replaced while it ran.\n"
                "Put it back, or run the same command again: it starts over."
            )
        if self._results is not None and not self._files.holds(RESULTS_FILE, self._results):
            raise HdexportError(
                f"{self.path / RESULTS_FILE}, which the job writes, was removed or replaced while it ran.\n"
                "Put it back, or start over with --restart."
            )
        if not self._files.holds(LOCK_FILE, self._lock):
            raise HdexportError(
                f"{self.path / LOCK_FILE} was removed while the job ran: another one may be at work there.\n"
                "See that none is, and run the same command again."
            )


def _require_same_job(folder: OpenFolder, output: Path, identity: Identity) -> None:
    rows = folder.saved().counts.rows
    what = difference(folder.identity(), identity)
    if rows and what is not None and not folder.is_published():
        raise InputError(
            f"{output} has an unfinished job, {rows} rows of which are in {folder.path}; this is another job: {what}.\n"
            "Continue that one by its own command, or start this one over it with --restart."
        )


def _is_stale(folder: OpenFolder, output: Path, identity: Identity) -> bool:
    """Whether there is nothing in the folder to go on with."""
    if difference(folder.identity(), identity) is not None:
        return True
    return folder.is_published() and not output.exists()
