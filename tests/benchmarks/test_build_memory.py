"""The benchmark of a build's memory over time: on a script that logs as a build."""

from __future__ import annotations

import os
import sys

import pytest

from benchmarks.cpu.build_memory import largest, picture, recorded

SCRIPT = """
import sys, time
block = bytearray(b"x") * 60_000_000
print("hdexport.cli.progress: Reading, the checkpoint: 1.5 s", file=sys.stderr, flush=True)
time.sleep(0.2)
print("hdexport: not a step", file=sys.stderr, flush=True)
"""


def test_the_peak_and_the_steps_of_a_process_are_recorded() -> None:
    found = recorded([sys.executable, "-c", SCRIPT], environment=os.environ)
    assert [title for title, _ in found["steps"]] == ["Reading, the checkpoint"]
    assert 60e6 < max(size for _, size in found["samples"]) <= found["peak_bytes"] < 90e6
    drawn = picture([{**found, "title": "a script"}]).to_json()
    assert "a script: 0.07 GB at most" in drawn
    assert "Reading, the checkpoint" in drawn


def test_a_process_that_fails_is_an_error() -> None:
    with pytest.raises(SystemExit, match=r"(?s)exit status 3.*why"):
        recorded(
            [sys.executable, "-c", "import sys; print('why', file=sys.stderr); sys.exit(3)"], environment=os.environ
        )


def test_fewer_points_keep_the_peak() -> None:
    samples = [(second / 100, 7 if second == 33 else 1) for second in range(100)]
    kept = largest(samples, 5)
    assert len(kept) == 5
    assert (0.33, 7) in kept
