"""The folder beside a job's output that keeps its rows, so that a killed job can continue; the standard output."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from hdruntime.errors import HdexportError, InputError
from hdruntime.jobs.files import (
    FINISHED_FILE,
    JOB_FILE,
    LOCK_FILE,
    RANGES_FILE,
    RESULTS_FILE,
    SAVED_FILE,
    OpenFolder,
    damaged,
    disk_errors_explained,
    locked_folder,
    opened_folder,
)
from hdruntime.jobs.identity import Identity, difference, has_receipt, leave_receipt, receipt_of
from hdruntime.jobs.progress import Saved, json_from_saved
from hdruntime.jobs.vectors import Ranges
from hdruntime.jobs.writers import STDOUT, ResultEncoding, check_output

_COMMIT_SECONDS = 0.5
"""Minimum time between two commits. A killed job repeats this much, and a portion."""

_COMMIT_SHARE = 50
"""The pause after a commit is at least this many times its duration: even on a slow disk, commits cost at most 2%."""


def kept_rows(output: Path) -> int:
    """Rows of an unfinished job that are safe.

    Raises:
        HdexportError: as `opened_folder`, or the folder is damaged.
    """
    with opened_folder(output) as folder:
        if folder is None:
            return 0
        saved = folder.saved()
        is_finished = saved.complete and folder.has(FINISHED_FILE)
        return saved.counts.rows if is_finished or folder.size_bytes(RESULTS_FILE) >= saved.result_bytes else 0


def check_place(output: Path, *, force: bool) -> None:
    """Refuse an output that no job may write; remove the folder of a job that was killed while it removed that itself.

    Raises:
        InputError, OutputExistsError: as `check_output`; another process is writing this output.
        HdexportError: as `opened_folder`.
    """
    with opened_folder(output) as folder:
        has_job = folder is not None and folder.has(JOB_FILE)
    if folder is not None and not has_job:
        with disk_errors_explained(output), alone(output):
            pass
    # `check_job`, which knows the job's identity, checks files that this job itself may have put there.
    check_output(output, force=force or has_job or has_receipt(output))


def check_job(output: Path, identity: Identity, *, force: bool, restart: bool) -> Saved | None:
    """Refuse jobs that `opened_job_folder` would refuse, without making or changing anything.

    Returns:
        the job's outcome, if it is done already and its output is there.

    Raises:
        InputError: an unfinished job of other inputs or options is kept there.
        OutputExistsError: the output is another job's and may not be replaced, or another process is writing it.
        HdexportError: as `opened_folder`, or the folder is damaged.
    """
    with opened_folder(output) as folder:
        done = receipt_of(output, identity) if folder is None and not (force or restart) else None
        # A job that was killed before it could remove its folder published its output, too.
        is_own = done is not None or (
            folder is not None
            and not restart
            and folder.is_published()
            and output.exists()
            and difference(folder.identity(), identity) is None
        )
    if not is_own:
        check_output(output, force=force)
    if folder is not None and not restart:
        with locked_folder(output) as (folder, _):
            _require_same_job(folder, output, identity)
    return done


@contextlib.contextmanager
def alone(output: Path) -> Iterator[None]:
    """Hold the lock of an output, without a job.

    Raises:
        OutputExistsError: another process is writing this output.
    """
    with locked_folder(output) as (folder, _):
        yield
        if not folder.has(JOB_FILE):
            folder.remove_all()


def is_jobs_own(output: Path, identity: Identity) -> bool:
    """Whether a place on this machine is free, or holds the output or the unfinished rows of that job.

    Raises:
        HdexportError: as `opened_folder`, or the folder is damaged.
    """
    with opened_folder(output) as folder:
        if folder is not None and folder.has(JOB_FILE):
            return difference(folder.identity(), identity) is None
    return not output.exists() or receipt_of(output, identity) is not None


@contextlib.contextmanager
def opened_job_folder(output: Path, identity: Identity, *, restart: bool) -> Iterator[JobFolder]:
    """The folder of a job, for this process alone; created if it does not exist.

    If the block raises, appended rows are committed, and the folder stays for the same job to continue; a folder
    without any row is removed.

    Args:
        output: of the job.
        identity: of the job.
        restart: discard rows that are there.

    Raises:
        OutputExistsError: another process is writing this output.
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
    """The folder that `opened_job_folder` opens.

    The results are one file that only grows. A commit brings it to the disk and then atomically replaces the record of
    its length and of where reading continues. So the record never describes results that are not on the disk.

    Attributes:
        path: where it is, for messages.
        saved: the rows, committed or not.
        ranges: for quantised vectors; None if these need no ranges, or no vector is done.
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
        """Open the committed results, or start without any.

        Raises:
            HdexportError: the folder cannot be written, or results are missing.
        """
        with disk_errors_explained(self._output):
            if fresh:
                self._files.remove_all(keep=(LOCK_FILE,))
                self._replace(JOB_FILE, json.dumps(identity))
            self.saved = self._committed = self._files.saved()
            self._published = self._files.is_published()
            self.ranges = self._files.ranges(self.saved.ranges_checksum)
            if self.saved.complete:
                return
            self._results = self._files.open(RESULTS_FILE, os.O_RDWR | os.O_CREAT)
            if os.fstat(self._results).st_size < self.saved.result_bytes:
                raise damaged(self.path, "results are missing")
            self._cut_results(self._results)

    def append(self, data: bytes) -> None:
        """Add encoded results of rows, which count when `saved` is replaced.

        Raises:
            HdexportError: the disk does not take them.
        """
        assert self._results is not None, "a complete job appends nothing"
        view = memoryview(data)
        with disk_errors_explained(self._output):
            while view:
                view = view[os.write(self._results, view) :]

    def keep_ranges(self, ranges: Ranges) -> None:
        """Keep the ranges of quantised vectors, before the first vector is appended.

        Raises:
            HdexportError: the disk does not take it.
        """
        with disk_errors_explained(self._output):
            content = json.dumps(ranges.tolist())
            self._replace(RANGES_FILE, content)
        self.ranges = ranges
        self.saved = dataclasses.replace(self.saved, ranges_checksum=zlib.crc32(content.encode()))

    def commit_if_due(self) -> None:
        """Commit if enough time has passed since the last commit.

        Raises:
            HdexportError: the disk does not take it, or the kept rows were removed.
        """
        pause = max(_COMMIT_SECONDS, _COMMIT_SHARE * self._commit_seconds)
        if time.monotonic() - self._committed_at >= pause:
            with disk_errors_explained(self._output):
                self._commit()

    def complete(self) -> None:
        """Commit that all rows are done.

        Raises:
            HdexportError: as `commit_if_due`.
        """
        with disk_errors_explained(self._output):
            self.saved = dataclasses.replace(self.saved, complete=True)
            self._commit()

    def publish(self, encoding: ResultEncoding, *, force: bool, metadata: Mapping[str, str]) -> None:
        """Make the output of a complete job, move it into place and remove the folder.

        After a kill at any step, the same call does the remaining steps.

        Raises:
            OutputExistsError: the output has appeared meanwhile and may not be replaced.
            HdexportError: the disk does not take it, or the kept rows were removed.
        """
        with disk_errors_explained(self._output):
            if not self._published:
                if not self._files.has(FINISHED_FILE):
                    self._require_in_place()
                    encoding.finish(self._files, metadata=metadata)
                # Without either file, the job counts as published, so one is on the disk before the other is removed.
                self._files.sync()
                self._files.remove(RESULTS_FILE)
                self._leave_receipt()
                check_output(self._output, force=force)
                self._files.move_out(self._output.resolve())
            self._files.remove_all()

    def close(self) -> None:
        """Commit appended rows, if the disk takes them; remove a folder without rows."""
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
            self._require_in_place()  # it may just have been removed
            raise
        self._committed = self.saved
        self._committed_at = time.monotonic()
        self._commit_seconds = self._committed_at - began

    def _cut_results(self, results: int) -> None:
        """Drop bytes after the last row that counts."""
        os.ftruncate(results, self.saved.result_bytes)
        os.lseek(results, self.saved.result_bytes, os.SEEK_SET)

    def _replace(self, name: str, text: str) -> None:
        with self._files.replacing(name) as file:
            file.write(text.encode())

    def _leave_receipt(self) -> None:
        finished = self._files.open(FINISHED_FILE, os.O_RDONLY, may_be_directory=True)
        try:
            leave_receipt(finished, self._files.identity(), self.saved)
        finally:
            os.close(finished)

    def _require_in_place(self) -> None:
        """Refuse to rely on files that were removed or replaced since they were opened."""
        if not self._files.is_in_place():
            raise HdexportError(
                f"{self.path}, where the job keeps its rows, was removed or replaced while it ran.\n"
                "Put it back, or run the same command again: it starts over."
            )
        if self._results is not None and not self._files.holds(RESULTS_FILE, self._results):
            raise HdexportError(
                f"{self.path / RESULTS_FILE}, which the job writes, was removed or replaced while it ran.\n"
                "Put it back, or start over with --restart."
            )
        if not self._files.holds(LOCK_FILE, self._lock):
            raise HdexportError(
                f"{self.path / LOCK_FILE} was removed while the job ran: another job may be writing there.\n"
                "Make sure that no other job is, and run the same command again."
            )


def _require_same_job(folder: OpenFolder, output: Path, identity: Identity) -> None:
    rows = folder.saved().counts.rows
    what = difference(folder.identity(), identity)
    if rows and what is not None and not folder.is_published():
        raise InputError(
            f"{output} has an unfinished job with {rows} rows in {folder.path}; this is another job: {what}.\n"
            "Continue that job by its own command, or discard it and start this one with --restart."
        )


def _is_stale(folder: OpenFolder, output: Path, identity: Identity) -> bool:
    """Whether the folder has nothing to continue from."""
    return difference(folder.identity(), identity) is not None or (folder.is_published() and not output.exists())


class StandardOutput:
    """The standard output in place of a `JobFolder`: nothing is kept, so a job that is stopped starts over.

    Attributes:
        path: for messages.
        saved: the rows.
        ranges: for quantised vectors.
    """

    path = STDOUT
    saved = Saved()
    ranges: Ranges | None = None

    def append(self, data: bytes) -> None:
        """Write encoded results of rows.

        Raises:
            BrokenPipeError: the reader is gone.
        """
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()

    def keep_ranges(self, ranges: Ranges) -> None:
        """Remember them."""
        self.ranges = ranges

    def commit_if_due(self) -> None:
        """Nothing is kept."""

    def complete(self) -> None:
        """Nothing is kept."""

    def publish(self, encoding: ResultEncoding, *, force: bool, metadata: Mapping[str, str]) -> None:
        """Nothing is left to do."""
