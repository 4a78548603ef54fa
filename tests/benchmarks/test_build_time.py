"""The benchmark of builds: the figures of a process, and a tiny run of the whole script."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cpu import build_time

ROOT = Path(__file__).parents[2]


def python(code: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", code]


def test_time_and_peak_memory_are_those_of_the_whole_process() -> None:
    """Measured from a small process, as the script does: this one has PyTorch loaded."""
    script = (
        "import sys\nfrom benchmarks.cpu import build_time\n"
        "busy = 'kept = b\"x\" * 300_000_000; del kept; sum(range(10_000_000))'\n"
        "for code in ('import time; time.sleep(0.3)', busy):\n"
        "    print(*build_time.process_figures([sys.executable, '-I', '-S', '-c', code]).values())"
    )
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    idle, busy = ([float(figure) for figure in line.split()] for line in run.stdout.splitlines())
    (latency_ms, idle_cpu_ms, small), (_, busy_cpu_ms, large) = idle, busy
    assert latency_ms >= 300 > idle_cpu_ms
    assert busy_cpu_ms > idle_cpu_ms + 30
    assert small < 150e6
    assert 300e6 < large < 330e6


def test_a_command_that_fails_is_named_with_its_output() -> None:
    with pytest.raises(SystemExit, match=r"(?s)-c .*: exit status 3\nno weights\n"):
        build_time.process_figures(python("print('no weights'); raise SystemExit(3)"))


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.usefixtures("tiny_sentence_model")
def test_every_kind_of_build_is_measured_and_gives_the_same_answer(
    rehearse: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_time.shutil, "which", lambda name: None)
    result, printed = rehearse(build_time, "--shapes bert --hidden-size 64 --layers 1")
    assert set(result["cases"]) == {"bert build", "bert plain", "bert verified"}
    assert len(result["ratios"]) == 3
    assert all(figures["growth_bytes"] > 1e6 for figures in result["cases"].values())
    assert result["without_optimum"] == {"bert": "optimum-cli is not on the PATH"}
    assert "bert optimum: not measured: optimum-cli is not on the PATH" in printed.err
