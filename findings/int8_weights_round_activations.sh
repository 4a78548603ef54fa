#!/usr/bin/env bash
# Library: onnxruntime 1.31.1, openvino 2026.4.1
# Guess: a graph whose only quantized tensors are weights, int8 constants that DequantizeLinear makes float32, computes in
#   float32, at least where OpenVINO's INFERENCE_PRECISION_HINT is f32: the result is off by the rounding of weights alone.
# Happens: on a CPU both round the activations to int8 as well, 32 channels of a token at a time: with one value of 100 among
#   values of about 1, a product is off by 2 % of the largest. ONNX Runtime makes MatMulNBits of the nodes, and only its
#   session option session.qdq_matmulnbits_accuracy_level 1 computes in float32; OpenVINO needs
#   DYNAMIC_QUANTIZATION_GROUP_SIZE 0.
# Minded: exporter/hdexport/quantize/dynamic.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnxruntime==1.31.1 openvino==2026.4.1 \
    onnx==1.23.2 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
import onnx
import onnxruntime
import openvino
from onnx import numpy_helper

CHANNELS, OUTPUTS, SCALE = 512, 64, np.float32(0.01)
source = np.random.default_rng(0)
weight = source.integers(-127, 127, (CHANNELS, OUTPUTS)).astype(np.int8)
model = onnx.parser.parse_model(f"""
    <ir_version: 10, opset_import: ["" : 21]>
    linear (float[batch, tokens, {CHANNELS}] x) => (float[batch, tokens, {OUTPUTS}] y)
    {{ wide = DequantizeLinear(weight, scale) y = MatMul(x, wide) }}""")
model.graph.initializer.extend([numpy_helper.from_array(weight, "weight"), numpy_helper.from_array(np.asarray(SCALE), "scale")])
onnx.checker.check_model(model, full_check=True)
x = source.normal(size=(1, 16, CHANNELS)).astype(np.float32)
x[..., 0] = 100
right = x.astype(np.float64) @ (weight * np.float64(SCALE))


def error(y):
    return float(np.abs(y - right).max() / np.abs(right).max())


def in_onnxruntime(**entries):
    options = onnxruntime.SessionOptions()
    for key, value in entries.items():
        options.add_session_config_entry(f"session.{key}", value)
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return error(session.run(None, {"x": x})[0])


def in_openvino(**options):
    core = openvino.Core()
    options["INFERENCE_PRECISION_HINT"] = "f32"
    return error(core.compile_model(core.read_model(model.SerializeToString()), "CPU", options)({"x": x})[0])


found = {
    "ONNX Runtime": in_onnxruntime(),
    "ONNX Runtime, level 1": in_onnxruntime(qdq_matmulnbits_accuracy_level="1"),
    "OpenVINO": in_openvino(),
    "OpenVINO, group of 0": in_openvino(DYNAMIC_QUANTIZATION_GROUP_SIZE=0),
}
print("onnxruntime", onnxruntime.__version__, "openvino", openvino.__version__)
for name, size in found.items():
    print(f"{name}: {size:.1e} of the largest")
assert found["ONNX Runtime"] > 5e-3 and found["OpenVINO"] > 5e-3
assert found["ONNX Runtime, level 1"] < 1e-5 and found["OpenVINO, group of 0"] < 1e-5
PYTHON
