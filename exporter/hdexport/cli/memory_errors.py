"""Messages for memory that ran out, wherever that shows: in Python, the loader of shared libraries, OpenBLAS or C++."""

from __future__ import annotations

import resource
import sys

from hdexport.support.memory import says_out_of_memory

_ALSO_OUT_OF_MEMORY = (
    "failed to map segment",  # the loader of shared libraries
    "can't start new thread",  # Python, which had no room for its stack
)


def want_of_memory(error: Exception) -> str | None:
    """A message if the error is about a lack of memory, else None."""
    text = str(error)
    if not (
        isinstance(error, MemoryError) or says_out_of_memory(text) or any(said in text for said in _ALSO_OUT_OF_MEMORY)
    ):
        return None
    # NumPy's message is a page about broken installations, which ends with the error.
    said = next((line for line in reversed(text.splitlines()) if line.strip()), "Python could not allocate any")
    return f"There is not enough memory: {said}\n{_advice()}"


def interrupted_by_openblas() -> str | None:
    """A message if OpenBLAS got no memory for its threads while NumPy was loaded, else None.

    OpenBLAS prints its own words and interrupts the process as Ctrl-C does.
    """
    if _address_limit() is None or "numpy" in sys.modules:
        return None
    return f"There is not enough memory: NumPy could not be loaded.\n{_advice()}"


def _advice() -> str:
    limit = _address_limit()
    if limit is None:
        return "Free memory, or use a machine that has more."
    return f"This process may have {limit / 1e6:.0f} MB of addresses; raise the limit: ulimit -v unlimited"


def _address_limit() -> int | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit
