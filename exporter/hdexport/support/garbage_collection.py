"""How often Python looks for reference cycles while much is imported and traced."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_ALLOCATIONS = 50_000
"""Between two collections; Python's default is 700 to 2000.

Importing PyTorch and transformers and tracing a model makes millions of objects, nearly all of which stay: searching
them again and again took a sixth of a build's CPU time. The garbage that piles up meanwhile is 3 MB.
"""


@contextlib.contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """While this holds, cycles are looked for less often; a process that never looks for them still does not."""
    allocations, *others = gc.get_threshold()
    if allocations:
        gc.set_threshold(max(allocations, _ALLOCATIONS), *others)
    try:
        yield
    finally:
        gc.set_threshold(allocations, *others)
