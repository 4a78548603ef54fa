#!/usr/bin/env bash
# Library: openvino 2026.4.1
# Guess: OpenVINO's ONNX frontend reads the body of a Scan as it reads the body of a Loop: both may use values of the graph
#   around them.
# Happens: a Loop whose body does is read and right; a Scan whose body does is not read: "Number of Scan node inputs (1) is less
#   than required (2)", as it takes the outer value for an input of the body. ONNX Runtime 1.31.1 computes both.
# Minded: exporter/hdexport/graph/targets/openvino/lowering.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check openvino==2026.4.1 onnxruntime==1.31.1 \
    onnx==1.23.2 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
import onnx
import onnxruntime
import openvino

SCAN = """y = Scan <num_scan_inputs = 1, body = step (float[4] row) => (float[4] sum) { sum = Add(row, outer) }> (x)"""
LOOP = """count = Shape <start = 0, end = 1> (x) steps = Squeeze(count) yes = Constant <value = bool {1}> ()
    y = Loop <body = step (int64 number, bool before) => (bool after, float[4] sum)
        { after = Identity(before) row = Gather(x, number) sum = Add(row, outer) }> (steps, yes)"""
feeds = {"x": np.arange(12, dtype=np.float32).reshape(3, 4), "outer": np.ones(4, np.float32)}


def data(nodes):
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : 20]> map (float[n, 4] x, float[4] outer) => (float[n, 4] y) {{ {nodes} }}""")
    onnx.checker.check_model(model)
    return model.SerializeToString()


def by_openvino(nodes):
    core = openvino.Core()
    return core.compile_model(core.read_model(data(nodes)), "CPU")(feeds)[0]


for nodes in (SCAN, LOOP):
    session = onnxruntime.InferenceSession(data(nodes), providers=["CPUExecutionProvider"])
    assert (session.run(None, feeds)[0] == feeds["x"] + 1).all()
assert (by_openvino(LOOP) == feeds["x"] + 1).all()
try:
    by_openvino(SCAN)
    raise AssertionError("the Scan is read")
except RuntimeError as error:
    print("openvino", openvino.__version__, "Scan:", next(line for line in str(error).splitlines() if "Number of Scan" in line))
    assert "less than required (2)" in str(error)
PYTHON
