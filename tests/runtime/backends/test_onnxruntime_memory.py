"""A session on the CPU gives the memory of a large batch back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
