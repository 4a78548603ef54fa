#!/usr/bin/env bash
# Library: openvino 2026.4.1
# Guess: ONNX's Attention with fewer heads of keys than of queries (grouped-query attention) runs whether the graph states the
#   number of heads or leaves it to the input's shape, as attention with equal numbers does, or is not loaded.
# Happens: where the number of heads of the keys is a dynamic axis, the graph is loaded, and each run fails ("Incompatible MatMul
#   batch dimension. Can't merge dim 4 with dim 2"). It runs with 4 and with 1 head of keys for 4 of queries, and with 2 if the
#   shape says 2. ONNX Runtime 1.31.1 computes all of them.
# Minded: exporter/hdexport/attention/dense/lower.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    openvino==2026.4.1 onnx==1.23.2 onnxruntime==1.31.1 numpy==2.4.6
ORT_DISABLE_TELEMETRY=1 "$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
import onnx
import onnxruntime
import openvino

source = np.random.default_rng(0)


def outcome(heads, axis):
    """The largest difference between the two libraries, or the error of OpenVINO's run."""
    model = onnx.parser.parse_model(f"""
        <ir_version: 11, opset_import: ["" : 23]>
        attend (float[b, 4, n, 16] q, float[b, {axis}, n, 16] k, float[b, {axis}, n, 16] v) => (float[b, 4, n, 16] y)
        {{ y = Attention(q, k, v) }}""")
    onnx.checker.check_model(model, full_check=True)
    numbers = {"q": 4, "k": heads, "v": heads}
    inputs = {name: source.normal(size=(1, number, 5, 16)).astype(np.float32) for name, number in numbers.items()}
    (expected,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, inputs)
    core = openvino.Core()
    options = {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = core.compile_model(core.read_model(model.SerializeToString()), "CPU", options)
    try:
        return f"{np.abs(compiled(inputs)[0] - expected).max():.0e}"
    except RuntimeError as error:
        return str(error).strip().splitlines()[-1]


found = {(heads, axis): outcome(heads, axis) for heads in (4, 2, 1) for axis in (heads, "h")}
print("openvino", openvino.__version__, "onnxruntime", onnxruntime.__version__)
for (heads, axis), result in found.items():
    print(f"4 heads of queries, {heads} of keys, in the graph {axis}: {result}")
assert "Can't merge dim 4 with dim 2" in found.pop((2, "h"))
assert max(map(float, found.values())) < 1e-5
PYTHON
