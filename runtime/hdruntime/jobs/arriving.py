"""Rows of a standard input that stays open: each is run soon after it has come, with others that have come."""

from __future__ import annotations

import contextlib
import io
import os
import queue
import select
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, cast

from hdruntime.jobs.input_files import MAX_LINE_BYTES
from hdruntime.jobs.rows import Row
from hdruntime.jobs.shards import Shard, split_into_shards
from hdruntime.jobs.sources import Version, read_errors_explained

_READ_BYTES = 2**16
"""Read at a time: all that a pipe of Linux holds."""

_HEAD_BYTES = 2**20
"""Bytes that are read for the columns of the first rows, unless the first row is longer."""

_HELD_BYTES_PER_CHARACTER = 4
"""Bytes of input that are read ahead, per character of a shard: some shards."""

_FEWEST_CHARACTERS = 2**12
"""Characters of the smallest shard that more rows wait behind: about a batch of 1024 tokens."""

_SIGNAL_SECONDS = 1.0
"""A signal that comes just before the main thread waits for a row does not wake it: it looks again after so long."""

_LEAST_SECONDS = 0.1
"""Time for which a shard may run however little its rows may wait, so that shards have some batches."""

_SHARE_OF_AGE = 0.5
"""A shard may also run for this share of the time that its first row has waited: rows behind a long queue come in
large shards, as those of a file do."""


def standard_input_arrives() -> bool:
    """Whether rows of the standard input can be waited for: it is a pipe or a socket, not a file or a terminal."""
    try:
        kind = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):  # closed, or no file, as in a test or a notebook
        return False
    return stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind)


class _StoppedError(Exception):
    """The job has ended, and nothing more is to be read."""


class _ReaderGoneError(Exception):
    """The reader of the standard output is gone. No OSError, which would be taken for one of the input."""


class ArrivingInput:
    """The standard input, read while it stays open; a source, see `hdruntime.jobs.sources`.

    Before `begin` it holds the first rows, which may be read any number of times; then all rows, once.
    """

    name = identity = path = "-"
    is_local = True
    is_arriving = True

    def __init__(self, *, wait_seconds: float) -> None:
        self.wait_seconds = wait_seconds
        self._descriptor = os.dup(sys.stdin.fileno())
        self._woken, self._wake = os.pipe()
        self._read = bytearray()
        self._has_ended = self._is_live = False
        self._size_bytes = 0
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)
        self._poll.register(self._woken, select.POLLIN)
        self._output = -1
        with contextlib.suppress(AttributeError, OSError, ValueError):
            self._output = sys.stdout.fileno()
            self._poll.register(self._output, 0)  # tells when its reader is gone

    def wait_for_rows(self, has_row: Callable[[], bool], *, lines: int) -> None:
        """Read until there is a row, and then, for as long as a row may wait, until there are so many lines.

        Raises:
            BrokenPipeError: the reader of the standard output is gone.
            InputError: the standard input cannot be read.
        """
        deadline = None
        try:
            with read_errors_explained(self.name):
                while not self._has_ended and (deadline is None or len(self._read) < _HEAD_BYTES):
                    if deadline is None and self._whole_lines() and has_row():
                        deadline = time.monotonic() + self.wait_seconds
                    if deadline is not None and self._read.count(b"\n") >= lines:
                        break
                    if not self._fill(None if deadline is None else max(0.0, deadline - time.monotonic())):
                        break
        except _ReaderGoneError:
            raise BrokenPipeError from None
        self._size_bytes = len(self._read)

    def begin(self) -> None:
        """From now on all rows are read, as they come."""
        self._is_live = True

    def opened(self) -> BinaryIO:
        """The first rows; after `begin`, all rows."""
        return cast(BinaryIO, _Lines(self)) if self._is_live else io.BytesIO(self._whole_lines())

    def version(self) -> Version:
        return Version(size_bytes=self._size_bytes, modified="arriving")

    def read(self, most: int) -> bytes:
        """Lines, about so many bytes of them, as soon as there is one; a part of a line that is longer or the last."""
        while True:
            end = self._read.rfind(b"\n", 0, most) + 1
            if end or self._has_ended or len(self._read) >= most:
                return self._taken(end or most)
            self._fill(None)

    def readline(self, most: int) -> bytes:
        """The rest of a line, or so many bytes of it."""
        while True:
            end = self._read.find(b"\n", 0, most) + 1
            if end or self._has_ended or len(self._read) >= most:
                return self._taken(end or most)
            self._fill(None)

    def stop(self) -> None:
        """End the reading of another thread."""
        os.write(self._wake, b".")

    def close(self) -> None:
        for descriptor in (self._descriptor, self._woken, self._wake):
            os.close(descriptor)

    def _taken(self, size: int) -> bytes:
        taken = bytes(self._read[:size])
        del self._read[:size]
        return taken

    def _whole_lines(self) -> bytes:
        end = self._read.rfind(b"\n") + 1
        is_too_long = not end and len(self._read) > MAX_LINE_BYTES  # its rest is not waited for
        return bytes(self._read if self._has_ended or is_too_long else self._read[:end])

    def _fill(self, seconds: float | None) -> bool:
        """Read what has come, once there is something; whether there was before the time is over."""
        ready = dict(self._poll.poll(None if seconds is None else seconds * 1000))
        if self._woken in ready:
            raise _StoppedError
        if ready.pop(self._output, 0) & (select.POLLERR | select.POLLHUP):
            raise _ReaderGoneError
        if self._descriptor not in ready:
            return False
        data = os.read(self._descriptor, _READ_BYTES)
        self._read += data
        self._has_ended = not data
        return True


class _Lines:
    """An `ArrivingInput` as a stream of bytes, which closes nothing."""

    def __init__(self, source: ArrivingInput) -> None:
        self.read, self.readline = source.read, source.readline

    def seek(self, offset: int) -> None:
        assert offset == 0, "a standard input is read once, from its start"

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: object) -> None: ...


class ArrivingShards(Iterator[Shard]):
    """The shards of rows that come while earlier ones are run; a thread reads them.

    A shard ends where one of a file would, or earlier: when its first row has waited as long as it may (a row that
    came while others were run does not wait again), and when it has so many characters that, at the pace of the shard
    before, it runs for as long as a row may wait.

    Args:
        rows: rows of the input, which the thread reads.
        source: the input.
        characters: most of a shard.
    """

    def __init__(self, rows: Iterator[Row], source: ArrivingInput, *, characters: int) -> None:
        self._rows, self._source = rows, source
        self._queue: queue.SimpleQueue[tuple[Row, float] | BaseException | None] = queue.SimpleQueue()
        self._most_bytes = _HELD_BYTES_PER_CHARACTER * characters
        self._taken_bytes = 0
        self._room = threading.Event()
        self._is_stopped = False
        self._oldest: float | None = None
        self._characters = 0
        self._begun = 0.0
        self._pace = 0.0
        self._shards = split_into_shards(self._arrived(), characters=characters)
        self._thread = threading.Thread(target=self._read_all, name="arriving-rows", daemon=True)
        source.begin()
        self._thread.start()

    def __next__(self) -> Shard:
        if self._characters:
            self._pace = self._characters / max(time.monotonic() - self._begun, 1e-6)
        self._oldest, self._characters = None, 0
        shard = next(self._shards)
        self._begun = time.monotonic()
        return shard

    def stop(self) -> None:
        """End the thread, and the shards."""
        if not self._is_stopped:
            self._is_stopped = True
            self._source.stop()
            self._room.set()
            self._queue.put(None)
            self._thread.join()
            self._source.close()

    def _arrived(self) -> Iterator[Row | None]:
        """The rows; None where those that came should wait no longer, or are enough."""
        most = 0.0
        while True:
            wait = None if self._oldest is None else self._oldest + self._source.wait_seconds - time.monotonic()
            try:
                item = self._queue.get(timeout=_SIGNAL_SECONDS if wait is None else max(0.0, wait))
            except queue.Empty:
                if wait is not None:
                    yield None
                continue
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            row, arrived = item
            if self._oldest is None:
                self._oldest, most = arrived, self._most_characters(time.monotonic() - arrived)
            self._characters += row.characters
            self._taken_bytes = row.end.offset
            self._room.set()
            yield row
            if self._characters >= most:
                yield None

    def _most_characters(self, age: float) -> float:
        """Characters that end a shard whose first row has waited so many seconds."""
        seconds = max(self._source.wait_seconds, _LEAST_SECONDS, _SHARE_OF_AGE * age)
        return max(_FEWEST_CHARACTERS, self._pace * seconds)

    def _read_all(self) -> None:
        end: Any = None
        try:
            for row in self._rows:
                self._queue.put((row, time.monotonic()))
                while row.end.offset - self._taken_bytes > self._most_bytes and not self._is_stopped:
                    self._room.wait()
                    self._room.clear()
        except _StoppedError:
            pass
        except _ReaderGoneError:
            end = BrokenPipeError()
        except BaseException as error:
            end = error
        self._queue.put(end)
