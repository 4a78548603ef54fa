#!/usr/bin/env bash
# Library: onnxruntime 1.31.1
# Guess: after a run with `memory.enable_memory_arena_shrinkage` the session has no more memory than before the run, at least once
#   its results are deleted; and without the option, a session returns memory when it runs small batches for long.
# Happens: the run shrinks while its results are in the arena, so that their regions stay, also when the results are gone: 36 of
#   105 MB for 16384 rows here, until another run with the option. Without it, all 105 MB stay for 20 runs of 16 rows.
# Minded: runtime/hdruntime/backends/onnxruntime/cpu.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnxruntime==1.31.1 onnx==1.23.2 numpy==2.4.6
cd "$folder"
cat > memory.py <<'PYTHON'
import sys

import numpy as np
import onnx
import onnxruntime

shrinks = sys.argv[1] == "shrinks"
layers = "\n".join(
    f"wide{i} = MatMul(x{i}, up) relu{i} = Relu(wide{i}) narrow{i} = MatMul(relu{i}, down) x{i + 1} = Add(narrow{i}, x{i})"
    for i in range(4)
)
model = onnx.parser.parse_model(f"""
    <ir_version: 8, opset_import: ["" : 18]>
    network (float[rows, 256] x0, float[256, 1024] up, float[1024, 256] down) => (float[rows, 256] x4) {{ {layers} }}""")
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
shrinking = onnxruntime.RunOptions()
shrinking.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
weights = {"up": np.zeros((256, 1024), np.float32), "down": np.zeros((1024, 256), np.float32)}


def run(rows):
    return session.run(None, {"x0": np.zeros((rows, 256), np.float32), **weights}, shrinking if shrinks else None)


def megabytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096 / 1e6


run(16)
before = megabytes()
results = run(16384)
del results
after_long = megabytes() - before
run(16)
after_short = megabytes() - before
for _ in range(19):
    run(16)
print(f"onnxruntime {onnxruntime.__version__}, {'with' if shrinks else 'without'} the option: {after_long:.0f} MB after the "
      f"run, {after_short:.0f} after the next, {megabytes() - before:.0f} after 20")
if shrinks:
    assert 20 < after_long < 60 and after_short < 10
else:
    assert after_long > 80 and megabytes() - before > 80
PYTHON
for option in shrinks keeps; do
    "$folder/venv/bin/python" memory.py "$option"
done
