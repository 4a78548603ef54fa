"""Everything worth knowing on a machine with an NVIDIA GPU, in one command and at most eight minutes.

Usage: python benchmarks/gpu_suite.py --output FILE [--minutes 8] [--steps NAME ...] [--bundle BUNDLE]
       python benchmarks/gpu_suite.py --list         the steps, in their order, with the seconds that each may take
       python benchmarks/gpu_suite.py --rehearse     all on the CPU with tiny shapes: proves the code, times nothing

Each step is a process of its own, so that a crash, a hang or a broken CUDA context loses that step only, and appends
each row to FILE as soon as it has it. A package that is missing is a line. The exit status is 0 if every step ran or
was skipped for a reason that is told, 1 if one failed, and 3 where there is no GPU.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[1]


def _provide_hdexport() -> None:
    """Let this process and those that it starts import hdexport from the repository where it is not installed."""
    if importlib.util.find_spec("hdexport") is not None:
        return
    sources = [str(_ROOT / name) for name in ("exporter", "runtime", "plugins")]
    sys.path[1:1] = sources
    os.environ["PYTHONPATH"] = os.pathsep.join([*sources, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)


if __name__ == "__main__":
    _provide_hdexport()
    # The package beside this file; Python prefers a package to a module of its name.
    from gpu_suite.suite import main

    sys.exit(main(__doc__, str(Path(__file__))))
