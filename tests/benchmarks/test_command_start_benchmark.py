"""The benchmark of how soon a command says something: each case finds what it waits for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "command_start.py"


@pytest.mark.parametrize("case", ["first line", "doctor"])
def test_a_case_has_its_figures(case: str) -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--case", case], capture_output=True, text=True, check=True)
    figures = json.loads(done.stdout)
    assert set(figures) == {"latency_ms", "cpu_ms", "growth_bytes"}
    assert min(figures.values()) > 0
