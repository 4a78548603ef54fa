"""Permissions that bind root, too: capabilities that override them are put away."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

_VERSION_3 = 0x20080522
_OVERRIDES = 1 << 1 | 1 << 2
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH of capabilities(7)."""


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Set(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


@contextlib.contextmanager
def permissions_bind() -> Iterator[None]:
    """Permissions hold for this thread, and threads and processes that it starts, whoever the user is."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "capget"):  # not Linux
        yield
        return
    header, sets = _Header(_VERSION_3, 0), (_Set * 2)()
    _require_done(libc.capget(ctypes.byref(header), sets))
    before = sets[0].effective
    sets[0].effective = before & ~_OVERRIDES
    _require_done(libc.capset(ctypes.byref(header), sets))
    try:
        yield
    finally:
        sets[0].effective = before
        _require_done(libc.capset(ctypes.byref(header), sets))


def _require_done(result: int) -> None:
    assert result == 0, ctypes.get_errno()
