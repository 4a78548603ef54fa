"""Bundles in stores such as S3 and Google Cloud Storage, which a server copies before it loads them."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path, PurePosixPath
from typing import Any

from hdruntime.backends.precision import Precision
from hdruntime.bundle.manifest import Backend, FileRecord
from hdruntime.bundle.reader import Bundle, open_bundle, read_manifest
from hdruntime.constants import MANIFEST_FILE
from hdruntime.errors import BundleCorruptError, BundleNotFoundError
from hdruntime.hub import needed_files
from hdruntime.jobs.sources import filesystem_of, read_errors_explained


def is_in_store(bundle: object) -> bool:
    """Whether a bundle is named by a URL, such as ``gs://bucket/bundle``."""
    return isinstance(bundle, str) and "://" in bundle


def opened_in_store(
    url: str, backend: Backend | str = "auto", precision: Precision | str = Precision.AUTO, *, cache: Path | None = None
) -> Bundle:
    """Copy the files that a backend reads into a folder, and open the bundle there.

    A file that was copied before is kept. The folder is named by the manifest, which has the SHA-256 of every file, so
    that another bundle at the same URL is another folder.

    Args:
        url: the bundle's folder in a store, through fsspec.
        backend, precision: see `hdruntime.load`: their files are copied.
        cache: folder of all bundles; None for the user's cache.

    Raises:
        BundleNotFoundError: there is no bundle at the URL.
        BundleCorruptError: a file is not the one that the manifest names.
        InputError: the store cannot be read.
        MissingDependencyError: the package for the URL's protocol is not installed.
    """
    filesystem, key = filesystem_of(url.rstrip("/"))
    with read_errors_explained(url):
        try:
            manifest_bytes = filesystem.cat_file(f"{key}/{MANIFEST_FILE}")
        except FileNotFoundError:
            raise BundleNotFoundError(
                f"There is no bundle at {url}: it has no {MANIFEST_FILE}.",
                hint="Name the folder that hdexport build wrote, and not an archive of it.",
            ) from None
    folder = (cache or _user_cache()) / hashlib.sha256(manifest_bytes).hexdigest()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST_FILE).write_bytes(manifest_bytes)
    manifest = read_manifest(folder)
    needed = needed_files(manifest, str(backend), str(precision))
    for name in sorted(needed):
        _copy(filesystem, f"{key}/{name}", folder, name, manifest.files[name])
    return open_bundle(folder, absent=frozenset(manifest.files) - needed)


def _copy(filesystem: Any, source: str, folder: Path, name: str, record: FileRecord) -> None:
    """Copy a file, whole or not at all, unless it is there: others may read the folder. `open_bundle` checks it."""
    target = folder / name
    if ".." in PurePosixPath(name).parts or PurePosixPath(name).is_absolute():
        raise BundleCorruptError(f"The manifest lists the file {name!r}, which is outside of the bundle.")
    if target.is_file() and target.stat().st_size == record.size_bytes:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        copy = Path(temporary) / target.name
        with read_errors_explained(str(filesystem.unstrip_protocol(source))):
            filesystem.get_file(source, str(copy))
        os.replace(copy, target)


def _user_cache() -> Path:
    cache_home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache_home) if os.path.isabs(cache_home) else Path.home() / ".cache") / "hdexport" / "bundles"
