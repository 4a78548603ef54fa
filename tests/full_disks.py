"""A command whose output goes to disks that are too small for it, really."""

from __future__ import annotations

__all__ = ["on_full_disks"]

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

_SIZES = ("16k", "100k")

_RUN_ON_EACH = """
import os, sys
from hdexport.cli import main
sizes, arguments = sys.argv[1].split(), sys.argv[2:]
for size in sizes:
    print("rc:", main([*arguments, "-o", f"{size}/out"]), os.listdir(size))
"""


def on_full_disks(arguments: Sequence[object], directory: Path) -> subprocess.CompletedProcess[str]:
    """Run a command on file systems of 16 kB and 100 kB, in a mount namespace of our own; skips where there are none.

    Returns:
        The process; its output is, for each size, ``rc: CODE [what was left on the disk]``.
    """
    mounts = [f"mkdir {size} && mount -t tmpfs -o size={size} tmpfs {size}" for size in _SIZES]
    script = " && ".join([*mounts, 'exec "$0" -c "$@"'])
    command = ["unshare", "--mount", "--map-root-user", "sh", "-c", script, sys.executable, _RUN_ON_EACH]
    command += [" ".join(_SIZES), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=directory)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no mount namespaces here: {done.stderr.strip()}")
    return done
