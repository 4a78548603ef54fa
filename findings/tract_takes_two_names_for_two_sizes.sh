#!/usr/bin/env bash
# Library: tract 0.23.9
# Guess: axes with two names may have one size: ONNX says that axes of one name have equal sizes, and does not say that axes
#   of two names differ. PyTorch's exporter names the inputs' axes as asked (`batch`), and leaves its own names (`s43`) in the
#   shapes of inner values.
# Happens: such a graph is not loaded ("Impossible to unify Sym(s0) with Sym(batch)"). Without shapes of inner values
#   (`value_info`), or with the inputs' names in them, it runs. ONNX Runtime 1.31.1 runs all three.
# Minded: exporter/hdexport/package/graph.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check tract==0.23.9 onnx==1.23.2 onnxruntime==1.31.1 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import numpy as np
import onnx
import onnxruntime
import tract

TABLE = np.arange(36, dtype=np.float32).reshape(9, 4)
IDS = np.array([[1, 2, 3]], np.int64)


def run(names):
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 18]>
        lookup (int64[batch, tokens] ids) => (float[batch, tokens, 4] y) {
            rows = Gather(table, ids)
            y = Mul(rows, rows)
        }""")
    model.graph.initializer.append(onnx.numpy_helper.from_array(TABLE, "table"))
    if names:
        rows = onnx.helper.make_tensor_value_info("rows", onnx.TensorProto.FLOAT, [*names, 4])
        model.graph.value_info.append(rows)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, "model.onnx")
    session = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
    assert np.array_equal(session.run(None, {"ids": IDS})[0][0], TABLE[1:4] ** 2)
    try:
        runnable = tract.onnx().load("model.onnx").into_model().into_runnable()
    except tract.TractError as error:
        return next(line.strip() for line in str(error).splitlines() if "unify Sym" in line)
    assert np.array_equal(runnable.run([IDS])[0].to_numpy()[0], TABLE[1:4] ** 2)
    return "runs"


found = {names: run(names) for names in ((), ("batch", "tokens"), ("s0", "s1"))}
print("tract", version("tract"), "by names in value_info", found)
assert found[()] == found["batch", "tokens"] == "runs"
assert "Sym(s0)" in found["s0", "s1"]
PYTHON
