#!/usr/bin/env bash
# Library: onnxruntime 1.31.1
# Guess: `enable_mem_reuse`, the default, which gives a tensor the buffer of one that is no longer read, can only save memory.
# Happens: a buffer that a later tensor of its shape will take is not free in between: the widest tensor of a layer waits, through
#   the attention of the next, for the next layer's. Two layers and more of 4096 rows take 66 MB with it and 49 MB without, where
#   the arena gives the same memory to whatever comes next; one layer takes 49 MB either way.
# Minded: runtime/hdruntime/backends/onnxruntime/cpu.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnxruntime==1.31.1 onnx==1.23.2 numpy==2.4.6
cat > "$folder/peak.py" <<'PYTHON'
import resource
import sys

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper

reuse, layers = sys.argv[1] == "reuse", int(sys.argv[2])
WIDTH, ROWS = 256, 4096
nodes = " ".join(
    f"""q{i} = MatMul(x{i}, wq) k{i} = MatMul(x{i}, wk) v{i} = MatMul(x{i}, wv)
        a{i} = com.microsoft.MultiHeadAttention <num_heads = 4> (q{i}, k{i}, v{i}) b{i} = MatMul(a{i}, wo) c{i} = Add(b{i}, x{i})
        d{i} = MatMul(c{i}, up) e{i} = Gelu(d{i}) f{i} = MatMul(e{i}, down) x{i + 1} = Add(f{i}, c{i})"""
    for i in range(layers)
)
model = onnx.parser.parse_model(f"""
    <ir_version: 9, opset_import: ["" : 20, "com.microsoft" : 1]>
    network (float[b, n, {WIDTH}] x0) => (float[b, n, {WIDTH}] x{layers}) {{ {nodes} }}""")
shapes = {**dict.fromkeys(("wq", "wk", "wv", "wo"), (WIDTH, WIDTH)), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
source = np.random.default_rng(0)  # equal weights would be one
weights = {name: source.normal(size=shape, scale=0.05).astype(np.float32) for name, shape in shapes.items()}
model.graph.initializer.extend(numpy_helper.from_array(each, name) for name, each in weights.items())
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
options.enable_mem_pattern = False
options.enable_mem_reuse = reuse
session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
session.run(None, {"x0": np.ones((1, 16, WIDTH), np.float32)})
long = np.ones((1, ROWS, WIDTH), np.float32)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
session.run(None, {"x0": long})
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1000
widest = ROWS * 4 * WIDTH * 4 / 1e6
print(f"onnxruntime {onnxruntime.__version__} {sys.argv[1]}, {layers} layers: {grown:.0f} MB; the widest tensor has {widest:.0f}")
assert 58 < grown < 75 if reuse and layers > 1 else grown < 56
PYTHON
for layers in 1 2 4; do
    for case in reuse anew; do
        "$folder/venv/bin/python" "$folder/peak.py" "$case" "$layers"
    done
done
