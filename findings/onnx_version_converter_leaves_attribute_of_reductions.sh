#!/usr/bin/env bash
# Library: onnx 1.23.2
# Guess: `onnx.version_converter.convert_version` gives a valid model or fails, as it does for Pad from opset 18 to 17.
# Happens: from opset 18 to 17 the axes of ReduceL2 become an attribute, and `noop_with_empty_axes` stays, which opset 17 does
#   not have. The checker and ONNX Runtime 1.31.1 reject the model ("Unrecognized attribute: noop_with_empty_axes").
# Minded: exporter/hdexport/package/graph.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnx==1.23.2 onnxruntime==1.31.1 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import onnx
import onnxruntime
from onnx import version_converter

model = onnx.parser.parse_model("""
    <ir_version: 8, opset_import: ["" : 18]>
    norm (float[n, 3] x) => (float[n, 1] y) {
        axes = Constant <value = int64[1] {-1}> ()
        y = ReduceL2 <keepdims = 1, noop_with_empty_axes = 0> (x, axes)
    }""")
onnx.checker.check_model(model)
converted = version_converter.convert_version(model, 17)
(node,) = (node for node in converted.graph.node if node.op_type == "ReduceL2")
print("onnx", onnx.__version__, "attributes after", sorted(each.name for each in node.attribute))
try:
    onnx.checker.check_model(converted)
    raise SystemExit("the converted model is valid")
except onnx.checker.ValidationError as error:
    print("onnx:", str(error).splitlines()[0])
try:
    onnxruntime.InferenceSession(converted.SerializeToString(), providers=["CPUExecutionProvider"])
    raise SystemExit("ONNX Runtime loads the converted model")
except Exception as error:
    print("onnxruntime", onnxruntime.__version__, str(error)[-90:])
    assert "Unrecognized attribute: noop_with_empty_axes" in str(error)
PYTHON
