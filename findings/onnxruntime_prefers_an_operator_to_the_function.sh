#!/usr/bin/env bash
# Library: onnxruntime 1.31.1, onnxruntime-extensions 0.15.2 (as a library of custom operators)
# Guess: a model that has a function of a node's domain and name means that function: a library of custom operators that is
#   registered for other models changes nothing.
# Happens: a registered custom operator wins over the model's function of its name, without a message. ONNX Runtime's own
#   operators in com.microsoft win, too. An unchanged model then gives other numbers. For optional kernels this helps: a model
#   runs its functions where the library is missing.
# Minded: plugins/hdplugins/onnxruntime/operators.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnxruntime==1.31.1 onnxruntime-extensions==0.15.2 \
    onnx==1.23.2 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
import onnx
import onnxruntime
import onnxruntime_extensions


def answer(domain, operator, body, x, *, types, with_library):
    """The output for x of a model that has a function `operator`."""
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : 20, "{domain}" : 1]>
        call ({types[0]}[n] x) => ({types[1]}[n] y) {{ y = {domain}.{operator}(x) }}
        <opset_import: ["" : 20], domain: "{domain}"> {operator} (x) => (y) {{ {body} }}""")
    onnx.checker.check_model(model)
    options = onnxruntime.SessionOptions()
    if with_library:
        options.register_custom_ops_library(onnxruntime_extensions.get_library_path())
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    try:
        return session.run(None, {"x": x})[0].tolist()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


texts = np.array(["a", "bc"], object)
# The function gives the number of texts for each of them; the library's operator gives their lengths.
body = "count = Shape(x) y = Expand(count, count)"
found = [
    answer("ai.onnx.contrib", "StringLength", body, texts, types=("string", "int64"), with_library=each)
    for each in (False, True)
]
floats = ("float", "float")
own = answer("com.microsoft", "QuickGelu", "y = Neg(x)", np.ones(1, np.float32), types=floats, with_library=False)
print("onnxruntime", onnxruntime.__version__, "without, with the library:", *found)
print("com.microsoft.QuickGelu, whose function is Neg, of 1:", *own)
assert found == [[2, 2], [1, 2]]
assert abs(own[0] - 1 / (1 + np.exp(-1.702))) < 1e-5
PYTHON
