#!/usr/bin/env bash
# Library: onnxruntime 1.31.1
# Guess: `quantize_dynamic` quantizes a matmul whose weight is stored in float16 and cast to float32, which constant folding would
#   make a float32 weight, or a message says that the matmul is left out.
# Happens: the matmul stays float32, without a message. A model with such weights, as float16 models for CPUs have them, is
#   "quantized" without a single MatMulInteger, and its file keeps its size.
# Minded: exporter/hdexport/package/int8.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnx==1.23.2 onnxruntime==1.31.1 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper
from onnxruntime.quantization import quantize_dynamic

PLAIN = """<ir_version: 8, opset_import: ["" : 18]>
    linear (float[n, 64] x) => (float[n, 256] y) { y = MatMul (x, w) }"""
CAST = """<ir_version: 8, opset_import: ["" : 18]>
    linear (float[n, 64] x) => (float[n, 256] y) {
        wide = Cast <to = 1> (w)
        y = MatMul (x, wide)
    }"""
found = {}
for name, text, dtype in (("float32", PLAIN, np.float32), ("float16, cast", CAST, np.float16)):
    model = onnx.parser.parse_model(text)
    weight = np.random.default_rng(0).normal(size=(64, 256)).astype(dtype)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    onnx.save(model, "model.onnx")
    quantize_dynamic("model.onnx", "int8.onnx")
    found[name] = [node.op_type for node in onnx.load("int8.onnx").graph.node]
    print("onnxruntime", onnxruntime.__version__, f"{name}:", ", ".join(found[name]))
assert "MatMulInteger" in found["float32"]
assert "MatMulInteger" not in found["float16, cast"], "it is quantized"
PYTHON
