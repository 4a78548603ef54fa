#!/usr/bin/env bash
# Library: onnxruntime 1.31.1 on x86-64
# Guess: a graph of float16 tensors is computed in float16, so that a run on a CPU shows where values overflow.
# Happens: between Cast nodes the CPU provider computes it in float32, at every level of optimization: 300 * 300 / 300, whose
#   product is infinite in float16, is 300. ONNX's reference gives infinity.
# Minded: exporter/hdexport/verify/fp16_overflow.py, exporter/hdexport/graph/passes/watch_magnitudes.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnxruntime==1.31.1 onnx==1.23.2 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
import onnx
import onnxruntime
from onnx.reference import ReferenceEvaluator

model = onnx.parser.parse_model("""
    <ir_version: 8, opset_import: ["" : 18]>
    there_and_back (float16[n] x, float16[n] factor) => (float16[n] y) {
        product = Mul(x, factor)
        y = Div(product, factor)
    }""")
onnx.checker.check_model(model)
inputs = {"x": np.full(1, 300, np.float16), "factor": np.full(1, 300, np.float16)}
with np.errstate(over="ignore"):
    (expected,) = ReferenceEvaluator(model).run(None, inputs)
print("onnxruntime", onnxruntime.__version__, "reference", expected)
assert np.isinf(expected[0])
for level in ("ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED"):
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    options.optimized_model_filepath = f"{level}.onnx"
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, inputs)
    nodes = [node.op_type for node in onnx.load(f"{level}.onnx").graph.node]
    print(level, found, nodes)
    assert found[0] == 300 and "Cast" in nodes
PYTHON
