"""What all results say besides their figures, and how they are kept."""

from __future__ import annotations

import datetime
import json
import platform
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hdexport.support.redaction import redact


def now() -> str:
    """The date of a result."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def command_line(module: str) -> str:
    """How this process was started, without the file of the result: a path says something of a machine alone.

    Args:
        module: what is run, ``benchmarks.cpu.dense``.
    """
    given, kept = iter(sys.argv[1:]), []
    for argument in given:
        if argument in ("-o", "--output"):
            next(given, None)
        elif not argument.startswith("--output="):
            kept.append(argument)
    return shlex.join(["python", "-m", module, *kept])


def append(output: Path | None, row: Mapping[str, Any]) -> None:
    """Add a JSON line to a file, without paths and identifiers of this machine; None for none."""
    if output is not None:
        with output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(redact(row)) + "\n")


def show(output: Path | None, *, module: str, **figures: Any) -> None:
    """Print a result, and add it to a file.

    Args:
        output: the file; None for none.
        module: what is run, ``benchmarks.cpu.dense``.
        figures: of the result.
    """
    row = {"command": command_line(module), "date": now(), "machine": platform.machine(), **figures}
    print(row)
    append(output, row)
