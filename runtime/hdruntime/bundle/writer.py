"""Bundles are written whole or not at all, and only bundles are replaced."""

from __future__ import annotations

__all__ = ["seal", "staged_bundle", "write_manifest"]

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path

from hdruntime.bundle.digests import for_each_file, sha256_of_file
from hdruntime.bundle.manifest import FileRecord, Manifest
from hdruntime.bundle.manifest_json import json_from_manifest
from hdruntime.bundle.staging import DirectoryKind, staged_directory
from hdruntime.constants import MANIFEST_FILE, RUNTIME_CACHE_SUFFIX
from hdruntime.errors import BundleError

_PARTIAL_MANIFEST = f".{MANIFEST_FILE}.partial"


@contextlib.contextmanager
def staged_bundle(destination: Path, *, force: bool) -> Iterator[Path]:
    """A temporary sibling directory that replaces ``destination`` when the block ends cleanly.

    Fill and seal it in the block; see :func:`hdruntime.bundle.staging.staged_directory`.

    Args:
        destination: where the bundle shall be; missing parent directories are made.
        force: replace a bundle that is there. Anything else that is there is never replaced.

    Yields:
        the temporary directory, empty.

    Raises:
        OutputExistsError: before the block runs, something is at ``destination`` and may not be replaced.
        HdexportError: the directory cannot be written, or the disk is full.
    """
    with staged_directory(destination, _BUNDLE, force=force) as directory:
        yield directory


def seal(directory: Path, manifest: Manifest) -> Manifest:
    """Hash every file of ``directory`` and write ``manifest.json`` there.

    Args:
        directory: the bundle, complete but for its manifest.
        manifest: its ``files`` are replaced.

    Returns:
        the manifest as written, with ``files``.
    """
    skipped = {MANIFEST_FILE, _PARTIAL_MANIFEST}
    paths = {path.relative_to(directory).as_posix(): path for path in sorted(directory.rglob("*")) if not path.is_dir()}
    sizes = {
        name: path.stat().st_size
        for name, path in paths.items()
        if name not in skipped and not name.endswith(RUNTIME_CACHE_SUFFIX)
    }
    digests = for_each_file(lambda name: sha256_of_file(paths[name]), sizes)
    files = {name: FileRecord(sha256=digests[name], size_bytes=size) for name, size in sizes.items()}
    sealed = dataclasses.replace(manifest, files=files)
    write_manifest(directory, sealed)
    return sealed


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Replace ``manifest.json`` of a bundle atomically, files as the manifest lists them.

    This is for what is learnt about a bundle later, such as its verification. Unlike :func:`seal` it hashes
    nothing, so it cannot bless a file that changed meanwhile.

    Raises:
        BundleError: it cannot be written; the bundle is as it was.
    """
    text = json_from_manifest(manifest)
    try:
        _replace_manifest(directory, text)
    except OSError as error:
        raise BundleError(
            f"The manifest of {directory} cannot be written: {error.strerror}.\n"
            "Free some space, or check who may write there."
        ) from error


def _replace_manifest(directory: Path, text: str) -> None:
    partial = directory / _PARTIAL_MANIFEST
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(directory / MANIFEST_FILE)
    finally:
        partial.unlink(missing_ok=True)


def _manifest_files(directory: Path) -> dict[str, object] | None:
    """The file table of the directory's manifest, in any format version; None when it has none of ours."""
    try:
        data = json.loads((directory / MANIFEST_FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    # Others have a manifest.json, too (web pages, browser extensions): look for what only ours has.
    if not isinstance(data, dict) or type(data.get("format_version")) is not int:
        return None
    files = data.get("files")
    return files if isinstance(files, dict) else None


def _unlisted_files(directory: Path) -> list[str]:
    listed = {MANIFEST_FILE, *(_manifest_files(directory) or {})}
    found = (path.relative_to(directory).as_posix() for path in directory.rglob("*") if not path.is_dir())
    return sorted(path for path in found if path not in listed and not path.endswith(RUNTIME_CACHE_SUFFIX))


_BUNDLE = DirectoryKind(
    name="bundle of hdexport",
    marker=MANIFEST_FILE,
    is_one=lambda directory: _manifest_files(directory) is not None,
    foreign_files=_unlisted_files,
)
