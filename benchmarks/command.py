"""Run a benchmark's command, with errors as `hdexport` prints them."""

from __future__ import annotations

import sys
from collections.abc import Callable

from hdruntime.errors import HdexportError


def exit_with(main: Callable[[], int]) -> None:
    """End the process with the exit code of `main`, or with 1 and the message of an error."""
    try:
        code = main()
    except HdexportError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 1
    sys.exit(code)
