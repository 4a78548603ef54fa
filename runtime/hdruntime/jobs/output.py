"""A job's output: its place, the folder beside it that keeps rows until it is whole, its receipt, and its upload.

The standard output, a file or directory of this machine, and a URL are three places. All answer the same questions: may
this job write there, what is kept there, is it done already, and how are results appended and published.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import logging
import os
import shlex
import shutil
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from hdruntime.errors import DamagedJobError, HdexportError, InputError, OutputExistsError
from hdruntime.jobs.checksums import (
    Checksum,
    checksum_at,
    checksum_of,
    json_with_checksum,
    values_with_checksum,
)
from hdruntime.jobs.files import (
    FINISHED_FILE,
    JOB_FILE,
    LOCK_FILE,
    PART_FILE,
    RANGES_FILE,
    RESULTS_FILE,
    SAVED_FILE,
    STORED_RANGES,
    OpenFolder,
    damaged,
    disk_errors_explained,
    job_folder_path,
    locked_folder,
    opened_folder,
)
from hdruntime.jobs.identity import Identity, difference
from hdruntime.jobs.part_file import bytes_of_rows, rows_of_bytes
from hdruntime.jobs.progress import Saved, SavedPart, json_from_saved, saved_from_json
from hdruntime.jobs.rows import Position
from hdruntime.jobs.shards import Part
from hdruntime.jobs.sources import filesystem_of, special_kind
from hdruntime.jobs.vectors import Ranges
from hdruntime.jobs.writers import ResultEncoding, ResultFormat, ResultRows, is_part
from hdruntime.text.ranges import RANGES_KEY, RANGES_SUFFIX, write_ranges

logger = logging.getLogger(__name__)

STDOUT = Path("-")
"""Stands for the standard output, on which results are JSON Lines."""

MANIFEST = "_manifest.json"
"""The last file of an uploaded directory; readers of data sets pass over names that begin with an underscore."""

_UPLOADED = "uploaded.json"
"""Names of the files that are at the URL already, beside the output on this machine."""

_ENDINGS = ".jsonl, .parquet, .npy or .npz"

_RECEIPT = "user.hdexport.job"
"""Extended attribute of an output that identifies its job, so that the same job, run again, finds that it is done.

A job may be killed when its output is in place and nothing else is left of it, but before its caller sees that it
succeeded. The attribute needs no second file and moves with the output. On systems without extended attributes, such a
job is refused because its output exists.
"""

_MOST_CHARACTERS = 500
"""Most characters of the first error in a receipt: a file system may limit attributes to 4 kB."""

_COMMIT_SECONDS = 0.5
"""Minimum time between two commits. A killed job repeats this much, and a shard."""

_COMMIT_SHARE = 50
"""The pause after a commit is at least this many times its duration: even on a slow disk, commits cost at most 2%."""


def output_at(name: str | Path) -> StandardOutput | LocalOutput:
    """The place that a path, a URL or ``-`` names; an error if nothing can be written there."""
    if Path(name) == STDOUT:
        return StandardOutput()
    if "://" not in str(name):
        return LocalOutput(Path(name))
    scheme, _, place = str(name).partition("://")
    url = f"{scheme}://{place.rstrip('/')}"
    is_web = url.startswith(("http://", "https://"))
    filesystem, key = (None, "") if is_web else filesystem_of(url)
    if url.startswith("file://"):
        return LocalOutput(Path(key))
    if not PurePosixPath(key).name:
        raise InputError(
            f"{url} is no place for an output.", hint="Name a file or a directory of a store: s3://bucket/vectors/"
        )
    return StoredOutput(url, filesystem, key)


class LocalOutput:
    """A file or directory of this machine; for a link, where it ends. `name` is for messages."""

    def __init__(self, path: Path, name: str = "") -> None:
        self.path = path
        self.name = name or str(path)

    @property
    def format(self) -> ResultFormat:
        """How it holds results, by its ending; InputError for an ending that is unknown."""
        try:
            return ResultFormat(self.path.suffix.lower())
        except ValueError:
            raise InputError(
                f"{self.path} has no known format: its name ends in {self.path.suffix!r}.",
                hint=f"Outputs end in {_ENDINGS}; a name without an ending is a directory of Parquet files.",
            ) from None

    @property
    def spool(self) -> Path:
        """The directory for a copy of the standard input."""
        return self.path.resolve().parent

    def holds(self, input_identity: str) -> bool:
        """Whether an input, by its place's identity, is the output or below it."""
        return Path(input_identity).is_relative_to(self.path.resolve())

    def check(self, *, force: bool) -> None:
        """Refuse a place that no job may write, before an input is read; finish the removal of a killed job's folder.

        What this job itself may have put there passes: `finished`, which knows the job, looks again.
        """
        with opened_folder(self.path) as folder:
            has_job = folder is not None and folder.has(JOB_FILE)
        if folder is not None and not has_job:
            with disk_errors_explained(self.path), self._alone():
                pass
        self._check_free(force=force or has_job or _receipt(self.path) is not None)

    def finished(self, identity: Identity, *, force: bool, restart: bool) -> Saved | None:
        """The outcome of the job if it is done and its output is there; refuses what `opened` would, makes nothing."""
        with opened_folder(self.path) as folder:
            done = _receipt_of(self.path, identity) if folder is None and not (force or restart) else None
            # A job that was killed before it could remove its folder published its output, too.
            is_own = done is not None or (
                folder is not None
                and not restart
                and self._has_output_of(folder)
                and difference(folder.identity(), identity) is None
            )
        if not is_own:
            self._check_free(force=force)
        if folder is not None and not restart:
            with locked_folder(self.path) as (folder, _):
                self._continues(folder, identity)
        return done

    @property
    def ranges_path(self) -> Path | None:
        """The file for the calibration ranges of an output that has no metadata; None for any other output."""
        output = self.path.resolve()
        return None if self.format.has_metadata else output.with_name(output.name + RANGES_SUFFIX)

    def check_ranges(self, *, force: bool) -> None:
        """Refuse to replace ranges that another job left beside an output that is gone."""
        path = self.ranges_path
        if path is not None and path.exists() and not (force or job_folder_path(self.path).exists()):
            raise OutputExistsError(
                f"{path}, the place of the ranges, exists.",
                hint="Replace it with --force, or choose another place with -o.",
            )

    def kept(self) -> str:
        """How many rows of an unfinished job are safe and where, for a message; empty without any."""
        rows = self.kept_rows()
        return f"{rows} rows are kept in {job_folder_path(self.path)}" if rows else ""

    def kept_rows(self) -> int:
        """Rows of an unfinished job that are safe."""
        with opened_folder(self.path) as folder:
            if folder is None:
                return 0
            saved = folder.saved()
            is_finished = saved.output is not None and folder.has(FINISHED_FILE)
            is_there = folder.size_bytes(RESULTS_FILE) >= saved.results.size_bytes
            return saved.all_counts.rows if is_finished or is_there else 0

    @contextlib.contextmanager
    def opened(self, identity: Identity, encoding: ResultEncoding, *, restart: bool) -> Iterator[JobFolder]:
        """The folder of a job, for this process alone; created if it does not exist.

        If the block raises, appended rows are committed, and the folder stays for the same job to continue; a folder
        without any row is removed. With `restart`, rows that are there are discarded; else those of another job are
        refused.
        """
        with locked_folder(self.path) as (files, lock):
            fresh = restart or not self._continues(files, identity)
            folder = JobFolder(files, lock, self, encoding, identity)
            try:
                folder.begin(fresh=fresh)
                yield folder
            finally:
                folder.close()

    def publish(self, folder: OpenFolder, identity: Identity, saved: Saved, *, force: bool) -> None:
        """Move the output that a folder holds into place, with a receipt."""
        finished = folder.open(FINISHED_FILE, os.O_RDONLY, may_be_directory=True)
        try:
            _leave_receipt(finished, identity, saved)
        finally:
            os.close(finished)
        self._check_free(force=force)
        folder.move_out(self.path.resolve())

    def upload(self) -> None:
        """Bring a complete output to where it belongs; here it is there."""

    def _continues(self, folder: OpenFolder, identity: Identity) -> bool:
        """Whether a folder has rows or the outcome of this job; an error if it has the rows of another job."""
        rows = folder.saved().all_counts.rows
        if not rows:
            return False
        what = difference(folder.identity(), identity)
        if folder.is_published():
            return what is None and self._has_output_of(folder)
        if what is not None:
            raise InputError(
                f"{self.path} has an unfinished job with {rows} rows in {folder.path}; this is another job: {what}.",
                hint="Continue that job by its own command, or discard it and start this one with --restart.",
            )
        return True

    def _has_output_of(self, folder: OpenFolder) -> bool:
        """Whether the job of a folder was killed after it had moved its output into place, which is still there."""
        is_there = folder.is_published() and self.path.exists()
        return is_there and checksum_at(self.path) == folder.saved().output

    def _check_free(self, *, force: bool) -> None:
        """Refuse a place that results cannot be written to."""
        # Links are followed: a job moves its output to where they end, even over a device.
        output = self.path
        kind = special_kind(output.stat()) if output.exists() else None
        if kind is not None:
            raise InputError(
                f"{output} is {kind}; an output is a file, which appears when it is complete.",
                hint=f"Name a file that ends in {_ENDINGS} with -o, or - for the standard output.",
            )
        is_of_parts = self.format is ResultFormat.PARTS
        if output.is_dir():
            others = sorted(path.name for path in output.iterdir() if not (is_of_parts and is_part(path.name)))
            if others or not is_of_parts:
                raise OutputExistsError(
                    f"{output} is a directory" + (f" that holds {', '.join(others[:3])}" if others else "") + ".\n"
                    f"Name a file that ends in {_ENDINGS} with -o, or another directory."
                )
            if not any(output.iterdir()):
                return
        if os.path.lexists(output) and not force:
            raise OutputExistsError(
                f"{output} exists.", hint="Replace it with --force, or choose another place with -o."
            )
        if not output.parent.is_dir():
            make = f"mkdir -p {shlex.quote(str(output.parent))}"
            raise InputError(f"There is no directory {output.parent} for the output.", hint=f"Make it: {make}")

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the lock of the output, without a job."""
        with locked_folder(self.path) as (folder, _):
            yield
            if not folder.has(JOB_FILE):
                folder.remove_all()


class StoredOutput(LocalOutput):
    """A file, or a directory of Parquet files, at a URL: written on this machine, and uploaded when it is complete.

    The file system is fsspec's, and the key the URL's place there.
    """

    def __init__(self, url: str, filesystem: Any, key: str) -> None:
        # In the user's folder for the state of programs.
        state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
        folder = state / "hdexport" / "uploads" / hashlib.sha256(url.encode()).hexdigest()[:16]
        super().__init__(folder / PurePosixPath(key).name, url)
        self._filesystem, self._key = filesystem, key
        self._notes = folder / _UPLOADED

    def holds(self, input_identity: str) -> bool:
        own = str(self._filesystem.unstrip_protocol(self._key))
        return super().holds(input_identity) or input_identity == own or input_identity.startswith(f"{own}/")

    def check(self, *, force: bool) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise HdexportError(
                f"{self.path.parent}, where the job writes {self.name} first, cannot be made: {error.strerror}.",
                hint="Set XDG_STATE_HOME to a directory that can be written.",
            ) from error
        super().check(force=True)

    def finished(self, identity: Identity, *, force: bool, restart: bool) -> Saved | None:
        if restart or not self._is_free_or_of(identity):
            with self._alone():
                self._forget()
        done = super().finished(identity, force=force, restart=restart)
        if done is None:
            self._check_store(force=force)
        elif checksum_at(self.path) != done.output:
            raise DamagedJobError(
                f"{self.path}, which is to be uploaded to {self.name}, has changed since the job wrote it.",
                hint="Start over with --restart.",
            )
        return done

    def upload(self) -> None:
        """Upload the complete output, and remove it from this machine.

        The files of a directory go one after the other; after a kill the same call uploads the remaining ones. The
        manifest, which lists the files with their sizes, goes last; parts of an older output that it does not list are
        removed.
        """
        with self._alone():
            with self._explained():
                if self.path.is_dir():
                    self._upload_directory()
                else:
                    self._filesystem.makedirs(str(PurePosixPath(self._key).parent), exist_ok=True)
                    if self.ranges_path is not None and self.ranges_path.exists():
                        self._filesystem.put_file(str(self.ranges_path), self._key + RANGES_SUFFIX)
                    self._filesystem.put_file(str(self.path), self._key)
            self._forget()
        with contextlib.suppress(OSError):
            self.path.parent.rmdir()

    def _upload_directory(self) -> None:
        parts = sorted(self.path.iterdir())
        done = self._uploaded()
        self._filesystem.makedirs(self._key, exist_ok=True)
        if self._filesystem.exists(f"{self._key}/{MANIFEST}"):
            self._filesystem.rm_file(f"{self._key}/{MANIFEST}")
        for part in parts:
            if part.name not in done:
                self._filesystem.put_file(str(part), f"{self._key}/{part.name}")
                done.add(part.name)
                self._notes.write_text(json_with_checksum({"files": sorted(done)}), encoding="utf-8")
        self._filesystem.invalidate_cache()
        for name in self._stored_files():
            if _is_ours(name) and name not in done:
                self._filesystem.rm_file(f"{self._key}/{name}")
        sizes = {part.name: part.stat().st_size for part in parts}
        self._filesystem.pipe_file(f"{self._key}/{MANIFEST}", json.dumps({"files": sizes}, indent=2).encode())

    def _uploaded(self) -> set[str]:
        """Names of the files that are at the URL already; none if the notes about them are missing or damaged."""
        try:
            names: Any = values_with_checksum(self._notes.read_bytes())["files"]
            return set(names)
        except FileNotFoundError:
            return set()
        except ValueError:
            logger.warning("%s is damaged: all files are uploaded again", self._notes)
            return set()

    def _check_store(self, *, force: bool) -> None:
        """Refuse a URL with an output, unless that may be replaced, or with files that no job wrote."""
        # Notes are about an output that is complete here.
        self._notes.unlink(missing_ok=True)
        with self._explained():
            self._filesystem.invalidate_cache()
            is_file, found = self._filesystem.isfile(self._key), self._stored_files()
        others = [] if is_file else [name for name in found if not _is_ours(name)]
        if others or (found and not is_file and self.path.suffix):
            raise OutputExistsError(
                f"{self.name} is a directory that holds {', '.join((others or found)[:3])}.",
                hint="Choose another place with -o; a job replaces nothing but the output of a job.",
            )
        if (is_file or found) and not force:
            raise OutputExistsError(
                f"{self.name} exists.", hint="Replace it with --force, or choose another place with -o."
            )

    def _is_free_or_of(self, identity: Identity) -> bool:
        """Whether the place on this machine is free, or holds the output or the unfinished rows of that job."""
        with opened_folder(self.path) as folder:
            if folder is not None and folder.has(JOB_FILE):
                return difference(folder.identity(), identity) is None
        return not self.path.exists() or _receipt_of(self.path, identity) is not None

    def _forget(self) -> None:
        """Remove the output on this machine, and before it the notes about it."""
        self._notes.unlink(missing_ok=True)
        if self.path.is_dir():
            shutil.rmtree(self.path)
            return
        self.path.unlink(missing_ok=True)
        if self.ranges_path is not None:
            self.ranges_path.unlink(missing_ok=True)

    def _stored_files(self) -> list[str]:
        """Names of the files below the URL, from there."""
        if self._filesystem.isfile(self._key):
            return []
        found = sorted(self._filesystem.find(self._key))
        return [str(PurePosixPath(name).relative_to(self._key)) for name in found]

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            # Clients of stores have their own exceptions, without a common base.
            kept = f"\nThe rows are kept in {self.path}: the same command uploads them." if self.path.exists() else ""
            raise HdexportError(f"{self.name} cannot be written: {type(error).__name__}: {error}.{kept}") from error


class Results:
    """The results of a job's rows, in order.

    Attributes:
        path: where they are kept, for messages.
        saved: the rows, committed or not.
        ranges: for quantised vectors; None if these need no ranges, or no vector is done.
    """

    def __init__(self, path: Path, encoding: ResultEncoding) -> None:
        self.path = path
        self.saved = Saved()
        self.ranges: Ranges | None = None
        self._encoding = encoding

    def add(self, rows: ResultRows, **progress: Any) -> None:
        """Add the results of rows, and replace what `saved` says with the progress after them."""
        written = self.saved.results
        begin = () if written.size_bytes else (self._encoding.begin(),)
        for piece in itertools.chain(begin, self._encoding.encode(rows)):
            self.append(piece)
            written = written.after(piece)
        # One assignment: if an interrupt comes before it, the new rows do not count.
        self.saved = dataclasses.replace(self.saved, **progress, results=written, part=None)

    def add_part(self, part: Part, *, end: Position, seconds: float) -> None:
        """Add rows of the next shard, which ends there, before all of it is done; `add` then has them again."""
        saved = SavedPart(counts=part.counts, end=end, share=part.share)
        self.saved = dataclasses.replace(self.saved, part=saved, seconds=seconds)

    def kept_part(self) -> Part | None:
        """The rows of the next shard that an earlier process has kept."""
        return None

    def append(self, data: bytes | memoryview) -> None:
        """Add encoded results, which count when `saved` is replaced."""
        raise NotImplementedError

    def keep_ranges(self, ranges: Ranges) -> None:
        """Keep the ranges of quantised vectors, before the first vector is added."""
        self.ranges = ranges

    def complete(self) -> None:
        """All rows are done."""

    def publish(self, *, force: bool, metadata: Mapping[str, str]) -> None:
        """Make the output of all rows."""


class PrintedResults(Results):
    """Results on the standard output, where nothing is left to do at the end."""

    def append(self, data: bytes | memoryview) -> None:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


class JobFolder(Results):
    """The folder beside an output that keeps a job's rows, so that a killed job can continue.

    The results are one file that only grows. A commit brings it to the disk and then atomically replaces the record of
    its length, its checksum and of where reading continues. So the record never describes results that are not on the
    disk, and results that another program has changed are not continued.
    """

    def __init__(
        self, files: OpenFolder, lock: int, output: LocalOutput, encoding: ResultEncoding, identity: Identity
    ) -> None:
        super().__init__(files.path, encoding)
        self._files = files
        self._lock = lock
        self._output = output
        self._identity = identity
        self._results: int | None = None
        self._part: int | None = None
        self._published = False
        self._committed = Saved()
        self._committed_at = time.monotonic()
        self._commit_seconds = 0.0

    def begin(self, *, fresh: bool) -> None:
        """Open the committed results, or start without any."""
        with disk_errors_explained(self._output.path):
            if fresh:
                self._files.remove_all(keep=(LOCK_FILE,))
                self._replace(JOB_FILE, json_with_checksum(self._identity))
            saved = self._files.saved()
            self.ranges = self._files.ranges(saved.ranges)
            self._published = self._files.is_published()
            if saved.output is not None and self._files.has(RESULTS_FILE):
                saved = dataclasses.replace(saved, output=None)  # as the results are there, it is made again
            self.saved = self._committed = saved
            if saved.output is not None:
                if not self._published:
                    self._require_output(saved.output)
                return
            if self._files.has(FINISHED_FILE) and not self._files.has(RESULTS_FILE):
                # Killed between the end of the output, of which the results are a part, and the note about it.
                self._files.rename(FINISHED_FILE, RESULTS_FILE)
            self._results = self._files.open(RESULTS_FILE, os.O_RDWR | os.O_CREAT)
            self._require_results()
            self._cut_results(self._results)
            self._part = self._files.open(PART_FILE, os.O_RDWR | os.O_CREAT)

    def add(self, rows: ResultRows, **progress: Any) -> None:
        super().add(rows, **progress)
        self.commit_if_due()

    def append(self, data: bytes | memoryview) -> None:
        assert self._results is not None, "a complete job appends nothing"
        with disk_errors_explained(self._output.path):
            _write_all(self._results, data)

    def add_part(self, part: Part, *, end: Position, seconds: float) -> None:
        assert self._part is not None, "a complete job has no shard"
        before = self.saved.part
        with disk_errors_explained(self._output.path):
            if before is None and self._committed.part is not None:
                self._commit()  # the rows of the shard before, which are results now
            content, written = bytes_of_rows(part.values), Checksum() if before is None else before.file
            os.ftruncate(self._part, written.size_bytes)
            os.lseek(self._part, written.size_bytes, os.SEEK_SET)
            _write_all(self._part, content)
        saved = SavedPart(counts=part.counts, end=end, share=part.share, file=written.after(content))
        self.saved = dataclasses.replace(self.saved, part=saved, seconds=seconds)
        self.commit_if_due()

    def kept_part(self) -> Part | None:
        saved = self.saved.part
        if saved is None:
            return None
        return Part(values=rows_of_bytes(self._files.part(saved)), counts=saved.counts, share=saved.share)

    def keep_ranges(self, ranges: Ranges) -> None:
        with disk_errors_explained(self._output.path):
            content = json.dumps(ranges.tolist())
            self._replace(RANGES_FILE, content)
        super().keep_ranges(ranges)
        self.saved = dataclasses.replace(self.saved, ranges=Checksum().after(content.encode()))

    def commit_if_due(self) -> None:
        """Commit if enough time has passed since the last commit; HdexportError if the kept rows were removed."""
        pause = max(_COMMIT_SECONDS, _COMMIT_SHARE * self._commit_seconds)
        if time.monotonic() - self._committed_at >= pause:
            with disk_errors_explained(self._output.path):
                self._commit()

    def complete(self) -> None:
        with disk_errors_explained(self._output.path):
            self._commit()

    def publish(self, *, force: bool, metadata: Mapping[str, str]) -> None:
        """Make the output of a complete job, move it into place and remove the folder; after a kill, do the remaining
        steps.
        """
        with disk_errors_explained(self._output.path):
            if not self._published:
                if self.saved.output is None:
                    self._make_output(metadata)
                self._files.remove(RESULTS_FILE)
                self._output.publish(self._files, self._identity, self.saved, force=force)
            self._write_ranges(metadata)
            self._files.remove_all()

    def _make_output(self, metadata: Mapping[str, str]) -> None:
        """Make the output of the results, and note its checksum."""
        assert self._results is not None, "a job whose output is made has none"
        self._require_in_place()
        self._cut_results(self._results)
        modified = os.fstat(self._results).st_mtime_ns
        self._require_results()
        self._files.remove(FINISHED_FILE)  # of a process that was killed before it noted the checksum
        try:
            self._encoding.finish(self._files, metadata=metadata)
        finally:
            # Another program may have changed them after they were looked at: then an error of Arrow is none of ours.
            if os.fstat(self._results).st_mtime_ns != modified:
                self._require_results(is_cut=True)
        is_results = self._files.holds(FINISHED_FILE, self._results)
        output = self.saved.results if is_results else self._files.checksum_of_output()
        self.saved = dataclasses.replace(self.saved, output=output)
        self._replace(SAVED_FILE, json_from_saved(self.saved))
        self._committed = self.saved
        # Without either file, the job counts as published, so one is on the disk before the other is removed.
        self._files.sync()

    def _write_ranges(self, metadata: Mapping[str, str]) -> None:
        """Write the calibration ranges beside an output that has no metadata."""
        path = self._output.ranges_path
        if self.ranges is None or path is None:
            return
        with self._files.replacing(STORED_RANGES) as file:
            write_ranges(file, self.ranges, {name: value for name, value in metadata.items() if name != RANGES_KEY})
        self._files.move_out(path, STORED_RANGES)

    def close(self) -> None:
        """Commit appended rows, if the disk takes them; remove a folder without rows."""
        if self._results is None:
            return
        if self.saved != self._committed:
            with contextlib.suppress(OSError, HdexportError):
                self._commit()
        os.close(self._results)
        self._results = None
        if self._part is not None:
            os.close(self._part)
        if not self._committed.all_counts.rows:
            self._files.remove_all()

    def _commit(self) -> None:
        assert self._results is not None, "a complete job commits nothing"
        began = time.monotonic()
        self._require_in_place()
        self._cut_results(self._results)
        os.fsync(self._results)
        if self.saved.part is not None and self._part is not None:
            os.fsync(self._part)
        try:
            self._replace(SAVED_FILE, json_from_saved(self.saved))
        except FileNotFoundError:
            self._require_in_place()  # it may just have been removed
            raise
        self._committed = self.saved
        self._committed_at = time.monotonic()
        self._commit_seconds = self._committed_at - began

    def _require_results(self, *, is_cut: bool = False) -> None:
        """Refuse results that are not what this job has written; once they are cut, more than that as well."""
        assert self._results is not None, "a job whose output is made has none"
        written = self.saved.results
        if checksum_of(self._results, size_bytes=None if is_cut else written.size_bytes) != written:
            raise self._damaged_results()

    def _require_output(self, written: Checksum) -> None:
        """Refuse an output that is not the one that was made."""
        with contextlib.suppress(OSError):  # such as of a link among the files of a directory
            if self._files.checksum_of_output() == written:
                return
        raise damaged(self.path, f"{FINISHED_FILE}, the whole output, has changed")

    def _damaged_results(self) -> DamagedJobError:
        rows = self.saved.counts.rows
        return damaged(self.path, f"{RESULTS_FILE}, which holds {rows} rows, is missing or has changed")

    def _cut_results(self, results: int) -> None:
        """Drop bytes after the last row that counts."""
        size_bytes = self.saved.results.size_bytes
        if os.fstat(results).st_size < size_bytes:
            raise self._damaged_results()
        os.ftruncate(results, size_bytes)
        os.lseek(results, size_bytes, os.SEEK_SET)

    def _replace(self, name: str, text: str) -> None:
        with self._files.replacing(name) as file:
            file.write(text.encode())

    def _require_in_place(self) -> None:
        """Refuse to rely on files that were removed or replaced since they were opened."""
        if not self._files.is_in_place():
            raise DamagedJobError(
                f"{self.path}, where the job keeps its rows, was removed or replaced while it ran.",
                hint="Put it back and run the same command again, or start over with --restart.",
            )
        opened = {RESULTS_FILE: self._results, PART_FILE: self._part}
        for name in (name for name, file in opened.items() if file is not None and not self._files.holds(name, file)):
            raise DamagedJobError(
                f"{self.path / name}, which the job writes, was removed or replaced while it ran.",
                hint="Put it back and run the same command again, or start over with --restart.",
            )
        if not self._files.holds(LOCK_FILE, self._lock):
            raise HdexportError(
                f"{self.path / LOCK_FILE} was removed while the job ran: another job may be writing there.",
                hint="Make sure that no other job is, and run the same command again.",
            )


class StandardOutput:
    """The standard output: nothing is kept, so a job that is stopped starts over."""

    path = STDOUT
    name = "-"
    format = ResultFormat.JSONL
    spool = None

    def holds(self, input_identity: str) -> bool:
        return False

    def check(self, *, force: bool) -> None: ...

    def finished(self, identity: Identity, *, force: bool, restart: bool) -> None: ...

    def check_ranges(self, *, force: bool) -> None: ...

    def kept(self) -> str:
        return ""

    def opened(self, identity: Identity, encoding: ResultEncoding, *, restart: bool) -> contextlib.nullcontext[Results]:
        return contextlib.nullcontext(PrintedResults(self.path, encoding))

    def upload(self) -> None: ...


def _write_all(descriptor: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _is_ours(name: str) -> bool:
    return name == MANIFEST or is_part(name)


def _leave_receipt(output: int, identity: Identity, saved: Saved) -> None:
    """Mark a complete output, an open file, with its job and the job's outcome, if the file system can."""
    first_error = saved.counts.first_error and saved.counts.first_error[:_MOST_CHARACTERS]
    counts = dataclasses.replace(saved.counts, first_error=first_error, dropped_columns=())
    note = json.dumps([*_file_and_job(output, identity), json_from_saved(dataclasses.replace(saved, counts=counts))])
    with contextlib.suppress(OSError, AttributeError):  # AttributeError: not on Linux
        os.setxattr(output, _RECEIPT, note.encode())


def _receipt_of(output: Path, identity: Identity) -> Saved | None:
    """A job's outcome, if the file is its output and has not changed since; else None."""
    note = _receipt(output)
    if note is None or note[:-1] != _file_and_job(output, identity):
        return None
    with contextlib.suppress(ValueError):
        return saved_from_json(note[-1])
    return None


def _receipt(output: Path) -> list[str] | None:
    try:
        note = json.loads(os.getxattr(output, _RECEIPT))
    except (OSError, ValueError, AttributeError):
        return None
    return note if isinstance(note, list) and note else None


def _file_and_job(output: Path | int, identity: Identity) -> list[str]:
    """What tells whether an output is the job's: size, modification time, those of a directory's files, and the job."""
    status = os.stat(output)
    files = []
    if stat.S_ISDIR(status.st_mode):
        with os.scandir(output) as entries:
            files = sorted((entry.name, entry.stat().st_size, entry.stat().st_mtime_ns) for entry in entries)
    job = hashlib.sha256(json.dumps([identity, files], sort_keys=True).encode()).hexdigest()
    return [str(status.st_size), str(status.st_mtime_ns), job]
