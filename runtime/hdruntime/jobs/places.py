"""Places of inputs: local files, URLs and the standard input."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import importlib
import io
import logging
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias
from urllib.parse import urlsplit

from hdruntime.errors import HdexportError, InputError, MissingDependencyError

if TYPE_CHECKING:
    from hdruntime.jobs.arriving import ArrivingInput

logger = logging.getLogger(__name__)

_HIDDEN = (".", "_")
"""First characters of names that directory listings skip, such as Spark's _SUCCESS."""

_SPECIAL = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)

_BUFFER_BYTES = 2**20
"""Read at a time from a store or from the standard input."""


@dataclass(frozen=True, kw_only=True)
class Version:
    """Shows whether a file has changed.

    Attributes:
        modified: modification time in nanoseconds; or, as text, a digest of a store's metadata or of the content.
        stamp: inode and its change time in nanoseconds, which programs cannot set; (0, 0) without an inode. If only
            this differs, the file may just have been copied, or its owner changed.
    """

    size_bytes: int
    modified: int | str
    stamp: tuple[int, int] = (0, 0)

    def change(self, now: Version) -> str | None:
        """How size or modification time changed, in words; None if neither did."""
        if now.size_bytes != self.size_bytes:
            return f"its size was {self.size_bytes} bytes, and is {now.size_bytes}"
        if now.modified == self.modified:
            return None
        if isinstance(now.modified, int):
            clock_time = datetime.fromtimestamp(now.modified / 1e9).isoformat(sep=" ", timespec="milliseconds")
            return f"it was written to at {clock_time}, though its size is the same"
        return "it was written to, though its size is the same"


@dataclass(frozen=True)
class LocalFile:
    """A local file.

    As for all places, ``name`` is for messages, ``identity`` is unique, ``path`` shows its format and its partitions,
    ``is_local`` means that `version` is cheap, and ``is_arriving`` that the place grows while it is read. `opened`
    raises InputError if it is not a file; `opened` and `version` raise OSError if it is unreachable, or errors of a
    store's client, see `read_errors_explained`.
    """

    file: Path
    is_local = True
    is_arriving = False

    @property
    def name(self) -> str:
        return str(self.file)

    path = name

    @property
    def identity(self) -> str:
        return str(self.file.resolve())

    def opened(self) -> BinaryIO:
        """The file, seekable, at its start."""
        _require_file(self.file, self.file.stat())
        # O_NONBLOCK: if a pipe has just replaced the file, do not wait for a writer.
        descriptor = os.open(self.file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            _require_file(self.file, os.fstat(descriptor))
            return open(descriptor, "rb")
        except BaseException:
            os.close(descriptor)
            raise

    def version(self) -> Version:
        """The file's current version."""
        status = self.file.stat()
        stamp = (status.st_ino, status.st_ctime_ns)
        return Version(size_bytes=status.st_size, modified=status.st_mtime_ns, stamp=stamp)


@dataclass(frozen=True)
class RemoteFile:
    """A URL, through the fsspec file system of its protocol."""

    filesystem: Any
    key: str
    is_local = False
    is_arriving = False

    @property
    def name(self) -> str:
        return str(self.filesystem.unstrip_protocol(self.key))

    identity = name

    @property
    def path(self) -> str:
        # A web address may have a query after the path.
        return urlsplit(self.key).path if "http" in self.filesystem.protocol else self.key

    def opened(self) -> BinaryIO:
        # fsspec's readline is slow Python.
        return io.BufferedReader(self.filesystem.open(self.key, "rb"), _BUFFER_BYTES)

    def version(self) -> Version:
        self.filesystem.invalidate_cache()
        info = self.filesystem.info(self.key)
        if info.get("size") is None:
            raise InputError(f"The server of {self.name} does not report its size.\nDownload it, and name the file.")
        facts = repr(sorted((key, str(value)) for key, value in info.items()))
        return Version(size_bytes=info["size"], modified=hashlib.sha256(facts.encode()).hexdigest())


class StandardInput:
    """The standard input, copied to an unnamed file in a directory, so that it can be read again.

    The same command with the same content continues an unfinished job, as with an unchanged file.
    """

    name = identity = path = "-"
    is_local = True
    is_arriving = False

    def __init__(self, directory: Path | None) -> None:
        if sys.stdin is None or sys.stdin.isatty():
            raise InputError("The input - is closed, or a terminal.\nPipe rows into the command, or name a file.")
        digest = hashlib.sha256()
        try:
            self._copy = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 open as long as the job
            while block := sys.stdin.buffer.read(_BUFFER_BYTES):
                digest.update(block)
                self._copy.write(block)
            self._copy.flush()
        except OSError as error:
            # Where no directory can be written, the reason names all that were tried.
            place = directory or tempfile.tempdir or "a temporary directory"
            other = "" if directory else " name another directory in TMPDIR,"
            raise InputError(
                f"The input - could not be copied to {place}: {error.strerror}.\n"
                f"Free some space or check the permissions there,{other} or write the rows to a file elsewhere, and "
                "name that."
            ) from error
        self._version = Version(size_bytes=self._copy.tell(), modified=digest.hexdigest())

    def opened(self) -> BinaryIO:
        os.lseek(self._copy.fileno(), 0, os.SEEK_SET)
        return open(os.dup(self._copy.fileno()), "rb")

    def version(self) -> Version:
        return self._version


Place: TypeAlias = "LocalFile | RemoteFile | StandardInput | ArrivingInput"


def places_at(name: str | Path, *, known: Callable[[str], bool], spool: Path | None) -> Sequence[Place]:
    """The files of an input, in order: itself, all below a directory, or the matches of a pattern.

    Args:
        name: a path, a URL, or ``-`` for the standard input; ``*``, ``?``, ``[`` and ``**`` make it a pattern.
        known: path -> whether its format is known; other files below a directory are skipped with a warning.
        spool: directory for the copy of the standard input.
    """
    text = str(name)
    if text == "-":
        return [StandardInput(spool)]
    with read_errors_explained(text):
        found, is_one = _remote_files(text) if "://" in text else _local_files(text)
    if is_one:
        return found
    taken = []
    for place in found:
        if not known(place.path):
            logger.warning("%s is skipped: its format is unknown", place.name)
        elif isinstance(place, LocalFile) and not place.file.is_file():
            logger.warning("%s is skipped: it is not a file", place.name)
        else:
            taken.append(place)
    return taken


@contextlib.contextmanager
def read_errors_explained(name: str) -> Iterator[None]:
    """Turn an OSError or an error of a store's client into an InputError that names the input."""
    try:
        yield
    except HdexportError:
        raise
    except OSError as error:
        raise InputError(f"{name} cannot be read: {error.strerror or error}.") from error
    except Exception as error:
        if "://" not in name:
            raise
        # Clients of stores have their own exceptions, without a common base.
        raise InputError(f"{name} cannot be read: {type(error).__name__}: {error}") from error


def special_kind(status: os.stat_result) -> str | None:
    """The kind of a special file, in words; None for files and directories."""
    return next((name for is_one, name in _SPECIAL if is_one(status.st_mode)), None)


def _require_file(path: Path, status: os.stat_result) -> None:
    kind = special_kind(status)
    if kind is not None:
        raise InputError(
            f"{path} is {kind}; a job reads files, which it can read again when it continues.\n"
            "Write the rows to a file first, and name that."
        )


def _local_files(text: str) -> tuple[Sequence[Place], bool]:
    """The files, and whether the name is one file's."""
    path = Path(text)
    if path.is_dir():
        below = sorted(file for file in path.rglob("*") if not _is_hidden(file.relative_to(path)))
        for file in below:
            if file.is_symlink() and file.is_dir():
                logger.warning("%s is skipped: it is a link to a directory", file)
        return [LocalFile(file) for file in below if not file.is_dir()], False
    if path.exists():
        return [LocalFile(path)], True
    matches = sorted(map(Path, glob.glob(text, recursive=True)))
    if not matches:
        raise InputError(f"There is no file or directory {path}.")
    return [place for match in matches for place in _local_files(str(match))[0]], False


def _remote_files(url: str) -> tuple[Sequence[Place], bool]:
    filesystem, key = filesystem_of(url)
    # In a web address, "?" is not a pattern.
    if glob.has_magic(key) and "http" not in filesystem.protocol:
        keys = filesystem.glob(key)
    elif filesystem.isfile(key):
        return [RemoteFile(filesystem, key)], True
    else:
        keys = [found for found in filesystem.find(key) if not _is_hidden(PurePosixPath(found).relative_to(key))]
    if not keys:
        raise InputError(f"There is no file or directory {url}.")
    return [RemoteFile(filesystem, key) for key in sorted(keys, key=lambda key: PurePosixPath(key).parts)], False


def filesystem_of(url: str) -> tuple[Any, str]:
    """The file system of a URL's protocol, and the URL's key there; an error if either is unknown here."""
    try:
        return importlib.import_module("fsspec.core").url_to_fs(url)
    except ImportError as error:
        package = getattr(error.__cause__ or error, "name", None)
        if package is None:
            raise
        raise MissingDependencyError(
            f"{url} needs the package {package!r}, which is not installed.\nInstall it with: pip install {package}"
        ) from None
    except ValueError as error:
        raise InputError(f"{url} is not understood: {error}.") from None


def _is_hidden(path: Path | PurePosixPath) -> bool:
    return any(part.startswith(_HIDDEN) for part in path.parts)
