#!/usr/bin/env bash
# Library: openvino 2026.4.1
# Guess: once a model with dynamic shapes has run two lengths, whose kernels are kept, changing between them costs no time.
# Happens: a run of another length than the run before takes about 1 ms more CPU time in six small layers in bfloat16: 16 and
#   24 tokens in turns take five times the CPU time of one length, and half of that where each length runs four times in a row.
#   A CPU_RUNTIME_CACHE_CAPACITY of 50000 in place of 5000 changes nothing. In ONNX Runtime 1.31.1 turns cost nothing.
# Minded: docs/openvino.md
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    openvino==2026.4.1 onnx==1.23.2 onnxruntime==1.31.1 numpy==2.4.6
ORT_DISABLE_TELEMETRY=1 "$folder/venv/bin/python" - <<'PYTHON'
import time

import numpy as np
import onnx
import onnxruntime
import openvino
from onnx import numpy_helper

LAYERS, WIDTH, ROUNDS = 6, 64, 300


def layer(i):
    states = " ".join(
        f"{s}{i} = MatMul(x{i}, w{s}) {s}4{i} = Reshape({s}{i}, split) {s}h{i} = Transpose <perm = [0, 2, 1, 3]> ({s}4{i})"
        for s in "qkv"
    )
    return f"""{states} a{i} = Attention(qh{i}, kh{i}, vh{i}) t{i} = Transpose <perm = [0, 2, 1, 3]> (a{i})
        m{i} = Reshape(t{i}, merge) o{i} = MatMul(m{i}, wo) s{i} = Add(o{i}, x{i}) n{i} = LayerNormalization(s{i}, ones)
        u{i} = MatMul(n{i}, wu) g{i} = Gelu(u{i}) d{i} = MatMul(g{i}, wd) r{i} = Add(d{i}, n{i})
        x{i + 1} = LayerNormalization(r{i}, ones)"""


model = onnx.parser.parse_model(f"""
    <ir_version: 11, opset_import: ["" : 23]>
    encode (float[b, n, {WIDTH}] x0) => (float[b, n, {WIDTH}] x{LAYERS})
    <int64[4] split = {{0, 0, 4, {WIDTH // 4}}}, int64[3] merge = {{0, 0, {WIDTH}}}>
    {{ {" ".join(map(layer, range(LAYERS)))} }}""")
source = np.random.default_rng(0)
shapes = {f"w{name}": (WIDTH, WIDTH) for name in "qkvo"} | {"wu": (WIDTH, 4 * WIDTH), "wd": (4 * WIDTH, WIDTH)}
weights = {name: source.normal(size=shape, scale=0.1) for name, shape in shapes.items()} | {"ones": np.ones(WIDTH)}
model.graph.initializer.extend(numpy_helper.from_array(each.astype(np.float32), name) for name, each in weights.items())
texts = {tokens: source.normal(size=(1, tokens, WIDTH)).astype(np.float32) for tokens in (16, 24)}


def openvino_run(capacity):
    options = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": 1, "CPU_RUNTIME_CACHE_CAPACITY": capacity}
    core = openvino.Core()
    request = core.compile_model(core.read_model(model.SerializeToString()), "CPU", options).create_infer_request()

    def run(tokens):
        request.start_async({"x0": texts[tokens]}, share_inputs=True)
        request.wait()

    return run


def onnxruntime_run():
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    return lambda tokens: session.run(None, {"x0": texts[tokens]})


def milliseconds(run, lengths):
    """CPU time of a run, the least of three series."""
    found = []
    for _ in range(3):
        start = time.process_time()
        for _ in range(ROUNDS // len(lengths)):
            for tokens in lengths:
                run(tokens)
        found.append((time.process_time() - start) * 1000 / (ROUNDS // len(lengths) * len(lengths)))
    return min(found)


if "BF16" not in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
    raise SystemExit("OpenVINO does not compute in bfloat16 on this processor.")
print("openvino", openvino.__version__, "onnxruntime", onnxruntime.__version__)
runs = {"5000": openvino_run(5000), "50000": openvino_run(50_000), "ONNX Runtime": onnxruntime_run()}
ratios = {}
for name, run in runs.items():
    same = max(milliseconds(run, [16]), milliseconds(run, [24]))
    turns, fours = milliseconds(run, [16, 24]), milliseconds(run, [16] * 4 + [24] * 4)
    print(f"{name}: CPU time of a run {same:.2f} ms, in turns {turns:.2f} ms, four by four {fours:.2f} ms")
    ratios[name] = turns / same
assert ratios["5000"] > 2 and ratios["50000"] > 2 and ratios["ONNX Runtime"] < 1.5
PYTHON
