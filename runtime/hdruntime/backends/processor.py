"""Instructions that this machine's processor has, and that decide which backend is the faster one."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
"""The file where Linux lists processors' flags; other systems have no such file."""

_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "avx_ne_convert"})
"""Flags as Linux names them, any of which OpenVINO 2026.4.1 computes in bfloat16 with."""

_INT8 = frozenset({"avx512_vnni", "avx_vnni"})
"""Flags of processors that multiply and add int8 in one instruction."""


def has_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16; True where that is not known."""
    return _has_any(_BFLOAT16)


def has_int8() -> bool:
    """Whether the processor adds products of int8 without rounding to 16 bits (VNNI); True where that is not known."""
    return _has_any(_INT8)


def _has_any(wanted: AbstractSet[str]) -> bool:
    try:
        lines = _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return True
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), None)
    return flags is None or not wanted.isdisjoint(flags)
