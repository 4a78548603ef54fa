"""Outputs of jobs on this machine: whether a job may write there, what is finished there, and how a job writes."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
from collections.abc import Iterator
from pathlib import Path

from hdruntime.errors import InputError, OutputExistsError, Setting
from hdruntime.folders import special_kind
from hdruntime.jobs.checksums import checksum_at
from hdruntime.jobs.identity import Identity, difference
from hdruntime.jobs.progress import JobManifest
from hdruntime.jobs.results import KeptResults, PrintedResults, Results
from hdruntime.jobs.state_folder import (
    CHANGE_OUTPUT,
    JOB_FILE,
    MANIFEST_FILE,
    RESULTS_FILE,
    StateFolder,
    damaged,
    locked_folder,
    state_folder,
    state_folder_path,
)
from hdruntime.jobs.writers import ResultEncoding, ResultFormat, is_part
from hdruntime.text.ranges import RANGES_SUFFIX

logger = logging.getLogger(__name__)

STDOUT = Path("-")
"""Stands for the standard output, on which results are JSON Lines."""

SUFFIXES = ".jsonl, .parquet, .npy or .npz"

REPLACE = ("Replace it with ", Setting("force", True), ", or ", *CHANGE_OUTPUT)


class LocalOutput:
    """A file or directory of this machine; for a link, its target. `name` is for messages."""

    def __init__(self, path: Path, name: str = "") -> None:
        self.path = path
        self.name = name or str(path)

    @property
    def format(self) -> ResultFormat:
        """The format of the results, by the suffix of the name; InputError for an unknown suffix."""
        try:
            return ResultFormat(self.path.suffix.lower())
        except ValueError:
            raise InputError(
                f"{self.path} has no known format: its name ends in {self.path.suffix!r}.",
                hint=f"Outputs end in {SUFFIXES}; a name without a suffix is a directory of Parquet files.",
            ) from None

    @property
    def spool(self) -> Path:
        """The directory for a copy of the standard input."""
        return self.path.resolve().parent

    def holds(self, source_identity: str) -> bool:
        """Whether an input, given by the identity of its source, is the output or is below it."""
        return Path(source_identity).is_relative_to(self.path.resolve())

    def check(self, *, force: bool) -> None:
        """Raise if no job may write here, before an input is read.

        An output that this job may have written passes: `finished`, which knows the job, checks again.
        """
        folder = state_folder(self.path)
        self.check_free(force=force or (folder is not None and folder.has(JOB_FILE)))

    def finished(self, identity: Identity, *, force: bool, restart: bool) -> JobManifest | None:
        """The manifest of the job if it is done and its output is here. Raises what `opened` would raise."""
        folder = state_folder(self.path)
        if folder is None:
            self.check_free(force=force)
            return None
        with locked_folder(self.path):
            folder.put_back(self.path.resolve())
            manifest = JobManifest() if restart else folder.manifest()
            is_own = self._is_of(manifest, folder, identity) and self._has_output_of(manifest)
            if not is_own:
                self.check_free(force=force)
            if not restart:
                self._continues(folder, identity)
            if not (is_own and manifest.is_done) or force:
                return None
            folder.remove_work_files()  # which a killed process may have left
            return manifest

    @property
    def ranges_path(self) -> Path | None:
        """The file for the calibration ranges of an output that has no metadata; None for any other output."""
        output = self.path.resolve()
        return None if self.format.has_metadata else output.with_name(output.name + RANGES_SUFFIX)

    def check_ranges(self, *, force: bool) -> None:
        """Raise if ranges would replace those of another job whose output is gone."""
        path = self.ranges_path
        if path is not None and path.exists() and not (force or self.kept_rows()):
            raise OutputExistsError(f"{path}, the file for the ranges, exists.", hint=REPLACE)

    def kept(self) -> str:
        """The number of rows of an unfinished job that are kept, and where, for a message; empty without any."""
        rows = self.kept_rows()
        return f"{rows} rows are kept in {state_folder_path(self.path)}" if rows else ""

    def kept_rows(self) -> int:
        """Rows of an unfinished job that are kept."""
        folder = state_folder(self.path)
        if folder is None or not folder.has(RESULTS_FILE):
            return 0
        manifest = folder.manifest()
        is_there = folder.size_bytes(RESULTS_FILE) >= manifest.results.size_bytes
        return manifest.all_counts.rows if is_there else 0

    @contextlib.contextmanager
    def opened(self, identity: Identity, encoding: ResultEncoding, *, restart: bool) -> Iterator[Results]:
        """The results of a job, for this process alone.

        If the block raises, appended rows are committed and kept for the same job to continue. With `restart`, rows
        that are there are discarded; else rows of another job raise an InputError.
        """
        with locked_folder(self.path) as folder:
            results = KeptResults(folder, self, encoding, identity)
            try:
                fresh = restart or not self._continues(folder, identity)
                if fresh and not restart:
                    self._warn_of_lost_rows(folder, identity)
                is_in_place = not fresh and self._has_output_of(folder.manifest())
                results.begin(fresh=fresh, is_in_place=is_in_place)
                yield results
            finally:
                results.close()

    def upload(self) -> None:
        """Copy a complete output to its URL; this output has none."""

    def check_free(self, *, force: bool) -> None:
        """Raise if results cannot be written here."""
        # Links are followed: a job moves its output to their target, even over a device.
        output = self.path
        kind = special_kind(output.stat().st_mode) if output.exists() else None
        name_a_file = ("Give ", Setting("output"), f" a name that ends in {SUFFIXES}")
        if kind is not None:
            raise InputError(
                f"{output} is {kind}; an output is a file, which appears when it is complete.",
                hint=(*name_a_file, ", or - for the standard output."),
            )
        is_of_parts = self.format is ResultFormat.PARTS
        if output.is_dir():
            others = sorted(path.name for path in output.iterdir() if not (is_of_parts and is_part(path.name)))
            if others or not is_of_parts:
                raise OutputExistsError(
                    f"{output} is a directory" + (f" that holds {', '.join(others[:3])}" if others else "") + ".",
                    hint=(*name_a_file, ", or the name of another directory."),
                )
            if not any(output.iterdir()):
                return
        if os.path.lexists(output) and not force:
            raise OutputExistsError(f"{output} exists.", hint=REPLACE)
        if not output.parent.is_dir():
            make = f"mkdir -p {shlex.quote(str(output.parent))}"
            raise InputError(f"There is no directory {output.parent} for the output.", hint=f"Make it: {make}")

    def _continues(self, folder: StateFolder, identity: Identity) -> bool:
        """Whether a folder has rows of this job; an error if it has rows of another job that is not done."""
        if folder.has(JOB_FILE) and folder.has(RESULTS_FILE) and not folder.has(MANIFEST_FILE):
            raise damaged(folder.path, f"{MANIFEST_FILE} is missing")
        manifest = folder.manifest()
        rows = manifest.all_counts.rows
        if not rows or manifest.is_done:
            return False
        if not folder.has(JOB_FILE):
            raise damaged(folder.path, f"{JOB_FILE} is missing")
        what = difference(folder.identity(), identity)
        if manifest.output is not None and not folder.has(RESULTS_FILE):
            # The output was moved into place, and then the process was killed. Nothing is left if it is gone.
            return what is None and self._has_output_of(manifest)
        if what is not None:
            raise InputError(
                f"{self.path} has an unfinished job with {rows} rows in {folder.path}; this is another job: ",
                *what,
                ".",
                hint=(
                    "Continue that job by its own command, or discard it and start this one with ",
                    Setting("restart", True),
                    ".",
                ),
            )
        return True

    def _warn_of_lost_rows(self, folder: StateFolder, identity: Identity) -> None:
        """Say that the job starts over because the finished rows are gone, and the output made of them."""
        manifest = folder.manifest()
        if self._is_of(manifest, folder, identity) and not manifest.is_done:
            logger.warning(
                "%d rows were finished, but are neither in %s nor in %s any more: the job starts over",
                manifest.counts.rows,
                self.path,
                folder.path,
            )

    def _is_of(self, manifest: JobManifest, folder: StateFolder, identity: Identity) -> bool:
        """Whether the output that a folder describes is the output of a job."""
        return manifest.output is not None and difference(folder.identity(), identity) is None

    def _has_output_of(self, manifest: JobManifest) -> bool:
        return manifest.output is not None and self.path.exists() and checksum_at(self.path) == manifest.output


class StandardOutput:
    """The standard output: nothing is kept, so a job that is stopped starts over."""

    path = STDOUT
    name = "-"
    format = ResultFormat.JSONL
    spool = None

    def holds(self, source_identity: str) -> bool:
        return False

    def check(self, *, force: bool) -> None: ...

    def finished(self, identity: Identity, *, force: bool, restart: bool) -> None: ...

    def check_ranges(self, *, force: bool) -> None: ...

    def kept(self) -> str:
        return ""

    def opened(self, identity: Identity, encoding: ResultEncoding, *, restart: bool) -> contextlib.nullcontext[Results]:
        return contextlib.nullcontext(PrintedResults(self.path, encoding))

    def upload(self) -> None: ...
