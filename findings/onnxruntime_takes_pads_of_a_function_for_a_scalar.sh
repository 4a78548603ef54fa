#!/usr/bin/env bash
# Library: onnxruntime 1.24.4, 1.25.0
# Guess: `Constant` with the attribute `value_ints` is a list, wherever it stands.
# Happens: 1.24.4 loads no model whose function has a Pad that reads such a constant: "'pads' input must be a 1D tensor".
#   Pad in the graph itself reads it, and in a function reads a constant with the attribute `value`. 1.25.0 takes all.
# Minded: plugins/hdplugins/op_builder.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/pad.py" <<'PYTHON'
import sys

import numpy as np
import onnx
import onnxruntime


def outcome(constant, *, in_function):
    """The padded vector of two ones, or the error of loading."""
    body = f"pads = Constant <{constant}> () y = Pad(x, pads)"
    function = f'<opset_import: ["" : 20], domain: "own"> Widen (x) => (y) {{ {body} }}'
    model = onnx.parser.parse_model(f"""
        <ir_version: 9, opset_import: ["" : 20, "own" : 1]>
        widen (float[n] x) => (float[m] y) {{ {"y = own.Widen(x)" if in_function else body} }}
        {function if in_function else ""}""")
    onnx.checker.check_model(model, full_check=True)
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    except Exception as error:
        return str(error).strip()
    return session.run(None, {"x": np.ones(2, np.float32)})[0].tolist()


right = [0, 1, 1, 0, 0]
found = [
    outcome(constant, in_function=in_function)
    for constant in ("value = int64[2] {1, 2}", "value_ints = [1, 2]")
    for in_function in (False, True)
]
print("onnxruntime", onnxruntime.__version__, *found)
assert found[:3] == [right] * 3
assert found[3] == right if sys.argv[1] == "right" else "'pads' input must be a 1D" in found[3]
PYTHON
python3 -m venv "$folder/venv"
for version in 1.24.4 1.25.0; do
    "$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnx==1.23.2 onnxruntime==$version numpy==2.4.6
    "$folder/venv/bin/python" "$folder/pad.py" "$([ $version = 1.24.4 ] && echo wrong || echo right)"
done
