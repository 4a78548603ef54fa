"""Sources of rows: local files, URLs and the standard input."""

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
from hdruntime.folders import HIDDEN, special_kind
from hdruntime.os_errors import next_step, reason_of

if TYPE_CHECKING:
    from hdruntime.jobs.arriving import ArrivingInput

logger = logging.getLogger(__name__)

_OTHER_COMPRESSIONS = (".gz", ".zst", ".bz2", ".xz", ".lzma", ".lz4", ".br", ".snappy", ".zip", ".7z")
"""Endings of rows that are compressed in a way that a job does not read, where the whole name's format is unknown."""

_BUFFER_BYTES = 2**20
"""Read at a time from a store or from the standard input."""

_CHECK_STORE = "Check the URL, the connection, and the credentials of the store."


@dataclass(frozen=True, kw_only=True)
class Version:
    """Shows whether a file has changed.

    Attributes:
        modified: modification time in nanoseconds; or, as text, a digest of a store's metadata or of the content.
    """

    size_bytes: int
    modified: int | str

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

    As for all sources, ``name`` is for messages, ``identity`` is unique, ``path`` shows its format and its partitions,
    ``is_local`` means that `version` is cheap, and ``is_arriving`` that the source grows while it is read. `opened`
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
        status = self.file.stat()
        return Version(size_bytes=status.st_size, modified=status.st_mtime_ns)


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
            raise InputError(
                f"The server of {self.name} does not report its size.", hint="Download it, and name the file."
            )
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
            raise InputError(
                "The input - is closed, or a terminal.", hint="Pipe rows into the command, or name a file."
            )
        digest = hashlib.sha256()
        try:
            self._copy = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 open as long as the job
            while block := sys.stdin.buffer.read(_BUFFER_BYTES):
                digest.update(block)
                self._copy.write(block)
            self._copy.flush()
        except OSError as error:
            # Where no directory can be written, the reason names all that were tried.
            where = directory or tempfile.tempdir or "a temporary directory"
            other = "" if directory else " name another directory in TMPDIR,"
            raise InputError(
                f"The input - could not be copied to {where}: {error.strerror}.",
                hint=f"Free some space or check the permissions there,{other} or write the rows to a file elsewhere, "
                "and name that.",
            ) from error
        self._version = Version(size_bytes=self._copy.tell(), modified=digest.hexdigest())

    def opened(self) -> BinaryIO:
        os.lseek(self._copy.fileno(), 0, os.SEEK_SET)
        return open(os.dup(self._copy.fileno()), "rb")

    def version(self) -> Version:
        return self._version


Source: TypeAlias = "LocalFile | RemoteFile | StandardInput | ArrivingInput"

Known = Callable[[str], bool]
"""Path -> whether its format is known."""


def find_sources(name: str | Path, *, known: Known, spool: Path | None) -> Sequence[Source]:
    """The files of an input, in order: itself, all below a directory, or the matches of a pattern.

    Args:
        name: a path, a URL, or ``-`` for the standard input; ``*``, ``?``, ``[`` and ``**`` make it a pattern.
        known: files of other formats below a directory are skipped with a warning.
        spool: directory for the copy of the standard input.

    Raises:
        InputError: a folder, a link or another name that belongs to the input cannot be read, or is none of a file.
    """
    text = str(name)
    if text == "-":
        return [StandardInput(spool)]
    with read_errors_explained(text):
        sources, is_one = (_remote_files if "://" in text else _local_files)(text, known)
    # A pattern may match a file as well as its directory.
    return sources if is_one else [source for source in dict.fromkeys(sources) if _is_of_rows(source, known)]


def _is_of_rows(source: LocalFile | RemoteFile, known: Known) -> bool:
    """Whether a file that was not named itself is to be read."""
    if known(source.path):
        if isinstance(source, LocalFile):
            _require_file(source.file, _status(source.file))
        return True
    stem, dot, suffix = source.path.lower().rpartition(".")
    if dot + suffix in _OTHER_COMPRESSIONS and known(stem):
        raise InputError(
            f"{source.name} holds rows in a compression that a job does not read.",
            hint="Decompress it; files of lines may have .gz or .zst.",
        )
    logger.warning("%s is skipped: its format is unknown", source.name)
    return False


@contextlib.contextmanager
def read_errors_explained(name: str) -> Iterator[None]:
    """Turn an OSError or an error of a store's client into an InputError that names the input."""
    try:
        yield
    except HdexportError:
        raise
    except OSError as error:
        # The errors of a store's client have numbers of this machine's files, without being about one.
        step = _CHECK_STORE if "://" in name else next_step(error) or "Copy it here again, or write it again."
        raise InputError(f"{name} cannot be read: {reason_of(error).rstrip('.')}.", hint=step) from error
    except Exception as error:
        if "://" not in name:
            raise
        # Clients of stores have their own exceptions, without a common base.
        reason = f"{type(error).__name__}: {error}".rstrip(".")
        raise InputError(f"{name} cannot be read: {reason}.", hint=_CHECK_STORE) from error


def _require_file(path: Path, status: os.stat_result) -> None:
    kind = special_kind(status.st_mode)
    if kind is not None:
        raise InputError(
            f"{path} is {kind}; a job reads files, which it can read again when it continues.",
            hint="Write the rows to a file first, and name that.",
        )


def _local_files(text: str, known: Known) -> tuple[Sequence[LocalFile], bool]:
    """The files, and whether the name is one file's."""
    path = Path(text)
    if path.is_dir():
        return [LocalFile(file) for file in _files_below(path, known)], False
    if os.path.lexists(path):
        _status(path)
        return [LocalFile(path)], True
    # glob passes over folders that it cannot read.
    for folders in _folders_of_pattern(text):
        for folder in glob.glob(os.path.join(folders, ""), recursive=True):
            _entries(Path(folder))
    matches = sorted(map(Path, glob.glob(text, recursive=True)))
    if not matches:
        raise InputError(f"There is no file or directory {path}.")
    return [file for match in matches for file in _local_files(str(match), known)[0]], False


def _files_below(root: Path, known: Known) -> list[Path]:
    """The files below a directory, sorted; of directories that links lead to, those that no other path leads to."""
    files: list[Path] = []
    read: set[tuple[int, int]] = set()
    # Links come last: of two paths of a directory, the path without a link counts.
    left, links = [root], list[Path]()
    while left or links:
        folder = left.pop() if left else links.pop(0)
        status = _status(folder)
        if (status.st_dev, status.st_ino) in read:
            logger.warning("%s is skipped: its files are inputs already by another path", folder)
            continue
        if folder != root and folder.is_symlink() and root.resolve().is_relative_to(folder.resolve()):
            raise InputError(
                f"{folder} is a link to {folder.resolve()}, in which the input {root} is.",
                hint="Remove the link, or name the files and directories beside it.",
            )
        read.add((status.st_dev, status.st_ino))
        for entry in _entries(folder):
            path = folder / entry.name
            if entry.name.startswith(HIDDEN):
                _note_hidden(str(path), known)
            elif not (stat.S_ISDIR(_status(path).st_mode) if entry.is_symlink() else entry.is_dir()):
                files.append(path)
            else:
                (links if entry.is_symlink() else left).append(path)
    return sorted(files)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """The entries of a directory, sorted; an InputError that names it if it cannot be read."""
    try:
        os.stat(os.path.join(folder, "."))  # names alone may be listed where nothing can be opened
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise InputError(
            f"{folder} cannot be read: {error.strerror}.", hint="Make it readable, or name the inputs that can be read."
        ) from error


def _status(path: Path) -> os.stat_result:
    """The status of a path that is there; an InputError that names a link which leads nowhere."""
    try:
        return path.stat()
    except OSError as error:
        if not path.is_symlink():
            raise
        raise InputError(
            f"{path} is a link to {os.readlink(path)}, which cannot be read: {error.strerror}.",
            hint="Remove the link, or put back what it leads to.",
        ) from error


def _folders_of_pattern(pattern: str) -> Iterator[str]:
    """Patterns of the folders whose entries are compared with a pattern, each after those that it lies in."""
    parts = pattern.split("/")
    first = next((index for index, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    for index in range(first, len(parts)):
        yield "/".join(parts[: index + (parts[index] == "**")]) or ("/" if index else ".")


def _note_hidden(name: str, known: Known) -> None:
    level = logging.WARNING if known(name) else logging.INFO
    logger.log(level, "%s is skipped: its name begins with %s", name, " or ".join(HIDDEN))


def _remote_files(url: str, known: Known) -> tuple[Sequence[RemoteFile | LocalFile], bool]:
    filesystem, key = filesystem_of(url)
    if url.startswith("file://"):
        return _local_files(key, known)
    # In a web address, "?" is not a pattern.
    if glob.has_magic(key) and "http" not in filesystem.protocol:
        keys = _matching_keys(filesystem, key, known)
    elif filesystem.isfile(key):
        return [RemoteFile(filesystem, key)], True
    else:
        keys = _keys_below(filesystem, key, known) if filesystem.exists(key) else []
    if not keys:
        raise InputError(f"There is no file or directory {url}.", hint="Check the URL.")
    return [RemoteFile(filesystem, key) for key in sorted(keys, key=lambda key: PurePosixPath(key).parts)], False


def _matching_keys(filesystem: Any, pattern: str, known: Known) -> list[str]:
    """The files that a pattern matches, and those below directories that it matches."""
    for folders in _folders_of_pattern(pattern) if _is_walked(filesystem) else ():
        for name, info in filesystem.glob(folders, detail=True).items():
            if info["type"] == "directory":
                _listed(filesystem, name)
    keys: list[str] = []
    for name, info in filesystem.glob(pattern, detail=True).items():
        keys += _keys_below(filesystem, name, known) if info["type"] == "directory" else [name]
    return keys


def _keys_below(filesystem: Any, root: str, known: Known) -> list[str]:
    """The files below a directory."""
    shown, hidden = [], set()
    for key in _walked(filesystem, root) if _is_walked(filesystem) else filesystem.find(root):
        parts = PurePosixPath(key).relative_to(root).parts
        begin = next((index for index, part in enumerate(parts) if part.startswith(HIDDEN)), None)
        if begin is None:
            shown.append(key)
        else:
            hidden.add(str(PurePosixPath(root, *parts[: begin + 1])))
    for name in sorted(hidden):
        _note_hidden(name, known)
    return shown


def _is_walked(filesystem: Any) -> bool:
    """Whether fsspec lists one directory after the other, and passes over those that it cannot list."""
    general = importlib.import_module("fsspec.asyn").AsyncFileSystem
    find = getattr(type(filesystem), "_find", type(filesystem).find)
    return find in (general._find, importlib.import_module("fsspec").AbstractFileSystem.find)


def _walked(filesystem: Any, folder: str) -> Iterator[str]:
    """All files below a directory, and directories whose names are hidden."""
    for name, is_folder in _listed(filesystem, folder):
        if is_folder and not PurePosixPath(name).name.startswith(HIDDEN):
            yield from _walked(filesystem, name)
        else:
            yield name


def _listed(filesystem: Any, folder: str) -> list[tuple[str, bool]]:
    """The entries of a directory, and whether each is a directory; an InputError that names it if it cannot be read."""
    with read_errors_explained(filesystem.unstrip_protocol(folder)):
        listed = [
            (str(info["name"]).rstrip("/"), info["type"] == "directory") for info in filesystem.ls(folder, detail=True)
        ]
    return [entry for entry in listed if entry[0] != folder.rstrip("/")]


def filesystem_of(url: str) -> tuple[Any, str]:
    """The file system of a URL's protocol, and the URL's key there; an error if either is unknown here."""
    try:
        return importlib.import_module("fsspec.core").url_to_fs(url)
    except ImportError as error:
        package = getattr(error.__cause__ or error, "name", None)
        if package is None:
            raise
        raise MissingDependencyError(
            f"{url} needs the package {package!r}, which is not installed.",
            hint=f"Install it with: pip install {package}",
        ) from None
    except ValueError as error:
        raise InputError(
            f"{url} is not understood: {error}.",
            hint="Name a path, or a URL that fsspec reads, such as s3://bucket/folder.",
        ) from None
