"""A command whose output goes to disks that are too small for it, really."""

from __future__ import annotations

__all__ = ["on_full_disks"]

import ctypes
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from forks import Fork
from hdexport.cli import main

_SIZES = ("16k", "100k")

_CLONE_NEWNS, _CLONE_NEWUSER = 0x20000, 0x10000000
_NO_NAMESPACES = 99


def on_full_disks(arguments: Sequence[object], directory: Path) -> subprocess.CompletedProcess[str]:
    """Run a command on file systems of 16 kB and 100 kB, in a mount namespace of our own; skips where there are none.

    Returns:
        The process, a fork of this one; its output is, for each size, ``rc: CODE [what was left on the disk]``.
    """

    def run_on_each() -> int:
        os.chdir(directory)
        try:
            _mount_disks()
        except (OSError, subprocess.CalledProcessError) as error:
            print(error)
            return _NO_NAMESPACES
        for size in _SIZES:
            print("rc:", main([*map(str, arguments), "-o", f"{size}/out"]), os.listdir(size))
        return 0

    done = Fork(run_on_each, directory / "disks").finished()
    if done.returncode == _NO_NAMESPACES:
        pytest.skip(f"no mount namespaces here: {done.stdout.strip()}")
    assert done.returncode == 0, done.stderr
    return done


def _mount_disks() -> None:
    """Make disks that this process and its children alone see."""
    user, group = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS | _CLONE_NEWUSER):
        raise OSError(ctypes.get_errno(), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    for size in _SIZES:
        os.mkdir(size)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", size], check=True)
