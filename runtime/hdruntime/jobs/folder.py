"""The folder beside a job's output that keeps what is done, so that a job that was killed can go on."""

from __future__ import annotations

__all__ = [
    "JobFolder",
    "check_job_folder",
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
from collections.abc import Iterator
from pathlib import Path

from hdruntime.errors import InputError
from hdruntime.jobs.files import (
    FINISHED_FILE,
    JOB_FILE,
    RESULTS_FILE,
    SAVED_FILE,
    damaged,
    identity_in,
    is_published,
    job_folder_path,
    remove_files,
    replace_file,
    saved_in,
    sync_directory,
)
from hdruntime.jobs.identity import Identity, difference
from hdruntime.jobs.lock import LOCK_FILE, held_lock
from hdruntime.jobs.progress import RowCounts
from hdruntime.jobs.receipt import leave_receipt
from hdruntime.jobs.rows import Position
from hdruntime.jobs.saved import Saved, json_from_saved
from hdruntime.jobs.writers import ResultEncoding, check_output, disk_errors_explained

_COMMIT_SECONDS = 0.5
"""Least time between two commits: what a killed job has to do again, and a window."""

_COMMIT_SHARE = 50
"""A commit is followed by this many times its own duration without one: on a slow disk they cost 2%, too."""


def kept_rows(output: Path) -> int:
    """Rows of an unfinished job that are safe."""
    return saved_in(job_folder_path(output)).counts.rows


def was_published(output: Path, identity: Identity) -> bool:
    """Whether the file at `output` is the result of this very job, which was killed before it could tidy up."""
    folder = job_folder_path(output)
    return is_published(folder) and output.exists() and difference(identity_in(folder), identity) is None


def tidy_job_folder(output: Path) -> None:
    """Remove the folder of a job that was killed while it did that itself.

    Raises:
        OutputExistsError: another process is at work on this output.
    """
    folder = job_folder_path(output)
    if folder.is_dir() and not (folder / JOB_FILE).exists():
        with held_lock(folder, output), disk_errors_explained(output):
            if not (folder / JOB_FILE).exists():
                remove_files(folder)


def check_job_folder(output: Path, identity: Identity) -> None:
    """Refuse what `opened_job_folder` would, without making or changing anything.

    Raises:
        OutputExistsError: another process is at work on this output.
        InputError: an unfinished job of other inputs or options is kept there.
    """
    folder = job_folder_path(output)
    if folder.is_dir():
        with held_lock(folder, output):
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
    path = job_folder_path(output)
    with held_lock(path, output):
        if not restart:
            _require_same_job(path, output, identity)
        folder = JobFolder(path, output)
        try:
            folder.begin(identity, fresh=restart or _is_stale(path, output, identity))
            yield folder
        finally:
            folder.close()


class JobFolder:
    """What `opened_job_folder` opens.

    The results are one file that only grows. A commit brings it to the disk and then replaces, in one step, the note
    of how long it is and where in the inputs reading goes on. So the note never tells of results that are not there.

    Attributes:
        saved: what is done; not all of it need be committed.
    """

    def __init__(self, path: Path, output: Path) -> None:
        self._path = path
        self._output = output
        self._results: int | None = None
        self._committed = Saved()
        self._committed_at = time.monotonic()
        self._commit_seconds = 0.0
        self.saved = Saved()

    def begin(self, identity: Identity, *, fresh: bool) -> None:
        """Open the results: those that are committed, or none.

        Raises:
            HdexportError: the folder cannot be written, or has lost results.
        """
        with disk_errors_explained(self._output):
            if fresh:
                remove_files(self._path, keep=(LOCK_FILE,))
                replace_file(self._path / JOB_FILE, json.dumps(identity))
            self.saved = self._committed = saved_in(self._path)
            if self.saved.complete:
                return
            self._results = os.open(self._path / RESULTS_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            if os.fstat(self._results).st_size < self.saved.result_bytes:
                raise damaged(self._path, "results are missing")
            self._cut_results(self._results)

    def append(self, data: bytes, *, position: Position, counts: RowCounts, seconds: float) -> None:
        """Add the results of rows.

        Args:
            data: encoded.
            position: where reading goes on after them.
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
        # One assignment: an interrupt is before it, and what was written is of no account, or after it.
        length = self.saved.result_bytes + len(data)
        self.saved = Saved(position=position, counts=counts, seconds=seconds, result_bytes=length)

    def commit_if_due(self) -> None:
        """Commit, if the last time is long enough ago for what it cost.

        Raises:
            HdexportError: the disk does not take it.
        """
        pause = max(_COMMIT_SECONDS, _COMMIT_SHARE * self._commit_seconds)
        if time.monotonic() - self._committed_at >= pause:
            with disk_errors_explained(self._output):
                self._commit()

    def complete(self) -> None:
        """Commit that there are no more rows.

        Raises:
            HdexportError: the disk does not take it.
        """
        with disk_errors_explained(self._output):
            self.saved = dataclasses.replace(self.saved, complete=True)
            self._commit()

    def publish(self, encoding: ResultEncoding, *, force: bool) -> None:
        """Make the output of the results of a complete job, move it into place and remove the folder.

        After a kill at any step, the same again does the steps that are left.

        Raises:
            OutputExistsError: somebody has put something at the output meanwhile, and it may not be replaced.
            HdexportError: the disk does not take it.
        """
        results, finished = self._path / RESULTS_FILE, self._path / FINISHED_FILE
        with disk_errors_explained(self._output):
            if not is_published(self._path):
                if not finished.exists():
                    encoding.finish(results, finished)
                # Without either, the job counts as published: the one is on the disk before the other goes.
                sync_directory(self._path)
                results.unlink(missing_ok=True)
                leave_receipt(finished, identity_in(self._path), self.saved)
                check_output(self._output, force=force)
                finished.replace(self._output.resolve())
                sync_directory(self._path.parent)
            remove_files(self._path)

    def close(self) -> None:
        """Commit what was appended, if the disk takes it; remove a folder that keeps nothing."""
        if self._results is None:
            return
        if self.saved != self._committed:
            with contextlib.suppress(OSError):
                self._commit()
        os.close(self._results)
        self._results = None
        if not self._committed.counts.rows:
            remove_files(self._path)

    def _commit(self) -> None:
        assert self._results is not None, "a complete job commits nothing"
        began = time.monotonic()
        self._cut_results(self._results)
        os.fsync(self._results)
        replace_file(self._path / SAVED_FILE, json_from_saved(self.saved))
        self._committed = self.saved
        self._committed_at = time.monotonic()
        self._commit_seconds = self._committed_at - began

    def _cut_results(self, results: int) -> None:
        """Drop what was written after the last rows that count."""
        os.ftruncate(results, self.saved.result_bytes)
        os.lseek(results, self.saved.result_bytes, os.SEEK_SET)


def _require_same_job(folder: Path, output: Path, identity: Identity) -> None:
    rows = saved_in(folder).counts.rows
    what = difference(identity_in(folder), identity)
    if rows and what is not None and not is_published(folder):
        raise InputError(
            f"{output} has an unfinished job, {rows} rows of which are in {folder}; this is another one: {what}.\n"
            "Continue that one by its own command, or start this one over it with --restart."
        )


def _is_stale(folder: Path, output: Path, identity: Identity) -> bool:
    """Whether there is nothing in the folder to go on with."""
    if difference(identity_in(folder), identity) is not None:
        return True
    return is_published(folder) and not output.exists()
