"""Settings of a process that imports and traces much: garbage collection, OpenMP's threads, and warnings."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
from collections.abc import Iterator

from hdruntime.process_limits import chosen_threads, cpu_quota

_ALLOCATIONS = 50_000
"""Between two collections; Python's default is 700 to 2000.

Importing PyTorch and transformers and tracing a model makes millions of objects, nearly all of which stay: searching
them again and again took a sixth of a build's CPU time. The garbage that accumulates meanwhile is 3 MB.
"""


@contextlib.contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """In this block, Python looks for reference cycles less often; a process that never looks for them
    still does not."""
    allocations, *others = gc.get_threshold()
    if allocations:
        gc.set_threshold(max(allocations, _ALLOCATIONS), *others)
    try:
        yield
    finally:
        gc.set_threshold(allocations, *others)


@contextlib.contextmanager
def only_errors_of(logger: str) -> Iterator[None]:
    """In this block, a logger is silent below errors."""
    logging_of, level = logging.getLogger(logger), logging.getLogger(logger).level
    logging_of.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logging_of.setLevel(level)


def heed_quota() -> None:
    """Gives OpenMP no more threads than the quota of a container. OpenMP counts the CPUs that the process may run on,
    and its threads wait for each other after every product. This has no effect once PyTorch is loaded."""
    if cpu_quota() is not None:
        os.environ.setdefault("OMP_NUM_THREADS", str(chosen_threads()[0]))


def let_threads_sleep() -> None:
    """Makes threads of OpenMP sleep while they wait. Otherwise they would keep a core busy for which ONNX Runtime's
    threads and other processes wait: with 12 processes on two cores, a verification of BERT-base took 14 s of CPU time
    instead of 7 s. This has no effect once PyTorch is loaded."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
