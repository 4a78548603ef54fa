#!/usr/bin/env bash
# Library: openvino 2026.4.1
# Guess: a model with dynamic axes takes as much memory for a text as the same model reshaped to the text's static shapes, since
#   all shapes are known when it runs.
# Happens: on a CPU only values of static shapes are packed into one block of memory by lifetime. Values of dynamic shapes
#   share blocks, each as large as its largest value: four gated layers take 225 MB for 8192 tokens, not 134.
# Minded: runtime/hdruntime/backends/openvino/runner.py, docs/precision.md
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check openvino==2026.4.1 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import ctypes
from pathlib import Path

import numpy as np
import openvino
from openvino import opset13 as op

TOKENS, HIDDEN, INNER, LAYERS = 8192, 256, 2048, 4


def megabytes():
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) / 1024


def gated_layers():
    draw = np.random.default_rng(0)

    def linear(states, rows, columns):
        weights = draw.standard_normal((rows, columns)).astype(np.float32) / rows**0.5
        return op.matmul(states, op.constant(weights), False, False)

    states = given = op.parameter([-1, HIDDEN], np.float32)
    for _ in range(LAYERS):
        for inner in (HIDDEN, INNER):
            gate = op.multiply(op.sigmoid(linear(states, HIDDEN, inner)), linear(states, HIDDEN, inner))
            states = op.add(states, linear(gate, inner, HIDDEN))
    return openvino.Model([op.result(op.reduce_mean(states, op.constant([0])))], [given], "layers")


def run(model):
    """The result of a text, and the megabytes that the first run took."""
    request = openvino.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"}).create_infer_request()
    before = megabytes()
    request.infer([np.linspace(-1, 1, TOKENS * HIDDEN, dtype=np.float32).reshape(TOKENS, HIDDEN)])
    return request.get_output_tensor().data.copy(), megabytes() - before


dynamic, dynamic_memory = run(gated_layers())
model = gated_layers()
model.reshape([TOKENS, HIDDEN])
static, static_memory = run(model)
print("openvino", openvino.__version__)
print(f"memory of a run: {dynamic_memory:.0f} MB with dynamic shapes, {static_memory:.0f} MB with static shapes")
np.testing.assert_allclose(dynamic, static, atol=1e-4)
assert dynamic_memory > 1.2 * static_memory
PYTHON
