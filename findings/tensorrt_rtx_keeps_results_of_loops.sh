#!/usr/bin/env bash
# Library: TensorRT-RTX 1.7.1
# Guess: the results of a loop are a tensor as others, whose memory serves again once it is read; and a Scan without a state,
#   which only maps, is the simplest of loops.
# Happens: an engine keeps the results of each Loop and Scan to its end. One, two, four and eight products of 16384 rows, each
#   of the one before, take 8, 17, 25 and 25 MB, and in loops of 256 rows 25, 33, 50 and 84 MB: computing in chunks to save
#   memory costs memory. A Scan without a state is not parsed ("Invalid Node", without a reason). It takes no GPU to see this.
# Minded: exporter/hdexport/graph/targets/tensorrt/lowering.py, plugins/hdplugins/op_builder.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check tensorrt_rtx_cu13==1.7.1.116 onnx==1.23.2
"$folder/venv/bin/python" - <<'PYTHON'
import re

import onnx
import tensorrt_rtx as trt

ROWS, WIDTH = 16384, 256


class Log(trt.ILogger):
    """Keeps messages."""

    def __init__(self):
        super().__init__()
        self.messages = []

    def log(self, severity, message):
        self.messages.append(message)


def whole(i):
    return f"u{i} = MatMul(x{i}, w) x{i + 1} = Tanh(u{i})"


def in_chunks(i, loop):
    return f"chunks{i} = Reshape(x{i}, chunked) {loop} x{i + 1} = Reshape(results{i}, all)"


def scan(i):
    block = f"float16[256, {WIDTH}]"
    return in_chunks(i, f"""zero{i} = Constant <value = float16 {{0}}> ()
        end{i}, results{i} = Scan <num_scan_inputs = 1, body = step{i}
            (float16 old{i}, {block} a{i}) => (float16 new{i}, {block} o{i})
            {{ new{i} = Identity(old{i}) u{i} = MatMul(a{i}, w) o{i} = Tanh(u{i}) }}> (zero{i}, chunks{i})""")


def scan_without_state(i):
    block = f"float16[256, {WIDTH}]"
    return in_chunks(i, f"""results{i} = Scan <num_scan_inputs = 1, body = step{i} ({block} a{i}) => ({block} o{i})
            {{ u{i} = MatMul(a{i}, w) o{i} = Tanh(u{i}) }}> (chunks{i})""")


def loop(i):
    return in_chunks(i, f"""count{i} = Shape <start = 0, end = 1> (chunks{i}) steps{i} = Squeeze(count{i})
        yes{i} = Constant <value = bool {{1}}> ()
        results{i} = Loop <body = step{i} (int64 n{i}, bool old{i}) => (bool new{i}, float16[256, {WIDTH}] o{i})
            {{ new{i} = Identity(old{i}) a{i} = Gather(chunks{i}, n{i}) u{i} = MatMul(a{i}, w) o{i} = Tanh(u{i}) }}>
            (steps{i}, yes{i})""")


def planned(form, count):
    """Megabytes of activations of the engine; None if the graph is not parsed."""
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : 20]>
        g (float16[rows, {WIDTH}] x0, float16[{WIDTH}, {WIDTH}] w) => (float16[rows, {WIDTH}] x{count})
        <int64[3] chunked = {{-1, 256, {WIDTH}}}, int64[2] all = {{-1, {WIDTH}}}>
        {{ {" ".join(map(form, range(count)))} }}""")
    onnx.checker.check_model(model)
    log = Log()
    builder = trt.Builder(log)
    network = builder.create_network(0)
    if not trt.OnnxParser(network, log).parse(model.SerializeToString()):
        return None
    profile, config = builder.create_optimization_profile(), builder.create_builder_config()
    profile.set_shape("x0", (256, WIDTH), (ROWS, WIDTH), (ROWS, WIDTH))
    config.add_optimization_profile(profile)
    assert builder.build_serialized_network(network, config) is not None
    lines = (re.match(r"Total Activation Memory: (\d+) bytes", message) for message in log.messages)
    return int(next(line for line in lines if line)[1]) / 1e6


print("tensorrt_rtx", trt.__version__)
result = ROWS * WIDTH * 2 / 1e6
for form in (whole, scan, loop):
    found = [planned(form, count) for count in (1, 2, 4, 8)]
    print(form.__name__, *(f"{size:.0f}" for size in found), "MB")
    assert found[-1] < 4 * result if form is whole else found[-1] > 9 * result
assert planned(scan_without_state, 1) is None
PYTHON
