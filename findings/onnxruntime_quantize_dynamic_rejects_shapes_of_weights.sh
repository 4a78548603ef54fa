#!/usr/bin/env bash
# Library: onnxruntime 1.31.1 (its quantization), onnx_ir 1.1.0
# Guess: `quantize_dynamic` takes every valid model, and shapes that a model says of its values, which the format allows for
#   weights as well, change nothing.
# Happens: it transposes the weight of a Gemm with transB and leaves the shape that the model says of it, which its own
#   inference then rejects: "Inferred shape and existing shape differ". onnx.shape_inference says no shapes of weights, and
#   onnx_ir, which PyTorch's exporter and onnxscript write with, says them all: a model that it reads and writes is no longer
#   quantized.
# Minded: exporter/hdexport/package/int8.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnxruntime==1.31.1 onnx==1.23.2 \
    onnx_ir==1.1.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import pathlib
import tempfile

import numpy as np
import onnx
import onnx_ir
import onnxruntime
from onnx import numpy_helper
from onnxruntime.quantization import quantize_dynamic

folder = pathlib.Path(tempfile.mkdtemp())
model = onnx.parser.parse_model("""
    <ir_version: 10, opset_import: ["" : 20]>
    linear (float[n, 8] x) => (float[n, 4] y) { product = Gemm <transB = 1> (x, weight) y = Relu(product) }""")
weight = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
model.graph.initializer.append(numpy_helper.from_array(weight, "weight"))
model = onnx.shape_inference.infer_shapes(model)


def outcome(model):
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, folder / "float.onnx")
    try:
        quantize_dynamic(folder / "float.onnx", folder / "int8.onnx")
    except onnx.shape_inference.InferenceError as error:
        return str(error)
    return "MatMulInteger" if "MatMulInteger" in {n.op_type for n in onnx.load(folder / "int8.onnx").graph.node} else "as it was"


rewritten = onnx_ir.to_proto(onnx_ir.from_proto(model))
found = {each: outcome(graph) for each, graph in (("as inferred", model), ("through onnx_ir", rewritten))}
print("onnxruntime", onnxruntime.__version__, "onnx_ir", onnx_ir.__version__, found)
assert [value.name for value in model.graph.value_info] == ["product"]
assert {value.name for value in rewritten.graph.value_info} == {"product", "weight"}
assert found["as inferred"] == "MatMulInteger" and "Inferred shape and existing shape differ" in found["through onnx_ir"]
PYTHON
