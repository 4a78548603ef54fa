"""Outputs at URLs: a job writes them on this machine, and uploads them when they are complete."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from hdruntime.errors import HdexportError, InputError, OutputExistsError
from hdruntime.jobs.places import filesystem_of
from hdruntime.jobs.writers import is_part

MANIFEST = "_manifest.json"
"""The last file of a directory; readers of data sets pass over names that begin with an underscore."""

_UPLOADED = "uploaded.json"
"""Names of the files that are at the URL, beside the output on this machine."""


@dataclass(frozen=True)
class Upload:
    """An output at a URL.

    Attributes:
        url: of a file, or of a directory of Parquet files.
        filesystem: fsspec's.
        key: the URL's place there.
    """

    url: str
    filesystem: Any
    key: str

    @property
    def local(self) -> Path:
        """Where the job writes the output on this machine, in the user's folder for the state of programs."""
        state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
        folder = hashlib.sha256(self.url.encode()).hexdigest()[:16]
        return state / "hdexport" / "uploads" / folder / PurePosixPath(self.key).name

    def begin(self) -> None:
        """Make the folder of the output on this machine.

        Raises:
            HdexportError: the folder cannot be made.
        """
        try:
            self.local.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise HdexportError(
                f"{self.local.parent}, where the job writes {self.url} first, cannot be made: {error.strerror}.\n"
                "Set XDG_STATE_HOME to a directory that can be written."
            ) from error

    def check(self, *, force: bool) -> None:
        """Refuse a URL that holds an output, unless the output may be replaced, or holds files that no job wrote.

        Raises:
            OutputExistsError: the URL holds something.
            HdexportError: the store cannot be asked.
        """
        # Notes are about an output that is complete here.
        self._notes.unlink(missing_ok=True)
        with self._explained():
            self.filesystem.invalidate_cache()
            is_file, found = self.filesystem.isfile(self.key), self._files()
        others = [] if is_file else [name for name in found if not _is_ours(name)]
        if others or (found and not is_file and self.local.suffix):
            raise OutputExistsError(
                f"{self.url} is a directory that holds {', '.join((others or found)[:3])}.\n"
                "Choose another place with -o; a job replaces nothing but the output of a job."
            )
        if (is_file or found) and not force:
            raise OutputExistsError(f"{self.url} exists.\nReplace it with --force, or choose another place with -o.")

    def forget(self) -> None:
        """Remove the output on this machine, and before it the notes about it."""
        self._notes.unlink(missing_ok=True)
        if self.local.is_dir():
            shutil.rmtree(self.local)
        else:
            self.local.unlink(missing_ok=True)

    def publish(self) -> None:
        """Upload the complete output, and remove it from this machine.

        The files of a directory go one after the other; after a kill the same call uploads the remaining ones. The
        manifest, which lists the files with their sizes, goes last; parts of an older output that it does not list are
        removed.

        Raises:
            HdexportError: the store does not take a file.
        """
        with self._explained():
            if self.local.is_dir():
                self._publish_directory()
            else:
                self.filesystem.makedirs(str(PurePosixPath(self.key).parent), exist_ok=True)
                self.filesystem.put_file(str(self.local), self.key)
        self.forget()

    def tidy(self) -> None:
        """Remove the folder of the output on this machine, if nothing is in it."""
        with contextlib.suppress(OSError):
            self.local.parent.rmdir()

    def holds(self, identity: str) -> bool:
        """Whether an input, by its place's identity, is at the URL or below it."""
        own = str(self.filesystem.unstrip_protocol(self.key))
        return identity == own or identity.startswith(f"{own}/")

    def _publish_directory(self) -> None:
        parts = sorted(self.local.iterdir())
        done = set(json.loads(self._notes.read_text(encoding="utf-8"))) if self._notes.exists() else set()
        self.filesystem.makedirs(self.key, exist_ok=True)
        if self.filesystem.exists(f"{self.key}/{MANIFEST}"):
            self.filesystem.rm_file(f"{self.key}/{MANIFEST}")
        for part in parts:
            if part.name not in done:
                self.filesystem.put_file(str(part), f"{self.key}/{part.name}")
                done.add(part.name)
                self._notes.write_text(json.dumps(sorted(done)), encoding="utf-8")
        self.filesystem.invalidate_cache()
        for name in self._files():
            if _is_ours(name) and name not in done:
                self.filesystem.rm_file(f"{self.key}/{name}")
        sizes = {part.name: part.stat().st_size for part in parts}
        self.filesystem.pipe_file(f"{self.key}/{MANIFEST}", json.dumps({"files": sizes}, indent=2).encode())

    def _files(self) -> list[str]:
        """Names of the files below the URL, from there."""
        if self.filesystem.isfile(self.key):
            return []
        found = sorted(self.filesystem.find(self.key))
        return [str(PurePosixPath(name).relative_to(self.key)) for name in found]

    @property
    def _notes(self) -> Path:
        return self.local.with_name(_UPLOADED)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            # Clients of stores have their own exceptions, without a common base.
            kept = f"\nThe rows are kept in {self.local}: the same command uploads them." if self.local.exists() else ""
            raise HdexportError(f"{self.url} cannot be written: {type(error).__name__}: {error}.{kept}") from error


def place_of_output(output: str | Path) -> tuple[Path, Upload | None]:
    """Where a job writes an output on this machine, and the upload of an output that is a URL.

    Raises:
        MissingDependencyError: the package of the URL's protocol is not installed.
        InputError: the protocol is unknown, or nothing can be written there.
    """
    if "://" not in str(output):
        return Path(output), None
    scheme, _, place = str(output).partition("://")
    url = f"{scheme}://{place.rstrip('/')}"
    is_web = url.startswith(("http://", "https://"))
    filesystem, key = (None, "") if is_web else filesystem_of(url)
    if url.startswith("file://"):
        return Path(key), None
    if not PurePosixPath(key).name:
        raise InputError(
            f"{url} is no place for an output.\nName a file or a directory of a store: s3://bucket/vectors/"
        )
    upload = Upload(url, filesystem, key)
    return upload.local, upload


def _is_ours(name: str) -> bool:
    return name == MANIFEST or is_part(name)
