"""The results of a job's rows, while the job runs: kept in the state folder with a manifest, or printed."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hdruntime.errors import HdexportError
from hdruntime.jobs.checksums import Checksum, checksum_at, json_with_checksum
from hdruntime.jobs.identity import Identity
from hdruntime.jobs.partial_file import bytes_of_rows, rows_of_bytes
from hdruntime.jobs.progress import JobManifest, PartialEntry
from hdruntime.jobs.rows import Position
from hdruntime.jobs.shards import PartialShard
from hdruntime.jobs.state_folder import (
    JOB_FILE,
    PARTIAL_FILE,
    RANGES_FILE,
    RESULTS_FILE,
    STORED_RANGES_FILE,
    StateFolder,
    damaged,
    disk_errors_explained,
    sync,
    synced,
)
from hdruntime.jobs.vectors import Ranges
from hdruntime.jobs.writers import ResultEncoding, ResultRows
from hdruntime.text.ranges import RANGES_KEY, write_ranges

if TYPE_CHECKING:
    from hdruntime.jobs.output import LocalOutput

_COMMIT_SECONDS = 0.5
"""Minimum time between two commits. A killed job repeats this much."""

_COMMIT_SHARE = 50
"""The pause after a commit is at least this many times its duration: even on a slow disk, commits cost at most 2%."""


class Results:
    """The results of a job's rows, in order.

    Attributes:
        path: path of the results, for messages.
        manifest: what is finished, committed or not.
        ranges: calibration ranges of quantized vectors; None if the vectors need none, or none is finished.
    """

    def __init__(self, path: Path, encoding: ResultEncoding) -> None:
        self.path = path
        self.manifest = JobManifest()
        self.ranges: Ranges | None = None
        self._encoding = encoding

    def add(self, rows: ResultRows, **progress: Any) -> None:
        """Add the results of a shard, and update the manifest with the progress after it."""
        written = self.manifest.results
        start = () if written.size_bytes else (self._encoding.start(),)
        for block in itertools.chain(start, self._encoding.encode(rows)):
            self.append(block)
            written = written.after(block)
        # One assignment: if an interrupt comes before it, the new rows do not count.
        self.manifest = dataclasses.replace(self.manifest, **progress, results=written, partial=None)

    def add_partial(self, partial: PartialShard, *, end: Position, seconds: float) -> None:
        """Add finished rows of the next shard, which ends there; `add` has these rows again when the shard is done."""
        entry = PartialEntry(counts=partial.counts, end=end, share=partial.share)
        self.manifest = dataclasses.replace(self.manifest, partial=entry, seconds=seconds)

    def earlier_partial(self) -> PartialShard | None:
        """The rows of the next shard that an earlier process has finished."""
        return None

    def append(self, data: bytes | memoryview) -> None:
        """Append encoded results, which count when the manifest is updated."""
        raise NotImplementedError

    def keep_ranges(self, ranges: Ranges) -> None:
        """Keep the ranges of quantized vectors, before the first vector is added."""
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


class KeptResults(Results):
    """Results in the state folder of an output, so that a killed job can continue.

    Results are appended to one file. A commit syncs the file to the disk and then atomically replaces the manifest,
    which has the file's size and checksum and the position in the inputs. The manifest never describes results that
    are not on the disk, and results that another program has changed are not continued.
    """

    def __init__(self, folder: StateFolder, output: LocalOutput, encoding: ResultEncoding, identity: Identity) -> None:
        super().__init__(folder.path, encoding)
        self._folder = folder
        self._output = output
        self._identity = identity
        self._results: int | None = None
        self._partial: int | None = None
        self._committed = JobManifest()
        self._committed_at = time.monotonic()
        self._commit_seconds = 0.0

    def begin(self, *, fresh: bool, is_in_place: bool) -> None:
        """Open the committed results, or start without any; nothing is opened if the output is in place."""
        with disk_errors_explained(self._output.path):
            if fresh:
                self._folder.clear()
                self._folder.write(JOB_FILE, json_with_checksum(self._identity))
                # Before there are results, so that a lost manifest is noticed.
                self._folder.write_manifest(JobManifest())
            manifest = self._folder.manifest()
            self.ranges = self._folder.ranges(manifest.ranges)
            if manifest.output is not None and not is_in_place:
                manifest = dataclasses.replace(manifest, output=None)  # the output is made again
            self.manifest = self._committed = manifest
            if manifest.output is not None:
                return
            self._results = self._folder.open_for_appending(RESULTS_FILE)
            self._require_results(size_bytes=manifest.results.size_bytes)
            _truncate(self._results, manifest.results)
            self._partial = self._folder.open_for_appending(PARTIAL_FILE)

    def add(self, rows: ResultRows, **progress: Any) -> None:
        super().add(rows, **progress)
        self._commit_if_due()

    def append(self, data: bytes | memoryview) -> None:
        assert self._results is not None, "a complete job appends nothing"
        with disk_errors_explained(self._output.path):
            _write_all(self._results, data)

    def add_partial(self, partial: PartialShard, *, end: Position, seconds: float) -> None:
        assert self._partial is not None, "a complete job has no shard"
        before = self.manifest.partial
        with disk_errors_explained(self._output.path):
            if before is None:
                # The file is written from its start: no manifest on the disk may describe what it held.
                if self._committed.partial is not None:
                    self._commit()
                sync(self._folder.path)
            content, written = bytes_of_rows(partial.values), Checksum() if before is None else before.file
            _truncate(self._partial, written)
            _write_all(self._partial, content)
        entry = PartialEntry(counts=partial.counts, end=end, share=partial.share, file=written.after(content))
        self.manifest = dataclasses.replace(self.manifest, partial=entry, seconds=seconds)
        self._commit_if_due()

    def earlier_partial(self) -> PartialShard | None:
        entry = self.manifest.partial
        if entry is None:
            return None
        values = rows_of_bytes(self._folder.partial(entry))
        return PartialShard(values=values, counts=entry.counts, share=entry.share)

    def keep_ranges(self, ranges: Ranges) -> None:
        content = json.dumps(ranges.tolist())
        with disk_errors_explained(self._output.path):
            self._folder.write(RANGES_FILE, content)
        super().keep_ranges(ranges)
        self.manifest = dataclasses.replace(self.manifest, ranges=Checksum().after(content.encode()))

    def complete(self) -> None:
        with disk_errors_explained(self._output.path):
            self._commit()

    def publish(self, *, force: bool, metadata: Mapping[str, str]) -> None:
        """Make the output of a complete job and move it into place; after a kill, do the remaining steps."""
        with disk_errors_explained(self._output.path):
            if self.manifest.output is None:
                self._make_output(force=force, metadata=metadata)
            self._write_ranges(metadata)
            self.manifest = dataclasses.replace(self.manifest, is_done=True)
            self._folder.write_manifest(self.manifest)
            self._folder.remove_work_files()

    def _make_output(self, *, force: bool, metadata: Mapping[str, str]) -> None:
        self._require_results()
        made = self._encoding.finish(self._folder.path, written=self.manifest.results, metadata=metadata)
        output = self.manifest.results if made.name == RESULTS_FILE else checksum_at(made)
        self.manifest = self._committed = dataclasses.replace(self.manifest, output=output)
        self._folder.write_manifest(self.manifest)
        sync(self._folder.path)
        self._output.check_free(force=force)
        self._folder.move_out(made, self._output.path.resolve())

    def _write_ranges(self, metadata: Mapping[str, str]) -> None:
        """Write the calibration ranges beside an output that has no metadata."""
        path = self._output.ranges_path
        if self.ranges is None or path is None:
            return
        made = self._folder.path / STORED_RANGES_FILE
        with synced(made) as file:
            write_ranges(file, self.ranges, {name: value for name, value in metadata.items() if name != RANGES_KEY})
        self._folder.move_out(made, path)

    def close(self) -> None:
        """Commit appended rows, if the disk takes them; without any, clear the folder."""
        if self._results is None:
            return
        if self.manifest != self._committed and self.manifest.output is None:
            with contextlib.suppress(OSError, HdexportError):
                self._commit()
        for descriptor in (self._results, self._partial):
            if descriptor is not None:
                os.close(descriptor)
        self._results = None
        if not self._committed.all_counts.rows:
            self._folder.clear()

    def _commit_if_due(self) -> None:
        pause = max(_COMMIT_SECONDS, _COMMIT_SHARE * self._commit_seconds)
        if time.monotonic() - self._committed_at >= pause:
            with disk_errors_explained(self._output.path):
                self._commit()

    def _commit(self) -> None:
        assert self._results is not None, "a complete job commits nothing"
        began = time.monotonic()
        self._require_size(RESULTS_FILE, self.manifest.results)
        _truncate(self._results, self.manifest.results)
        os.fsync(self._results)
        if self.manifest.partial is not None and self._partial is not None:
            self._require_size(PARTIAL_FILE, self.manifest.partial.file)
            os.fsync(self._partial)
        self._folder.write_manifest(self.manifest)
        self._committed = self.manifest
        self._committed_at = time.monotonic()
        self._commit_seconds = self._committed_at - began

    def _require_size(self, name: str, written: Checksum) -> None:
        """Raise if a file is shorter than what the job has written, as one that was removed or replaced meanwhile."""
        if self._folder.size_bytes(name) < written.size_bytes:
            raise damaged(self.path, f"{name} is missing or has changed")

    def _require_results(self, *, size_bytes: int | None = None) -> None:
        """Raise if the results, or their first bytes, are not what the job has written."""
        path, written = self.path / RESULTS_FILE, self.manifest.results
        if not path.is_file() or checksum_at(path, size_bytes=size_bytes) != written:
            rows = self.manifest.counts.rows
            raise damaged(self.path, f"{RESULTS_FILE}, which holds {rows} rows, is missing or has changed")


def _truncate(descriptor: int, written: Checksum) -> None:
    """Drop the bytes of a file that do not count, and continue after those that do."""
    os.ftruncate(descriptor, written.size_bytes)
    os.lseek(descriptor, written.size_bytes, os.SEEK_SET)


def _write_all(descriptor: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
