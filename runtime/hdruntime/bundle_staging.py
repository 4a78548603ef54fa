"""Bundles appear whole or not at all, and only bundles are replaced."""

from __future__ import annotations

__all__ = ["staged_bundle"]

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from hdruntime.constants import MANIFEST_FILE, RUNTIME_CACHE_SUFFIX
from hdruntime.staging import DirectoryKind, staged_directory


@contextlib.contextmanager
def staged_bundle(destination: Path, *, force: bool) -> Iterator[Path]:
    """A temporary sibling directory that replaces ``destination`` when the block ends cleanly.

    Fill and seal it in the block; see :func:`hdruntime.staging.staged_directory`.

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
