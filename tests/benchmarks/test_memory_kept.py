"""What a model keeps of a long text's memory shows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.cpu import memory_kept
from support.pages import ROOT


@pytest.mark.parametrize("grows", [False, True], ids=["flat", "grows"])
def test_memory_that_goes_on_growing_is_seen(grows: bool) -> None:
    kept = []

    def run(ids: np.ndarray) -> np.ndarray:
        """Two megabytes more per call, touched, until a session with a bound would drop it."""
        if grows or len(kept) < 60:
            kept.append(np.ones(2**18))
        return np.zeros((1, ids.shape[1], 4), np.float32)

    found = memory_kept.grown_by(run, 200, 512)
    assert len(found["resident_mb"]) == 10
    (target, *_) = memory_kept.flat_targets()
    assert (found["kept_mb"] > target.at_most) == grows


_LONG_TEXT = """
import json, sys
import numpy as np
from benchmarks.cpu import memory_kept
kept, keeps = [], sys.argv[1] == "True"
def run(ids):
    # A megabyte for each ten tokens, touched.
    states = np.ones((1, ids.shape[1], 2**18 // 10), np.float32)
    if keeps and ids.shape[1] == 1000:
        kept.append(states)
    return states[:, :, :4].copy()
found = memory_kept.kept_by(run, 1000)
print(json.dumps({name: found[name] for name in ("growth_bytes", "kept_mb", "resident_mb")}))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from /proc, which Linux has")
@pytest.mark.parametrize("keeps", [False, True], ids=["gives back", "keeps"])
def test_what_a_long_text_leaves_is_seen(keeps: bool) -> None:
    # In a process of its own: one with very many mappings may keep what it frees.
    command = [sys.executable, "-c", _LONG_TEXT, str(keeps)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    found = json.loads(done.stdout.splitlines()[-1])
    assert 90 < found["growth_bytes"] / 1e6 < 130
    assert (found["kept_mb"] > 50) == keeps
    assert found["resident_mb"] > found["kept_mb"]
