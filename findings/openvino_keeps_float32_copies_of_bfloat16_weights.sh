#!/usr/bin/env bash
# Library: openvino 2026.4.1
# Guess: a weight in bfloat16 that an ONNX graph casts to float32 stays bfloat16 in memory where the session computes in
#   bfloat16, as weights of OpenVINO's own compressed models do.
# Happens: the Cast of a MatMul's weight is folded when the model is compiled, and the float32 copy stays in memory beside the
#   bfloat16 one that is multiplied. A Convert that has OpenVINO's attribute "decompression", which no ONNX file can have, is
#   not folded. Tables of a Gather are kept in bfloat16, and made float32 from float16.
# Minded: runtime/hdruntime/backends/openvino/runner.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    openvino==2026.4.1 onnx==1.23.2 numpy==2.4.6 ml_dtypes==0.5.4
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import ml_dtypes
import numpy as np
import onnx
import openvino
from onnx import TensorProto, helper, numpy_helper

ROWS, WIDTH = 5000, 256
HALF = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}


def saved(half):
    values = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(HALF[half])
    table, weight = numpy_helper.from_array(values, "table"), numpy_helper.from_array(values[:WIDTH], "weight")
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows"]),
        helper.make_node("Cast", ["rows"], ["states"], to=TensorProto.FLOAT),
        helper.make_node("Cast", ["weight"], ["weight32"], to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["states", "weight32"], ["y"]),
    ]
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, ["n"])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", WIDTH])
    model = helper.make_model(
        helper.make_graph(nodes, "g", [ids], [y], [table, weight]),
        opset_imports=[helper.make_opsetid("", 20)],
        ir_version=10,
    )
    onnx.checker.check_model(model)
    onnx.save(model, f"{half}.onnx")
    return f"{half}.onnx"


def kept(path, marked):
    """The types of the table and of the weight in the compiled model, and the answer."""
    core = openvino.Core()
    model = core.read_model(path)
    for node in model.get_ops() if marked else ():
        if node.get_type_name() == "Convert":
            node.get_rt_info()["decompression_0"] = ""
    compiled = core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    types = {}
    for node in compiled.get_runtime_model().get_ordered_ops():
        info = node.get_rt_info()
        shape = node.output(0).get_partial_shape() if node.get_output_size() else None
        if info["layerType"].astype(str) == "Const" and len(shape) == 2:
            name = "table" if shape[0].get_length() == ROWS else "weight"
            types[name] = info["outputPrecisions"].astype(str)
    return types, compiled({"ids": np.arange(7)})[0]


found = {(half, marked): kept(saved(half), marked) for half in HALF for marked in (False, True)}
print("openvino", openvino.__version__)
for (half, marked), (types, _) in found.items():
    print(half, "marked" if marked else "as read", types)
assert found["bf16", False][0] == {"table": "bf16", "weight": "f32"}
assert found["bf16", True][0] == {"table": "bf16", "weight": "bf16"}
assert found["f16", False][0]["table"] == "f32"
np.testing.assert_allclose(found["bf16", True][1], found["bf16", False][1], rtol=1e-4, atol=1e-3)
PYTHON
