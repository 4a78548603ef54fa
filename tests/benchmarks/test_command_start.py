"""The benchmark of how soon a command says something: each case finds what it waits for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("case", ["first line", pytest.param("doctor", marks=pytest.mark.nightly)])
def test_a_case_has_its_figures(case: str) -> None:
    command = [sys.executable, "-m", "benchmarks.cpu.command_start", "--case", case]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    figures = json.loads(done.stdout)
    assert set(figures) == {"latency_ms", "cpu_ms", "growth_bytes"}
    assert min(figures.values()) > 0
