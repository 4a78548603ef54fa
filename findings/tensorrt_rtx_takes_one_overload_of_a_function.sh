#!/usr/bin/env bash
# Library: TensorRT-RTX 1.7.1
# Guess: a node calls the model's function of its domain, name and overload, as ONNX has it since IR version 10.
# Happens: every node gets the first overload, without a message: of two nodes that call Exp and Sqrt, overloads of one function,
#   both become Exp. ONNX Runtime 1.31.1 computes both. It takes no GPU to see this.
# Minded: plugins/hdplugins/attention/function_bodies.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check tensorrt_rtx_cu13==1.7.1.116 \
    onnx==1.23.2 onnxruntime==1.31.1 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
import onnx
import onnxruntime
import tensorrt_rtx as trt

model = onnx.parser.parse_model("""
    <ir_version: 10, opset_import: ["" : 20, "own" : 1]>
    both (float[2] x) => (float[2] power, float[2] root) {
        power = own.turn:exp(x)
        root = own.turn:sqrt(x)
    }
    <opset_import: ["" : 20], domain: "own", overload: "exp"> turn (x) => (y) { y = Exp(x) }
    <opset_import: ["" : 20], domain: "own", overload: "sqrt"> turn (x) => (y) { y = Sqrt(x) }""")
onnx.checker.check_model(model)
x = np.array([1, 4], np.float32)
session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
power, root = session.run(["power", "root"], {"x": x})
assert np.allclose(power, np.exp(x)) and np.allclose(root, [1, 2])

log = trt.Logger(trt.Logger.ERROR)
network = trt.Builder(log).create_network(0)
parser = trt.OnnxParser(network, log)
assert parser.parse(model.SerializeToString()), parser.get_error(0).desc()
operations = {}
for layer in (network.get_layer(number) for number in range(network.num_layers)):
    if layer.type == trt.LayerType.UNARY:
        layer.__class__ = trt.IUnaryLayer
        operations[layer.get_output(0).name] = layer.op.name
print("tensorrt_rtx", trt.__version__, operations)
assert operations == {"power": "EXP", "root": "EXP"}
PYTHON
