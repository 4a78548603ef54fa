#!/usr/bin/env bash
# Library: openvino 2026.4.1
# Guess: memory of a compiled model with dynamic shapes stops growing after its largest input. If OpenVINO keeps kernels for
#   each shape, CPU_RUNTIME_CACHE_CAPACITY bounds them, and 0 keeps least.
# Happens: every length has kernels of its own that stay: 150 MB after 600 lengths of two small layers, and still growing
#   (5000 are kept). 256 halves that. 0 takes most, 320 MB, as oneDNN's own cache of 1024 kernels is then full of kernels that
#   are made anew; ONEDNN_PRIMITIVE_CACHE_CAPACITY=64 bounds that one, and leaves 25 MB, in little more CPU time. The property
#   can be set and not read: "Cannot get unsupported property".
# Minded: runtime/hdruntime/backends/openvino/runner.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check openvino==2026.4.1 onnx==1.23.2 numpy==2.4.6
cat > "$folder/memory.py" <<'PYTHON'
import os
import random
import sys
import time

import numpy as np
import onnx
import openvino
from onnx import numpy_helper

LAYERS, WIDTH, LENGTHS = 2, 128, 600


def layer(i):
    states = " ".join(
        f"{s}{i} = MatMul(x{i}, w{s}) {s}4{i} = Reshape({s}{i}, split) {s}h{i} = Transpose <perm = [0, 2, 1, 3]> ({s}4{i})"
        for s in "qkv"
    )
    return f"""{states} a{i} = Attention(qh{i}, kh{i}, vh{i}) t{i} = Transpose <perm = [0, 2, 1, 3]> (a{i})
        m{i} = Reshape(t{i}, merge) o{i} = MatMul(m{i}, wo) s{i} = Add(o{i}, x{i}) x{i + 1} = LayerNormalization(s{i}, ones)"""


model = onnx.parser.parse_model(f"""
    <ir_version: 11, opset_import: ["" : 23]>
    encode (float[b, n, {WIDTH}] x0) => (float[b, n, {WIDTH}] x{LAYERS})
    <int64[4] split = {{0, 0, 4, {WIDTH // 4}}}, int64[3] merge = {{0, 0, {WIDTH}}}>
    {{ {" ".join(map(layer, range(LAYERS)))} }}""")
source = np.random.default_rng(0)
weights = {f"w{name}": source.normal(size=(WIDTH, WIDTH), scale=0.1) for name in "qkvo"} | {"ones": np.ones(WIDTH)}
model.graph.initializer.extend(numpy_helper.from_array(each.astype(np.float32), name) for name, each in weights.items())
options = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
capacity = sys.argv[1]
if capacity != "default":
    options["CPU_RUNTIME_CACHE_CAPACITY"] = int(capacity)
core = openvino.Core()
compiled = core.compile_model(core.read_model(model.SerializeToString()), "CPU", options)
request = compiled.create_infer_request()


def run(tokens):
    request.start_async({"x0": np.zeros((1, tokens, WIDTH), np.float32)})
    request.wait()


def megabytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE") / 1e6


try:
    core.get_property("CPU", "CPU_RUNTIME_CACHE_CAPACITY")
    raise AssertionError("the property can be read")
except RuntimeError as error:
    assert "Cannot get unsupported property" in str(error)
lengths = random.Random(0).sample(range(2, LENGTHS + 2), LENGTHS)
run(LENGTHS + 2)
before, start, grown = megabytes(), time.process_time(), []
for number, tokens in enumerate(lengths, 1):
    run(tokens)
    if number % 200 == 0:
        grown.append(megabytes() - before)
kept = os.environ.get("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "default")
print(f"openvino {openvino.__version__}, property {capacity}, oneDNN's {kept}: grown by", *(f"{size:.0f}" for size in grown),
      f"MB after 200, 400, 600 lengths; {time.process_time() - start:.1f} s of CPU time")
low, high = map(float, sys.argv[2:])
assert low < grown[-1] < high
PYTHON
run() { "$folder/venv/bin/python" "$folder/memory.py" "$@"; }
run default 110 200
run 256 55 105
run 0 220 450
export ONEDNN_PRIMITIVE_CACHE_CAPACITY=64
run 256 35 80
run 0 5 50
