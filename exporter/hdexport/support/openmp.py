"""How PyTorch's threads wait for work, where others compute in the same process."""

from __future__ import annotations

__all__ = ["let_threads_sleep"]

import os


def let_threads_sleep() -> None:
    """Make threads of OpenMP sleep while they wait; it has no effect once PyTorch is loaded.

    Waiting threads would keep a core busy instead, for which ONNX Runtime's threads and other processes wait. With 12
    processes on two cores, a verification of BERT-base took 14 s of CPU time, and takes 7 s so.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
