"""Everything worth knowing on a machine with an NVIDIA GPU, in one command and at most 30 minutes.

Usage: python -m benchmarks.gpu --output FILE [--plan first|second] [--minutes 30] [--steps NAME ...]
       python -m benchmarks.gpu --list         the plan: the steps, the minutes that they may take, and what each proves
       python -m benchmarks.gpu --rehearse     all on the CPU with tiny shapes: proves the code, times nothing
       python -m benchmarks.gpu kernels window|blocks     one operator's kernels, at the requested lengths

Each step is a process of its own, so that a crash, a hang or a broken CUDA context loses that step only, and appends
each row to FILE as soon as it has it. A package that is missing is a line. The exit status is 0 if every step ran or
was skipped for a reason that is printed, 1 if one failed, and 3 where there is no GPU.
"""

from __future__ import annotations

import sys

from benchmarks.gpu.suite import main

if __name__ == "__main__":
    sys.exit(main(__doc__))
