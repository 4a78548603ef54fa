"""Programs that embed texts, one file each, measured in a process and an environment of their own.

``measure.py`` runs in that environment, by its path; the functions here start it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cpu.build_time import process_figures

_MEASURE = Path(__file__).with_name("measure.py")


def measured(python: str, **request: Any) -> dict[str, Any]:
    """Run ``measure.py`` in a process of its own; return the figures that it writes and those of the process.

    Args:
        python: interpreter of the program's environment.
        request: keys of the request but ``output``; paths are strings.
    """
    with tempfile.TemporaryDirectory() as scratch:
        file, output = Path(scratch) / "request.json", Path(scratch) / "found.json"
        file.write_text(json.dumps({**request, "output": str(output)}), encoding="utf-8")
        figures = figures_of_process([python, str(_MEASURE), str(file)])
        return {**figures, **json.loads(output.read_text(encoding="utf-8"))}


def figures_of_process(command: Sequence[str]) -> dict[str, Any]:
    """Wall time, processor time and peak memory of a process; see `process_figures`."""
    figures = process_figures(command)
    return {
        "wall_s": figures["latency_ms"] / 1e3,
        "process_cpu_s": figures["cpu_ms"] / 1e3,
        "peak_bytes": figures["growth_bytes"],
    }


def size_of(directory: Path) -> int:
    """Bytes of the files in a folder; 0 for one that is not there."""
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
