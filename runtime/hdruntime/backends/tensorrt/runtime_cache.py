"""TensorRT-RTX's runtime cache on disk: the kernels that it compiled for this GPU, so that the next start is fast.

The file lies beside the engine, or in the user's cache directory if the bundle is read-only. The bundle's manifest does
not list it: it belongs to this machine and may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

from hdruntime.constants import RUNTIME_CACHE_SUFFIX
from hdruntime.whole_files import write_whole

logger = logging.getLogger(__name__)

_DIGEST_BYTES = hashlib.sha256().digest_size

_KEY_DIGITS = 16

_SAVE_SECONDS = 60.0
"""Between two writes while new shapes arrive; a killed process loses no more."""


class RuntimeCacheFile:
    """Where the cache of an engine is kept. `identity` is everything that decides whether the content fits: the engine,
    the GPU, the driver, the version."""

    def __init__(self, engine: Path, identity: Sequence[str]) -> None:
        key = hashlib.sha256("\0".join(identity).encode()).hexdigest()[:_KEY_DIGITS]
        name = f"{engine.stem}-{key}{RUNTIME_CACHE_SUFFIX}"
        # The XDG Base Directory Specification ignores relative paths.
        cache_home = os.environ.get("XDG_CACHE_HOME", "")
        self._user_folder = (Path(cache_home) if os.path.isabs(cache_home) else Path.home() / ".cache") / "hdexport"
        self.paths = (engine.with_name(name), self._user_folder / name)
        """Possible paths of the file; :meth:`write` takes the first writable one."""

    def read(self) -> bytes | None:
        """The content; None if there is no intact file."""
        for path in self.paths:
            try:
                data = path.read_bytes()
            except OSError:
                continue
            # TensorRT-RTX parses the content in native code, which must not see a damaged file.
            if hashlib.sha256(data[_DIGEST_BYTES:]).digest() == data[:_DIGEST_BYTES]:
                return data[_DIGEST_BYTES:]
            logger.warning("the runtime cache %s is damaged and ignored; it will be written again", path)
        return None

    def write(self, content: bytes) -> None:
        """Store the content, whole or not at all; log a warning if no path is writable."""
        data = hashlib.sha256(content).digest() + content
        reasons = []
        for path in self.paths:
            try:
                if path.parent == self._user_folder:
                    path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(path, data)
            except OSError as error:
                reasons.append(f"{path}: {error.strerror or error}")
                continue
            return
        logger.warning("TensorRT-RTX's runtime cache could not be written: %s", "; ".join(reasons))


class RuntimeCache:
    """The cache of a loaded engine, which grows with every new shape. `content` is TensorRT-RTX's object."""

    def __init__(self, file: RuntimeCacheFile, content: Any) -> None:
        self._file, self._content = file, content
        self._shapes: set[Hashable] = set()
        self._is_unsaved, self._saved = False, time.monotonic()

    def note(self, shape: Hashable) -> None:
        """Say that a shape was run, which may be a new one."""
        self._is_unsaved |= shape not in self._shapes
        self._shapes.add(shape)
        if time.monotonic() - self._saved >= _SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        """Write the cache if it has grown."""
        if self._is_unsaved:
            self._file.write(bytes(memoryview(self._content.serialize())))
            self._is_unsaved, self._saved = False, time.monotonic()
