"""Disks that are really too small for a command's output."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from hdexport.cli import main
from support.forks import Fork

_CLONE_NEWNS, _CLONE_NEWUSER = 0x20000, 0x10000000
_NO_NAMESPACE = 99


def on_full_disks(
    arguments: Sequence[object], directory: Path, *, command: Callable[[list[str]], int] = main
) -> subprocess.CompletedProcess[str]:
    """Run a command on file systems of 16 kB and 100 kB.

    Args:
        arguments: of the command, without its output.
        directory: in which the file systems are made.
        command: the command to run.

    Returns:
        The process; its output is, for each size, ``rc: CODE [files left on the disk]``.
    """

    return in_mount_namespace(_run_on_each, command, list(map(str, arguments)), directory)


def in_mount_namespace(call: Callable[..., None], *arguments: object) -> subprocess.CompletedProcess[str]:
    """Call a function in a `Fork` with private mounts; skips where that is not possible."""
    done = Fork(_call_in_namespace, call, *arguments).finished()
    if done.returncode == _NO_NAMESPACE:
        pytest.skip(f"no mount namespaces here: {done.stdout.strip()}")
    assert done.returncode == 0, done.stderr
    return done


def mount_disk(directory: Path, size: str) -> None:
    """Make a directory an empty disk of its own, or the disk that it is one of another size."""
    if directory.exists():
        options = f"remount,size={size}"
    else:
        directory.mkdir()
        options = f"size={size}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)], check=True)


def _run_on_each(command: Callable[[list[str]], int], arguments: list[str], directory: Path) -> None:
    os.chdir(directory)
    for size in ("16k", "100k"):
        mount_disk(Path(size), size)
        print("rc:", command([*arguments, "-o", f"{size}/out"]), os.listdir(size))


def _call_in_namespace(call: Callable[..., None], *arguments: object) -> int:
    try:
        _enter_namespace()
    except OSError as error:
        print(error)
        return _NO_NAMESPACE
    call(*arguments)
    return 0


def _enter_namespace() -> None:
    """Become the administrator of private mounts.

    Raises:
        OSError: this system does not allow it.
    """
    user, group = os.getuid(), os.getgid()
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS | _CLONE_NEWUSER):
        raise OSError(ctypes.get_errno(), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
