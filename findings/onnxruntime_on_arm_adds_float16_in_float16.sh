#!/usr/bin/env bash
# Library: onnxruntime 1.31.1 on Linux on ARM (in QEMU 10.0)
# Guess: the result of a float16 MatMul is the exact product, rounded to float16, because libraries add in float32: libraries
#   for GPUs and ONNX Runtime on x86-64 do.
# Happens: where the processor has float16 arithmetic (Neoverse N1) sums are float16: 4096 ones are 2048, since 2048 + 1 rounds
#   to 2048, and 4096 times 0.1 is 256. Where it has none (Cortex-A72) both are right: the graph is computed in float32.
# Minded: exporter/hdexport/graph/passes/upcast_to_float32.py, docs/precision.md
# Seen: 2026-11-29
set -euo pipefail
arm64=$(dirname "$(realpath "$0")")/../.ci/arm64
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$arm64" install "$folder/arm" onnxruntime==1.31.1 onnx==1.23.2 numpy==2.4.6
cd "$folder"
cat > sums.py <<'PYTHON'
import sys

import numpy as np
import onnx
import onnxruntime

model = onnx.parser.parse_model("""
    <ir_version: 8, opset_import: ["" : 18]>
    sums (float16[1, 4096] x, float16[4096, 8] ones) => (float16[1, 8] y) { y = MatMul(x, ones) }""")
session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
ones = np.ones((4096, 8), np.float16)
sums = [float(session.run(None, {"x": np.full((1, 4096), x, np.float16), "ones": ones})[0][0, 0]) for x in (1, 0.1)]
print("onnxruntime", onnxruntime.__version__, *sys.argv[1:], sums)
assert sums == ([2048, 256] if sys.argv[1] == "neoverse-n1" else [4096, 409.5])
PYTHON
for processor in cortex-a72 neoverse-n1; do
    QEMU_CPU=$processor "$arm64" run "$folder/arm" python3 sums.py "$processor"
done
