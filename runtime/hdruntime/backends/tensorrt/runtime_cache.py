"""TensorRT-RTX's runtime cache on disk: the kernels that it compiled for this GPU, so that the next start is fast.

A file lies beside the engine, or in the user's cache directory where the bundle may not be written. A bundle's manifest
does not list it, since it is this machine's own and may be deleted at any time.
"""

from __future__ import annotations

__all__ = ["RuntimeCacheFile"]

import hashlib
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hdruntime.constants import RUNTIME_CACHE_SUFFIX

logger = logging.getLogger(__name__)

_DIGEST_BYTES = hashlib.sha256().digest_size

_KEY_DIGITS = 16


class RuntimeCacheFile:
    """Where the cache of an engine is kept.

    Args:
        engine: path of the engine.
        identity: everything that must agree for the content to be useful: the engine, the GPU, the driver, the version.
    """

    def __init__(self, engine: Path, identity: Sequence[str]) -> None:
        key = hashlib.sha256("\0".join(identity).encode()).hexdigest()[:_KEY_DIGITS]
        name = f"{engine.stem}-{key}{RUNTIME_CACHE_SUFFIX}"
        self.paths = (engine.with_name(name), _user_cache() / name)
        """Where it may be; the first of them that can be written is."""

    def read(self) -> bytes | None:
        """The content; None where there is none that is whole."""
        for path in self.paths:
            try:
                data = path.read_bytes()
            except OSError:
                continue
            # TensorRT-RTX parses it in native code, so that a torn file must not get there.
            if hashlib.sha256(data[_DIGEST_BYTES:]).digest() == data[:_DIGEST_BYTES]:
                return data[_DIGEST_BYTES:]
            logger.warning("the runtime cache %s is damaged and ignored; it is written anew", path)
        return None

    def write(self, content: bytes) -> None:
        """Keep the content, whole or not at all. Where nothing can be written that is logged, and no error."""
        data = hashlib.sha256(content).digest() + content
        reasons = []
        for path in self.paths:
            try:
                _replace(path, data)
            except OSError as error:
                reasons.append(f"{path}: {error.strerror or error}")
                continue
            return
        logger.warning("TensorRT-RTX's runtime cache could not be written: %s", "; ".join(reasons))


def _user_cache() -> Path:
    # The XDG Base Directory Specification ignores relative paths.
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if os.path.isabs(given) else Path.home() / ".cache") / "hdexport"


def _replace(path: Path, data: bytes) -> None:
    if path.parent.name == "hdexport":
        path.parent.mkdir(parents=True, exist_ok=True)
    # A name of its own: two processes may write at a time.
    handle, partial = tempfile.mkstemp(prefix=f".{path.name}-", suffix=RUNTIME_CACHE_SUFFIX, dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise
