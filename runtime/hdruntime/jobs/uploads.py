"""Outputs at URLs, and the output that a name stands for."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from hdruntime.errors import DamagedJobError, HdexportError, InputError, OutputExistsError
from hdruntime.jobs.checksums import checksum_at
from hdruntime.jobs.identity import Identity
from hdruntime.jobs.output import REPLACE, STDOUT, LocalOutput, StandardOutput
from hdruntime.jobs.progress import JobManifest
from hdruntime.jobs.sources import filesystem_of
from hdruntime.jobs.state_folder import CHANGE_OUTPUT, START_OVER, StateFolder, locked_folder, remove
from hdruntime.jobs.writers import is_part
from hdruntime.text.ranges import RANGES_SUFFIX

UPLOAD_MANIFEST = "_manifest.json"
"""The last file of an uploaded directory; readers of data sets skip names that begin with an underscore."""


def output_at(name: str | Path) -> StandardOutput | LocalOutput:
    """The output that a path, a URL or ``-`` names; an error if nothing can be written there."""
    if Path(name) == STDOUT:
        return StandardOutput()
    if "://" not in str(name):
        return LocalOutput(Path(name))
    scheme, _, rest = str(name).partition("://")
    url = f"{scheme}://{rest.rstrip('/')}"
    is_web = url.startswith(("http://", "https://"))
    filesystem, key = (None, "") if is_web else filesystem_of(url)
    if url.startswith("file://"):
        return LocalOutput(Path(key))
    if not PurePosixPath(key).name:
        raise InputError(
            f"No output can be written to {url}.", hint="Name a file or a directory of a store: s3://bucket/vectors/"
        )
    return UploadedOutput(url, filesystem, key)


class UploadedOutput(LocalOutput):
    """A file, or a directory of Parquet files, at a URL: written on this machine, and uploaded when it is complete.

    Args:
        filesystem: file system of fsspec.
        key: the URL's key there.
    """

    def __init__(self, url: str, filesystem: Any, key: str) -> None:
        # In the user's folder for the state of programs.
        state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
        folder = state / "hdexport" / "uploads" / hashlib.sha256(url.encode()).hexdigest()[:16]
        super().__init__(folder / PurePosixPath(key).name, url)
        self._filesystem, self._key = filesystem, key

    def holds(self, source_identity: str) -> bool:
        url = str(self._filesystem.unstrip_protocol(self._key))
        return super().holds(source_identity) or source_identity == url or source_identity.startswith(f"{url}/")

    def check(self, *, force: bool) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise HdexportError(
                f"{self.path.parent}, where the job writes {self.name} first, cannot be made: {error.strerror}.",
                hint="Set XDG_STATE_HOME to a directory that can be written.",
            ) from error
        super().check(force=True)

    def finished(self, identity: Identity, *, force: bool, restart: bool) -> JobManifest | None:
        with locked_folder(self.path) as folder:
            manifest = JobManifest() if restart else folder.manifest()
            if not self._is_of(manifest, folder, identity):
                self._remove_local()
            elif self.path.exists() and checksum_at(self.path) != manifest.output:
                raise DamagedJobError(
                    f"{self.path}, which is to be uploaded to {self.name}, has changed since the job wrote it.",
                    hint=START_OVER,
                )
        done = super().finished(identity, force=force, restart=restart)
        if done is None:
            self._check_store(force=force)
        return done

    def upload(self) -> None:
        """Upload the complete output, and remove it from this machine.

        The files of a directory go one after the other; after a kill the same call uploads the remaining files. The
        manifest, which lists the files with their sizes, goes last; parts of an older output that the manifest does
        not list are removed.
        """
        with locked_folder(self.path) as folder:
            with self._store_errors_explained():
                if self.path.is_dir():
                    self._upload_directory(folder)
                else:
                    self._filesystem.makedirs(str(PurePosixPath(self._key).parent), exist_ok=True)
                    if self.ranges_path is not None and self.ranges_path.exists():
                        self._filesystem.put_file(str(self.ranges_path), self._key + RANGES_SUFFIX)
                    self._filesystem.put_file(str(self.path), self._key)
            folder.delete()
            self._remove_local()
        with contextlib.suppress(OSError):
            self.path.parent.rmdir()

    def _upload_directory(self, folder: StateFolder) -> None:
        parts = sorted(self.path.iterdir())
        manifest = folder.manifest()
        self._filesystem.makedirs(self._key, exist_ok=True)
        if self._filesystem.exists(f"{self._key}/{UPLOAD_MANIFEST}"):
            self._filesystem.rm_file(f"{self._key}/{UPLOAD_MANIFEST}")
        for part in parts:
            if part.name not in manifest.uploaded:
                self._filesystem.put_file(str(part), f"{self._key}/{part.name}")
                manifest = dataclasses.replace(manifest, uploaded=[*manifest.uploaded, part.name])
                folder.write_manifest(manifest)
        self._filesystem.invalidate_cache()
        for name in self._stored_files():
            if _is_of_job(name) and name not in manifest.uploaded:
                self._filesystem.rm_file(f"{self._key}/{name}")
        sizes = {part.name: part.stat().st_size for part in parts}
        self._filesystem.pipe_file(f"{self._key}/{UPLOAD_MANIFEST}", json.dumps({"files": sizes}, indent=2).encode())

    def _check_store(self, *, force: bool) -> None:
        """Raise if the URL has an output that may not be replaced, or files that no job wrote."""
        with self._store_errors_explained():
            self._filesystem.invalidate_cache()
            is_file, names = self._filesystem.isfile(self._key), self._stored_files()
        others = [] if is_file else [name for name in names if not _is_of_job(name)]
        if others or (names and not is_file and self.path.suffix):
            raise OutputExistsError(
                f"{self.name} is a directory that holds {', '.join((others or names)[:3])}.",
                hint=("A job replaces nothing but the output of a job: ", *CHANGE_OUTPUT),
            )
        if (is_file or names) and not force:
            raise OutputExistsError(f"{self.name} exists.", hint=REPLACE)

    def _remove_local(self) -> None:
        remove(self.path)
        if self.ranges_path is not None:
            remove(self.ranges_path)

    def _stored_files(self) -> list[str]:
        """Names of the files below the URL, relative to it."""
        if self._filesystem.isfile(self._key):
            return []
        keys = sorted(self._filesystem.find(self._key))
        return [str(PurePosixPath(key).relative_to(self._key)) for key in keys]

    @contextlib.contextmanager
    def _store_errors_explained(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            # Clients of stores have their own exceptions, without a common base.
            raise HdexportError(
                f"{self.name} cannot be written: {type(error).__name__}: {error}.",
                hint=f"The rows are kept in {self.path}: the same command uploads them." if self.path.exists() else "",
            ) from error


def _is_of_job(name: str) -> bool:
    return name == UPLOAD_MANIFEST or is_part(name)
