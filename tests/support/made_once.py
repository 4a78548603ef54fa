"""What several tests read and is slow to make, made once for all workers of a run."""

from __future__ import annotations

__all__ = ["made_once"]

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A directory of this run by its name, filled by the first worker that asks for it. Not to be changed: copy it.

    Other callers wait meanwhile. If making it fails, nothing is left, and the next caller tries again.

    Args:
        factory: of pytest; its base directory is that of one worker, the workers' lie side by side.
        name: says all that decides what is in it, for nothing compares contents.
        make: fills the directory, which is there and empty.
    """
    base = factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "made-once"
    shared.mkdir(exist_ok=True)
    directory, done = shared / name, shared / f"{name}.done"
    with (shared / f"{name}.lock").open("w") as lock:
        # The kernel opens the lock of a worker that dies.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()
            make(directory)
            done.touch()
    return directory
