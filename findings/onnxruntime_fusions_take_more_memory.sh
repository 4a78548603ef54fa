#!/usr/bin/env bash
# Library: onnxruntime 1.31.1
# Guess: fusions, which all levels of optimization but the lowest make, save memory and time.
# Happens: on a CPU, BiasGelu and SkipLayerNormalization write new tensors where Gelu, Add and LayerNormalization work in
#   place. The first run of 4096 rows takes 96 MB with them and 68 MB with both optimizers disabled; CPU time is 1.05 to 1.15
#   of that without, at 256 rows, too.
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
import time

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper

LAYERS, ROWS, WIDTH, WIDE = 4, 4096, 384, 1536
FUSIONS = ["BiasGeluFusion", "SkipLayerNormFusion"]
layers = " ".join(
    f"""a{i} = MatMul(x{i}, up) b{i} = Add(a{i}, bias_up) c{i} = Gelu(b{i}) d{i} = MatMul(c{i}, down) e{i} = Add(d{i}, bias_down)
        f{i} = Add(e{i}, x{i}) x{i + 1} = LayerNormalization(f{i}, ones, zeros)"""
    for i in range(LAYERS)
)
model = onnx.parser.parse_model(f"""
    <ir_version: 9, opset_import: ["" : 20]>
    network (float[b, n, {WIDTH}] x0) => (float[b, n, {WIDTH}] x{LAYERS}) {{ {layers} }}""")
shapes = {"up": (WIDTH, WIDE), "bias_up": (WIDE,), "down": (WIDE, WIDTH), "bias_down": (WIDTH,)}
weights = {name: np.full(shape, 0.01, np.float32) for name, shape in shapes.items()}
weights |= {"ones": np.ones(WIDTH, np.float32), "zeros": np.zeros(WIDTH, np.float32)}
model.graph.initializer.extend(numpy_helper.from_array(each, name) for name, each in weights.items())
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
options.log_severity_level = 3
options.optimized_model_filepath = sys.argv[2]
session = onnxruntime.InferenceSession(
    model.SerializeToString(),
    options,
    providers=["CPUExecutionProvider"],
    disabled_optimizers=FUSIONS if sys.argv[1] == "plain" else [],
)
operators = sorted({node.op_type for node in onnx.load(sys.argv[2]).graph.node})


def run(rows):
    start = time.process_time()
    session.run(None, {"x0": np.ones((1, rows, WIDTH), np.float32)})
    return (time.process_time() - start) * 1000


run(16)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run(ROWS)
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1000
milliseconds = [min(run(rows) for _ in range(5)) for rows in (256, ROWS)]
print(f"onnxruntime {onnxruntime.__version__} {sys.argv[1]}: {grown:.0f} MB,", *(f"{each:.0f}" for each in milliseconds),
      "ms of CPU time for 256 and 4096 rows;", *operators)
assert ("BiasGelu" in operators) == (sys.argv[1] == "fused")
assert 80 < grown < 110 if sys.argv[1] == "fused" else grown < 77
PYTHON
for case in fused plain; do
    "$folder/venv/bin/python" "$folder/peak.py" "$case" "$folder/$case.onnx"
done
