#!/usr/bin/env bash
# Library: onnxruntime-extensions 0.15.2
# Guess: an operator on strings sees the whole string, as ONNX Runtime passes it: `StringLength` of three characters, the
#   second of which is U+0000, is 3.
# Happens: it is 1. Every operator of the library reads a string up to its first NUL, without an error; ONNX's own
#   operators, here Identity, keep it. A text with a NUL is tokenized up to there.
# Minded: exporter/hdexport/package/targets/text_in.py
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

model = onnx.parser.parse_model("""
    <ir_version: 8, opset_import: ["" : 18, "ai.onnx.contrib" : 1]>
    texts (string[count] text) => (string[count] same, int64[count] length) {
        same = Identity(text)
        length = ai.onnx.contrib.StringLength(text)
    }""")
options = onnxruntime.SessionOptions()
options.register_custom_ops_library(onnxruntime_extensions.get_library_path())
session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
same, length = session.run(None, {"text": np.array(["a\0b", "abc"], dtype=object)})
print("onnxruntime-extensions", onnxruntime_extensions.__version__, "Identity", same.tolist(), "length", length.tolist())
assert same.tolist() == ["a\0b", "abc"]
assert length.tolist() == [1, 3]
PYTHON
