#!/usr/bin/env bash
# Library: OpenVINO 2026.4.1 on ARM (in QEMU 10.0)
# Guess: int8 weights with a scale for each output, the usual form, give a MatMul's result as on x86-64, or are not supported.
# Happens: every output has the first output's scale, without a message, on each emulated processor (Cortex-A72, Neoverse N1, V1).
#   With one scale for all weights the result is right.
# Minded: runtime/hdruntime/backends/openvino/devices.py
# Seen: 2026-11-29
set -euo pipefail
arm64=$(dirname "$(realpath "$0")")/../.ci/arm64
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$arm64" install "$folder/arm" openvino==2026.4.1 onnx==1.23.2 numpy==2.4.6
cd "$folder"
cat > scales.py <<'PYTHON'
import numpy as np
import onnx
import openvino

GRAPH = """
    <ir_version: 9, opset_import: ["" : 20]>
    linear (float[n, 64] x) => (float[n, 48] y) {
        quantized = QuantizeLinear(x, one, zero)
        rounded = DequantizeLinear(quantized, one, zero)
        weights = DequantizeLinear <axis = 1> (int8_weights, scales)
        y = MatMul(rounded, weights)
    }"""
random = np.random.default_rng(0)
x = random.integers(0, 120, (5, 64)).astype(np.float32)
int8 = random.integers(-127, 128, (64, 48), np.int8)
scales = (0.001 + 0.01 * random.random(48)).astype(np.float32)
products = x @ int8.astype(np.float32)
for name, given, taken in (("one scale", scales[3], scales[3]), ("48 scales", scales, scales[0])):
    model = onnx.parser.parse_model(GRAPH)
    values = {"one": np.float32(1), "zero": np.uint8(0), "int8_weights": int8, "scales": given}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(np.asarray(value), key) for key, value in values.items())
    onnx.save(model, "model.onnx")
    compiled = openvino.Core().compile_model("model.onnx", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    result = compiled(x)[0]
    right = products * given
    print("openvino", openvino.__version__, name, "first two outputs", result[0, :2], "right", right[0, :2])
    assert np.allclose(result, products * taken, rtol=1e-4, atol=1e-2)
assert not np.allclose(result, right, rtol=0.1, atol=1)
PYTHON
QEMU_CPU=neoverse-n1 "$arm64" run "$folder/arm" python3 scales.py
