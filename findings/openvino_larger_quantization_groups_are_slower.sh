#!/usr/bin/env bash
# Library: openvino 2026.4.1
# Guess: of activations that OpenVINO quantizes while it runs (DYNAMIC_QUANTIZATION_GROUP_SIZE), larger groups have fewer scales
#   and so take less time, for less accuracy.
# Happens: on a CPU with AVX-512 VNNI groups of 1024 channels are less accurate than groups of 128 and take 1.1 times their CPU
#   time, for 128 tokens and weights of uint8 with zero points; groups of 32 take 1.2 times. Without VNNI only errors
#   are compared.
# Minded: runtime/hdruntime/backends/openvino/runner.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check openvino==2026.4.1 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import statistics
import time
from pathlib import Path

import numpy as np
import openvino
from openvino import opset13 as op

CHANNELS, OUTPUTS, LAYERS, TOKENS = 1024, 3072, 8, 128
source = np.random.default_rng(0)
given, results, exact = op.parameter([-1, CHANNELS], np.float32), [], []
x = source.standard_normal((TOKENS, CHANNELS), dtype=np.float32)
for _ in range(LAYERS):
    values = source.integers(0, 256, (OUTPUTS, CHANNELS), dtype=np.uint8)
    zero, scale = source.integers(120, 136, (OUTPUTS, 1), dtype=np.uint8), np.full((OUTPUTS, 1), 0.001, np.float32)
    wide = op.subtract(op.convert(op.constant(values), "f32"), op.convert(op.constant(zero), "f32"))
    results.append(op.result(op.matmul(given, op.multiply(wide, op.constant(scale)), False, True)))
    exact.append(x @ ((values.astype(np.float32) - zero) * scale).T)
model = openvino.Model(results, [given], "linear")
core = openvino.Core()


def request_of(size):
    options = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1, "DYNAMIC_QUANTIZATION_GROUP_SIZE": size}
    return core.compile_model(model.clone(), "CPU", options).create_infer_request()


requests = {size: request_of(size) for size in (32, 128, 1024)}
seconds, errors = {size: [] for size in requests}, {}
for _ in range(21):
    for size, request in requests.items():
        began = time.process_time()
        found = request.infer([x])
        seconds[size].append(time.process_time() - began)
        errors[size] = max(float(np.abs(found[i] - right).std() / right.std()) for i, right in enumerate(exact))
print("openvino", openvino.__version__)
medians = {size: statistics.median(times[1:]) for size, times in seconds.items()}
for size in requests:
    print(f"groups of {size}: {medians[size] / medians[128]:.2f} of the time of 128, error {errors[size]:.1e}")
assert errors[32] < errors[128] < errors[1024]
if "avx512_vnni" in Path("/proc/cpuinfo").read_text():
    assert medians[1024] > 1.03 * medians[128] and medians[32] > 1.03 * medians[128]
PYTHON
