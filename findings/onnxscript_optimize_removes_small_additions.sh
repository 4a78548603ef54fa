#!/usr/bin/env bash
# Library: onnxscript 0.7.2
# Guess: `onnxscript.optimizer.optimize` removes additions of exactly 0 only.
# Happens: it removes `x + 1e-8`, too. The graph of 1 / (x + 1e-8) gives 1e8 at x = 0 before it is optimized, and inf after:
#   this matters where the constant keeps a division finite, as the epsilon of a norm does.
# Minded: exporter/hdexport/graph/passes/optimize.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnxscript==0.7.2 onnx==1.23.2 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
import onnx
import onnxscript.optimizer
from onnx.reference import ReferenceEvaluator

model = onnx.parser.parse_model("""
    <ir_version: 10, opset_import: ["" : 20]>
    reciprocal (float[n] x) => (float[n] y) {
        epsilon = Constant <value = float {1e-8}> ()
        one = Constant <value = float {1.0}> ()
        sum = Add(x, epsilon)
        y = Div(one, sum)
    }""")
onnx.checker.check_model(model)
x = {"x": np.zeros(1, np.float32)}
before = ReferenceEvaluator(model).run(None, x)[0]
optimized = onnxscript.optimizer.optimize(model)
with np.errstate(divide="ignore"):
    after = ReferenceEvaluator(optimized).run(None, x)[0]
operators = [node.op_type for node in optimized.graph.node]
print("before", before, "after", after, "operators after", operators)
assert np.isclose(before[0], 1e8) and np.isinf(after[0]) and "Add" not in operators
PYTHON
