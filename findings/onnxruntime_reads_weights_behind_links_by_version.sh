#!/usr/bin/env bash
# Library: onnxruntime 1.24.1, 1.24.4, 1.31.1
# Guess: a model with external data in the cache of the Hugging Face Hub, where both files are links to blobs elsewhere, loads
#   in a release as in the next patch of it.
# Happens: 1.24.1 does not load it, as the weights' real path is outside of the model's folder. 1.24.4 and 1.31.1 do. All load
#   the same files without links.
# Minded: pyproject.toml
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnxruntime==1.31.1 onnx==1.23.2 numpy==2.4.6
cd "$folder"
cat > load.py <<'PYTHON'
import pathlib
import sys

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper

model = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["" : 20]> linear (float[n, 64] x) => (float[n, 64] y) { y = MatMul(x, weight) }""")
model.graph.initializer.append(numpy_helper.from_array(np.eye(64, dtype=np.float32), "weight"))
plain, blobs, snapshot = (pathlib.Path(name) for name in ("plain", "hub/blobs", "hub/snapshots/main"))
if not plain.exists():
    for each in (plain, blobs, snapshot):
        each.mkdir(parents=True)
    onnx.save(model, plain / "model.onnx", save_as_external_data=True, location="model.onnx.data", size_threshold=0)
    for number, path in enumerate(sorted(plain.iterdir())):
        (blobs / str(number)).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")


def loads(path):
    try:
        session = onnxruntime.InferenceSession(path / "model.onnx", providers=["CPUExecutionProvider"])
    except Exception as error:
        print(onnxruntime.__version__, type(error).__name__, "a path outside of the folder" if "escapes" in str(error) else error)
        return False
    return (session.run(None, {"x": np.ones((1, 64), np.float32)})[0] == 1).all()


found = loads(plain), loads(snapshot)
print("onnxruntime", onnxruntime.__version__, "files and links:", *found)
assert found == (True, sys.argv[1] == "loads")
PYTHON
"$folder/venv/bin/python" load.py loads
for case in 1.24.4:loads 1.24.1:fails; do
    version=${case%:*}
    "$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps "onnxruntime==$version"
    "$folder/venv/bin/python" load.py "${case#*:}"
done
