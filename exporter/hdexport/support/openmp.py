"""How many threads PyTorch has under a quota, and how they wait for work where others compute in the same process."""

from __future__ import annotations

import os

from hdruntime.process_limits import chosen_threads, cpu_quota


def heed_quota() -> None:
    """Give OpenMP no more threads than the quota of a container; it has no effect once PyTorch is loaded.

    OpenMP counts the CPUs that the process may run on, and its threads wait for each other after every product.
    """
    if cpu_quota() is not None:
        os.environ.setdefault("OMP_NUM_THREADS", str(chosen_threads()[0]))


def let_threads_sleep() -> None:
    """Make threads of OpenMP sleep while they wait; it has no effect once PyTorch is loaded.

    Waiting threads would keep a core busy instead, for which ONNX Runtime's threads and other processes wait. With 12
    processes on two cores, a verification of BERT-base took 14 s of CPU time, and takes 7 s so.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
