#!/usr/bin/env bash
# Library: openvino 2026.4.1
# Guess: OpenVINO's ONNX frontend expands the functions of a model, as it expands ONNX's own operators that are functions.
# Happens: a valid model with a function of its own is not loaded: "No conversion rule found for operations". onnx's inliner
#   makes a model of it that loads.
# Minded: exporter/hdexport/graph/targets/openvino/lowering.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check openvino==2026.4.1 onnx==1.23.2 onnxruntime==1.31.1 \
    numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
import onnx
import onnx.inliner
import onnxruntime
import openvino

MODEL = onnx.parser.parse_model("""
    <ir_version: 10, opset_import: ["" : 20, "own" : 1]>
    double (float[n] x) => (float[n] y) { y = own.Twice(x) }
    <opset_import: ["" : 20], domain: "own"> Twice (x) => (y) { y = Add(x, x) }""")
onnx.checker.check_model(MODEL, full_check=True)
X = np.ones(2, np.float32)


def loaded(model):
    core = openvino.Core()
    try:
        return core.compile_model(core.read_model(model.SerializeToString()), "CPU")(X)[0].tolist()
    except RuntimeError as error:
        return next(line for line in str(error).splitlines() if "rule" in line)


session = onnxruntime.InferenceSession(MODEL.SerializeToString(), providers=["CPUExecutionProvider"])
runtime = session.run(None, {"x": X})[0].tolist()
found, inlined = loaded(MODEL), loaded(onnx.inliner.inline_local_functions(MODEL))
print("openvino", openvino.__version__, "|", found, "| inlined:", inlined, "| ONNX Runtime:", runtime)
assert "No conversion rule found for operations: own.Twice" in found
assert inlined == runtime == [2.0, 2.0]
PYTHON
