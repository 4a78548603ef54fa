"""A function that runs in a process of its own; any error that it raises is a result.

``python -m hdexport.bench.measure.remote NAME FOLDER`` is that process: the folder holds the call, and gets its result.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from hdexport.bench.measure.processes import ProcessOutcome, own_output, run_process
from hdexport.bench.results.result import Status
from hdexport.support.memory import says_out_of_memory
from hdruntime.errors import HdexportError, OutOfMemoryError

logger = logging.getLogger(__name__)

_CALL, _RESULT = "call.pickle", "result.pickle"
_REASON_LINES = 2
_REASON_CHARACTERS = 500
"""Per line."""

Result = TypeVar("Result")


def run_function(
    call: Callable[[], Result], *, time_limit_s: float, memory_limit_bytes: int | None = None
) -> tuple[ProcessOutcome, Result | None]:
    """Call a function in a process of its own.

    Args:
        call: a function at a module's top level, or a `functools.partial` of one.
        time_limit_s: of the process; see `run_process`.
        memory_limit_bytes: likewise.

    Returns:
        how the process ended, and the function's result if that is ``ok``.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / _CALL).write_bytes(pickle.dumps(call))
        function = getattr(call, "func", call)
        command = ["-m", __name__, f"{function.__module__}:{function.__qualname__}", folder]
        outcome = run_process(command, time_limit_s=time_limit_s, memory_limit_bytes=memory_limit_bytes)
        if outcome.status is not Status.OK:
            return outcome, None
        result: Result = pickle.loads((Path(folder) / _RESULT).read_bytes())
    return outcome, result


def main(arguments: Sequence[str]) -> int:
    """Make the call, and print how it ended as a line of JSON."""
    folder = Path(arguments[-1])
    with own_output() as output:
        call = pickle.loads((folder / _CALL).read_bytes())
        said: dict[str, str] = {}
        try:
            (folder / _RESULT).write_bytes(pickle.dumps(call()))
        except Exception as error:  # whatever a framework raises is a result, and does not affect other processes
            logger.warning("%s failed", arguments[0], exc_info=True)
            status = Status.OUT_OF_MEMORY if _is_out_of_memory(error) else Status.FAILED
            said = {"status": status.value, "reason": _reason(error)}
        print(json.dumps(said), file=output)
    return 0


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error or its cause says that memory was short."""
    if error is None:
        return False
    if isinstance(error, (MemoryError, OutOfMemoryError)) or says_out_of_memory(f"{type(error).__name__}: {error}"):
        return True
    return _is_out_of_memory(error.__cause__)


def _reason(error: Exception) -> str:
    text = str(error) if isinstance(error, HdexportError) else f"{type(error).__name__}: {error}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "\n".join(line[:_REASON_CHARACTERS] for line in lines[:_REASON_LINES])


if __name__ == "__main__":
    code = main(sys.argv[1:])
    # After the call, whose memory may be the measured one.
    from hdexport.checkpoint.temporary_directory import remove_converted

    remove_converted()
    sys.stderr.flush()
    # The result is written. Frameworks' work at the end of Python takes time, and can crash.
    os._exit(code)
