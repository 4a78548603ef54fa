#!/usr/bin/env bash
# Library: onnx-graphsurgeon 0.6.1
# Guess: folding constants keeps types: a `Constant` with the attribute `value_float` is float32 by ONNX's definition.
# Happens: onnx-graphsurgeon makes it a float64 tensor. The valid graph x + Constant(value_float=0.5) has a float64 input of
#   Add after import, fold_constants and export, and ONNX Runtime refuses it: a type error. A Constant whose attribute is
#   `value`, a float32 tensor, stays float32.
# Minded: plugins/hdplugins/op_builder.py, exporter/hdexport/graph/targets/openvino/lowering.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnx-graphsurgeon==0.6.1 \
    onnx==1.23.2 numpy==2.4.6 onnxruntime==1.31.1
"$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
import onnx
import onnx_graphsurgeon
import onnxruntime


def answer_after_folding(constant: str) -> np.ndarray | str:
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : 20]>
        add (float[n] x) => (float[n] y) {{
            half = Constant <{constant}> ()
            y = Add(x, half)
        }}""")
    onnx.checker.check_model(model, full_check=True)
    folded = onnx_graphsurgeon.export_onnx(onnx_graphsurgeon.import_onnx(model).fold_constants().cleanup())
    try:
        session = onnxruntime.InferenceSession(folded.SerializeToString(), providers=["CPUExecutionProvider"])
        return session.run(None, {"x": np.ones(1, np.float32)})[0]
    except Exception as error:
        return f"{type(error).__name__}: {error}"


right = answer_after_folding("value = float {0.5}")
wrong = answer_after_folding("value_float: float = 0.5")
print("value:", right)
print("value_float:", wrong)
assert np.array_equal(right, [1.5])
assert isinstance(wrong, str) and "double" in wrong
PYTHON
