#!/usr/bin/env bash
# Library: onnx 1.23.2
# Guess: a node calls the model's function of its domain, name and overload, in ONNX's own ReferenceEvaluator, too.
# Happens: every node gets the last overload: of two nodes that call Exp and Sqrt, overloads of one function, both give square
#   roots. The checker takes the model, onnx's inliner puts Exp and Sqrt in place, and ONNX Runtime 1.31.1 computes both.
# Minded: plugins/hdplugins/attention/function_bodies.py, where bodies that differ have names that differ
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnx==1.23.2 onnxruntime==1.31.1 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
import onnx
import onnx.inliner
import onnxruntime
from onnx.reference import ReferenceEvaluator

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
runtime = session.run(["power", "root"], {"x": x})
reference = ReferenceEvaluator(model).run(["power", "root"], {"x": x})
inlined = [node.op_type for node in onnx.inliner.inline_local_functions(model).graph.node]
print("onnx", onnx.__version__, "reference", *reference, "ONNX Runtime", *runtime, "inlined", inlined)
assert np.allclose(runtime, [np.exp(x), np.sqrt(x)]) and inlined == ["Exp", "Sqrt"]
assert np.allclose(reference, [np.sqrt(x), np.sqrt(x)])
PYTHON
