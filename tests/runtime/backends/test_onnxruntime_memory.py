"""A session on the CPU gives the memory of a large batch back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from hdruntime.backends.onnxruntime.cpu import OnnxRuntimeRunner
from hdruntime.bundle.reader import open_bundle

_CODE = """
import sys, hdruntime, numpy as np

def resident_kib():
    with open("/proc/self/status") as lines:
        return int(next(line for line in lines if line.startswith("VmRSS:")).split()[1])

session = hdruntime.load(sys.argv[1], "onnxruntime", threads=1)
def run(rows):
    session(input_ids=np.full((rows, 16), 2))
run(1)
before = resident_kib()
run(50_000)
for _ in range(100):
    run(1)
print(before, resident_kib())
"""


def test_memory_is_as_before_after_a_large_batch_and_short_calls(bundle_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _CODE, bundle_path], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert after < 1.3 * before, f"{after / before:.2f} times as much"


def test_runs_of_more_tokens_than_a_batch_give_memory_back_and_so_does_each_next_one(bundle_path: Path) -> None:
    runner = OnnxRuntimeRunner(open_bundle(bundle_path), threads=1)
    session, gave_back = runner._session, []

    class Watched:
        def run(self, outputs: Any, inputs: Any, options: Any) -> Any:
            gave_back.append(options is not None)
            return session.run(outputs, inputs, options)

    runner._session = Watched()
    assert runner.batch_tokens == 1024
    for rows, tokens in ((64, 16), (41, 25), (1, 1), (1, 1), (41, 25), (41, 25), (64, 16), (64, 16)):
        ids = np.full((rows, tokens), 2)
        runner.start({"input_ids": ids, "attention_mask": np.ones_like(ids)}, ["last_hidden_state"])()
    assert gave_back == [False, True, True, False, True, True, True, False]
