"""What all results say besides their figures, and how they are kept."""

from __future__ import annotations

__all__ = ["append", "command_line", "now"]

import datetime
import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def now() -> str:
    """The date of a result."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def command_line(module: str) -> str:
    """How this process was started.

    Args:
        module: what is run, ``benchmarks.cpu.dense``.
    """
    return shlex.join(["python", "-m", module, *sys.argv[1:]])


def append(output: Path | None, row: Mapping[str, Any]) -> None:
    """Add a JSON line to a file; None for none."""
    if output is not None:
        with output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
