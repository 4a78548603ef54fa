#!/usr/bin/env bash
# Library: openvino 2026.4.1
# Guess: a model in the cache of the Hugging Face Hub, where files are links to blobs, loads as any other, or none does.
# Happens: a model whose weights are in the ONNX file itself loads through a link; one with external data does not: "resolves
#   to ..., which is outside the base directory". A link to the whole folder is fine. ONNX Runtime 1.31.1 loads a cache
#   whose model and data are both links into one folder.
# Minded: runtime/hdruntime/backends/openvino/runner.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check openvino==2026.4.1 onnx==1.23.2 onnxruntime==1.31.1 \
    numpy==2.4.6
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import onnxruntime
import openvino

X = np.ones((1, 8), np.float32)


def loaded(path):
    """OpenVINO's result, or its error's last line."""
    try:
        return openvino.Core().compile_model(path, "CPU")(X)[0].tolist()
    except RuntimeError as error:
        return str(error).strip().splitlines()[-1]


root = Path(sys.argv[1])
model = onnx.parser.parse_model("""
    <ir_version: 10, opset_import: ["" : 20]>
    multiply (float[n,8] x, float[8,2] w) => (float[n,2] y) { y = MatMul(x, w) }""")
del model.graph.input[1]
model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((8, 2), np.float32), "w"))
for name in ("blobs", "snapshot", "files"):
    (root / name).mkdir()
onnx.save(model, root / "blobs/whole")
onnx.save(model, root / "files/model.onnx", save_as_external_data=True, location="model.onnx.data", size_threshold=0)
for name in ("model.onnx", "model.onnx.data"):
    (root / "blobs" / name).write_bytes((root / "files" / name).read_bytes())
    (root / "snapshot" / name).symlink_to(Path("../blobs") / name)
(root / "snapshot/whole.onnx").symlink_to("../blobs/whole")
(root / "linked").symlink_to("files")
paths = ("files/model.onnx", "linked/model.onnx", "snapshot/whole.onnx", "snapshot/model.onnx")
found = [loaded(root / path) for path in paths]
print("openvino", openvino.__version__)
for path, result in zip(paths, found):
    print(path, str(result).replace(str(root), "FOLDER"))
session = onnxruntime.InferenceSession(root / "snapshot/model.onnx", providers=["CPUExecutionProvider"])
assert session.run(None, {"x": X})[0].tolist() == [[8.0, 8.0]]
assert found[:3] == [[[8.0, 8.0]]] * 3
assert "outside the base directory" in found[3]
PYTHON
