"""A library name that is missing from TensorRT-RTX's wheel, made resolvable without changing the installation.

When the ONNX parser of TensorRT-RTX 1.7.1 imports a plugin it opens ``libtensorrt_rtx.so``, while the wheel
ships ``libtensorrt_rtx.so.1`` only; the exception that follows ends the process ("terminate called without an
active exception"). The parser looks beside itself (RPATH ``$ORIGIN``), and a library's origin is the path it
was first opened by. So the wheel's libraries are opened through a private directory of links that has the
missing name too. They are the same files, hence the same loaded libraries for everyone who opens them later
by another path.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib.util
import logging
import shutil
import sys
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

_PACKAGE = "tensorrt_rtx_libs"
_LIBRARY = "libtensorrt_rtx.so"
_VERSIONED = "libtensorrt_rtx.so.1"
_PARSER = "libtensorrt_onnxparser_rtx.so.1"


def provide_library_link() -> bool:
    """Make ``libtensorrt_rtx.so`` resolvable for TensorRT-RTX's parser; call it before importing the package.

    Returns:
        Whether the parser can import plugins. It cannot if TensorRT-RTX was loaded before from an
        installation without the link.
    """
    folder = _libraries_folder()
    if folder is None or (folder / _LIBRARY).exists() or not (folder / _VERSIONED).exists():
        # A system-wide installation or a wheel that has the link, or Windows, where names have no versions.
        return True
    if _PACKAGE in sys.modules:
        return _linked
    _open_through_links(folder)
    return True


_linked = False


def _libraries_folder() -> Path | None:
    spec = importlib.util.find_spec(_PACKAGE)
    return None if spec is None or spec.origin is None else Path(spec.origin).resolve().parent


def _open_through_links(folder: Path) -> None:
    global _linked
    links = Path(tempfile.mkdtemp(prefix="hdexport-tensorrt-rtx-"))
    atexit.register(shutil.rmtree, links, ignore_errors=True)
    (links / _LIBRARY).symlink_to(folder / _VERSIONED)
    for name in (_VERSIONED, _PARSER):
        (links / name).symlink_to(folder / name)
        ctypes.CDLL(str(links / name))
    _linked = True
    logger.debug("TensorRT-RTX's libraries were opened through %s", links)
