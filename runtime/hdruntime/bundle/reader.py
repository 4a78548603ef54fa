"""A bundle, a directory with a manifest, opened with every file checked."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from hdruntime.bundle.manifest import FileRecord, Manifest
from hdruntime.bundle.manifest_json import manifest_from_json
from hdruntime.constants import CONFIG_FILE, MANIFEST_FILE
from hdruntime.errors import BundleCorruptError, BundleError, BundleNotFoundError
from hdruntime.os_errors import explained

_COPY_AGAIN = "Rebuild or copy the bundle again."

_READ_BYTES = 1 << 20
"""Most bytes that are hashed at a time, which takes a millisecond; more were not faster."""

_MOST_MANIFEST_BYTES = 16 * 2**20
"""Those of bundles with twenty graphs and their verification take 0.1 MB."""

_NO_WAITING = getattr(os, "O_NONBLOCK", 0)

Result = TypeVar("Result")


@dataclass(frozen=True)
class Bundle:
    """A bundle that was opened.

    Attributes:
        path: its place.
        manifest: manifest of the bundle.
        absent: files of the manifest that were left on the hub.
    """

    path: Path
    manifest: Manifest
    absent: frozenset[str] = frozenset()

    def file(self, relative: str) -> Path:
        """The path of a file that the manifest lists.

        Args:
            relative: POSIX path relative to the bundle.

        Raises:
            BundleCorruptError: not listed, or it leaves the bundle.
        """
        if relative not in self.manifest.files:
            raise BundleCorruptError(f"The bundle {self.path} lists no file {relative!r}.", hint=_COPY_AGAIN)
        if relative in self.absent:
            raise BundleError(
                f"{relative} of the bundle {self.path} was not downloaded.",
                hint="Load the bundle by its name for the backend and the precision that read the file.",
            )
        return _path_inside(self.path, relative)


def open_bundle(path: Path, *, check_files: bool = True, absent: frozenset[str] = frozenset()) -> Bundle:
    """Read and check a bundle. Nothing of it is executed or unpickled; files it does not list are ignored.

    Checksums detect damage, not tampering: write access to a bundle includes its manifest. No backend reads a file
    before all are checked, since a damaged graph or engine may crash its reader.

    Args:
        path: the bundle's directory, or a link to it, which is followed once.
        check_files: compare every file's SHA-256 with the manifest: 50 ms for a file of 100 MB where the processor has
            instructions for it, and files side by side. Without it only presence and size are compared.
        absent: files that may be missing, and are not read.

    Raises:
        BundleNotFoundError: there is nothing, or not a bundle.
        BundleVersionError: another version of hdexport wrote it, in another format.
        BundleCorruptError: the manifest is malformed, or a file is missing, changed, or outside the bundle.
    """
    manifest = read_manifest(Path(path))
    # A change of the working directory, or of a link, does not change which bundle was opened.
    path = Path(path).resolve()
    for relative in _named_files(manifest):
        if relative not in manifest.files:
            raise BundleCorruptError(
                f"The manifest of {path} names {relative!r} but has no checksum for it.", hint=_COPY_AGAIN
            )
    here = {relative: record for relative, record in manifest.files.items() if relative not in absent}
    for relative, record in here.items():
        _check_presence(path, relative, record)
    if check_files:
        sizes = {relative: record.size_bytes for relative, record in here.items()}
        for_each_file(lambda relative: _check_content(path, relative, manifest.files[relative]), sizes)
    return Bundle(path, manifest, absent)


def read_config(bundle: Bundle) -> dict[str, Any]:
    """The checkpoint's ``config.json``, if the bundle contains it; else {}."""
    if CONFIG_FILE not in bundle.manifest.files:
        return {}
    path = bundle.file(CONFIG_FILE)
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise BundleCorruptError(f"{path} cannot be read: {error}.", hint=_COPY_AGAIN) from None
    if not isinstance(config, dict):
        raise BundleCorruptError(f"{path} should hold an object, not {config!r:.60}.", hint=_COPY_AGAIN)
    return config


def read_manifest(path: Path) -> Manifest:
    """The manifest of a bundle's directory, whose files are not looked at."""
    text = manifest_text(path)
    try:
        return manifest_from_json(text)
    except BundleError as error:
        raise type(error)(f"{path / MANIFEST_FILE}: {error}") from None


def manifest_text(path: Path) -> bytes:
    """The content of ``manifest.json`` of a bundle's directory."""
    try:
        # A named pipe would wait for its writer.
        with open(path / MANIFEST_FILE, "rb", opener=lambda name, flags: os.open(name, flags | _NO_WAITING)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise BundleCorruptError(f"{path / MANIFEST_FILE} is not a regular file.", hint=_COPY_AGAIN)
            text = file.read(_MOST_MANIFEST_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        reason = "has no manifest.json" if path.is_dir() else "is a file" if path.exists() else "does not exist"
        raise BundleNotFoundError(f"There is no bundle at {path}: it {reason}.", hint=_BUILD_ONE) from None
    except OSError as error:
        raise BundleError(f"The bundle {path} cannot be read: {explained(error, otherwise=_COPY_AGAIN)}") from error
    if len(text) > _MOST_MANIFEST_BYTES:
        raise BundleCorruptError(
            f"{path / MANIFEST_FILE} has more than {_MOST_MANIFEST_BYTES} bytes, which no manifest has.",
            hint=_COPY_AGAIN,
        )
    return text


_BUILD_ONE = "Build one with: hdexport build MODEL -o BUNDLE"


def for_each_file(function: Callable[[str], Result], sizes: Mapping[str, int]) -> dict[str, Result]:
    """The results of a function that hashes a file, for several files at a time: hashing holds no lock of Python's.

    `sizes` are bytes of each file by its name. The largest comes first, since it takes longest. Threads would take
    longer to start than small files to hash.
    """
    names = sorted(sizes, key=lambda name: -sizes[name])
    if sum(sizes.values()) <= _READ_BYTES:
        return {name: function(name) for name in names}
    with ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(function, names), strict=True))


def sha256_of_file(path: Path) -> str:
    """In hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(min(_READ_BYTES, os.fstat(file.fileno()).st_size))
        view = memoryview(buffer)
        while size := file.readinto(buffer):
            digest.update(view[:size])
    return digest.hexdigest()


def _named_files(manifest: Manifest) -> list[str]:
    """Every file that the manifest refers to."""
    named = [graph.file for graph in manifest.graphs]
    for engine in manifest.engines:
        named += [engine.file, engine.metadata]
    if manifest.tokenizer is not None:
        named.append(manifest.tokenizer.file)
    return named


def _check_presence(directory: Path, relative: str, record: FileRecord) -> None:
    path = _path_inside(directory, relative)
    try:
        # Not only for missing files: reading a named pipe would wait forever.
        if not path.is_file():
            raise BundleCorruptError(f"The bundle {directory} lacks its file {relative}.", hint=_COPY_AGAIN)
        size_bytes = path.stat().st_size
    except OSError as error:  # a name that is too long, a folder without permission
        raise _unreadable(directory, relative, error) from error
    if size_bytes != record.size_bytes:
        raise _changed(directory, relative, f"{record.size_bytes} bytes", f"{size_bytes} bytes")


def _check_content(directory: Path, relative: str, record: FileRecord) -> None:
    try:
        actual = sha256_of_file(_path_inside(directory, relative))
    except OSError as error:
        raise _unreadable(directory, relative, error) from error
    if actual != record.sha256:
        raise _changed(directory, relative, f"sha256 {record.sha256}", actual)


def _unreadable(directory: Path, relative: str, error: OSError) -> BundleError:
    return BundleError(
        f"The file {relative} of the bundle {directory} cannot be read: {explained(error, otherwise=_COPY_AGAIN)}"
    )


def _changed(directory: Path, relative: str, expected: str, actual: str) -> BundleCorruptError:
    return BundleCorruptError(
        f"The file {relative} of the bundle {directory} has changed: expected {expected}, found {actual}.",
        hint=_COPY_AGAIN,
    )


def _path_inside(directory: Path, relative: str) -> Path:
    """The path of a bundle's file, after links were followed and found to stay inside."""
    parts = PurePosixPath(relative)
    plain = relative and "\0" not in relative and "\\" not in relative
    if not plain or parts.is_absolute() or ".." in parts.parts:
        raise BundleCorruptError(
            f"The bundle {directory} lists {relative!r}, which is outside the bundle.",
            hint="Every file must lie below the bundle's directory; do not use this bundle.",
        )
    path = directory / parts
    try:
        target, own = path.resolve(), directory.resolve()
        stays = target.is_relative_to(own) or target.parent in _blobs_of_snapshot(own)
    except (OSError, RuntimeError):  # links that go in circles; RuntimeError before Python 3.13
        stays = False
    if not stays:
        raise BundleCorruptError(
            f"The bundle {directory} lists {relative!r}, which is outside the bundle: it is a link, or below one.",
            hint="Copy the bundle with the files that its links name: cp -rL BUNDLE COPY",
        )
    return path


def _blobs_of_snapshot(directory: Path) -> list[Path]:
    """The files of a bundle in the cache of the Hugging Face Hub, where a snapshot links to blobs."""
    return [parent.parent / "blobs" for parent in directory.parents if parent.name == "snapshots"]
