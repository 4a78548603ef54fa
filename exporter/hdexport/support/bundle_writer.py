"""Bundles are written whole or not at all, and only bundles are replaced."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from hdruntime.bundle.manifest import FileRecord, Manifest
from hdruntime.bundle.manifest_json import json_of_manifest, manifest_from_json, with_checksum
from hdruntime.bundle.reader import for_each_file, manifest_text, sha256_of_file
from hdruntime.bundle.staging import DirectoryKind
from hdruntime.constants import MANIFEST_FILE, RUNTIME_CACHE_SUFFIX
from hdruntime.errors import BundleError
from hdruntime.whole_files import is_partial, write_whole


def seal(directory: Path, manifest: Manifest) -> Manifest:
    """Hashes every file of a bundle that is complete but for its manifest, and writes ``manifest.json`` there. The
    result is the manifest with its ``files``."""
    sizes = {name: (directory / name).stat().st_size for name in sorted(_files_in(directory)) if name != MANIFEST_FILE}
    digests = for_each_file(lambda name: sha256_of_file(directory / name), sizes)
    files = {name: FileRecord(sha256=digests[name], size_bytes=size) for name, size in sizes.items()}
    sealed = dataclasses.replace(manifest, files=files)
    write_manifest(directory, sealed)
    return sealed


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Replaces ``manifest.json`` of a bundle atomically, for facts that come later, such as a verification. Unlike
    `seal` it hashes nothing, so a file that changed in the meantime is still rejected."""
    _write(directory, json_of_manifest(manifest))


def fix_checksum(directory: Path) -> Manifest:
    """Writes the checksum of a ``manifest.json`` that was edited by hand; the result is the manifest, which is checked
    before."""
    text = with_checksum(manifest_text(directory))
    manifest = manifest_from_json(text)
    _write(directory, text)
    return manifest


def _write(directory: Path, text: str) -> None:
    try:
        write_whole(directory / MANIFEST_FILE, text)
    except OSError as error:
        raise BundleError(
            f"The manifest of {directory} cannot be written: {error.strerror}.",
            hint="Free some space, or check the permissions there.",
        ) from error


def _manifest_files(directory: Path) -> dict[str, object] | None:
    """The file table of the directory's manifest, in any format version; None without a manifest of a bundle."""
    try:
        data = json.loads((directory / MANIFEST_FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    # Web pages and browser extensions have a manifest.json, too: look for keys that only bundles have.
    if not isinstance(data, dict) or type(data.get("format_version")) is not int:
        return None
    files = data.get("files")
    return files if isinstance(files, dict) else None


def _unlisted_files(directory: Path) -> list[str]:
    return sorted(_files_in(directory) - {MANIFEST_FILE, *(_manifest_files(directory) or {})})


def _files_in(directory: Path) -> set[str]:
    """Names of the files below, without this machine's caches and leftovers of killed processes."""
    return {
        path.relative_to(directory).as_posix()
        for path in directory.rglob("*")
        if not (path.is_dir() or path.name.endswith(RUNTIME_CACHE_SUFFIX) or is_partial(path))
    }


BUNDLE_DIRECTORY = DirectoryKind(
    name="bundle of hdexport",
    marker=MANIFEST_FILE,
    is_one=lambda directory: _manifest_files(directory) is not None,
    other_files=_unlisted_files,
)
"""The kind of directory that a bundle is, to be filled and sealed in a block of `staged_directory`."""
