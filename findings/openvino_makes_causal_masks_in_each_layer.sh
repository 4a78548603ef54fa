#!/usr/bin/env bash
# Library: openvino 2026.4.1
# Guess: `is_causal` of ONNX's Attention, which OpenVINO fuses, costs less memory than a mask of all queries and keys, as in
#   PyTorch.
# Happens: it is such a mask, made in each layer while the model runs: at 4096 tokens one layer takes 83 MB more than
#   attention without it, and four take 133 MB more. One mask of 64 MB that is an input, for all layers, adds nothing to
#   itself.
# Minded: exporter/hdexport/attention/dense/lower.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check openvino==2026.4.1 onnx==1.23.2 numpy==2.4.6
cat > "$folder/peak.py" <<'PYTHON'
import resource
import sys

import numpy as np
import onnx
import openvino

case, layers = sys.argv[1], int(sys.argv[2])
TOKENS = 4096
mask = ", mask" if case == "mask" else ""
nodes = " ".join(f"x{i + 1} = Attention <is_causal = {int(case == 'causal')}> (x{i}, x{i}, x{i}{mask})" for i in range(layers))
model = onnx.parser.parse_model(f"""
    <ir_version: 11, opset_import: ["" : 23]>
    attend (float[b, 2, n, 32] x0{", float[1, 1, n, n] mask" if mask else ""}) => (float[b, 2, n, 32] x{layers}) {{ {nodes} }}""")
onnx.checker.check_model(model)
core = openvino.Core()
options = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
request = core.compile_model(core.read_model(model.SerializeToString()), "CPU", options).create_infer_request()
feeds = {"x0": np.ones((1, 2, TOKENS, 32), np.float32)}
if mask:
    feeds["mask"] = np.where(np.tri(TOKENS, dtype=bool), 0, -np.inf).astype(np.float32)[None, None]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
request.start_async(feeds, share_inputs=True)
request.wait()
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1000
print(f"openvino {openvino.__version__} {case}, {layers} layers: {grown:.0f} MB")
assert grown > (70 if layers > 1 else 35) if case == "causal" else grown < 20
PYTHON
for layers in 1 4; do
    for case in none causal mask; do
        "$folder/venv/bin/python" "$folder/peak.py" "$case" "$layers"
    done
done
