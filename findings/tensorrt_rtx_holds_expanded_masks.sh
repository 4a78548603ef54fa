#!/usr/bin/env bash
# Library: TensorRT-RTX 1.7.1
# Guess: the attention layer's memory is linear in tokens with any mask, also with a row of keys that an Expand repeats for
#   all queries, as transformers makes masks: the compiler fuses the Expand, or the Add of a row and a column.
# Happens: what is expanded before the layer is memory. For 8 texts of 16384 tokens an engine plans 67 MB without a mask or with
#   [batch, 1, 1, tokens], and 4362 MB where a node makes [batch, 1, tokens, tokens] of that; a boolean mask of all pairs, even
#   as an input, is made additive, 4400 MB. It takes no GPU to see this.
# Minded: exporter/hdexport/graph/targets/tensorrt/lowering.py
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

BATCH, TOKENS = 8, 16384
ROW, PAIRS = "[batch, 1, 1, tokens]", "[batch, 1, tokens, tokens]"
STATE = "float16[batch, 2, tokens, 32]"


class Log(trt.ILogger):
    """Keeps messages."""

    def __init__(self):
        super().__init__()
        self.messages = []

    def log(self, severity, message):
        self.messages.append(message)


def planned(inputs, nodes, attention):
    """Megabytes of activations of the engine."""
    model = onnx.parser.parse_model(f"""
        <ir_version: 11, opset_import: ["" : 23]>
        g ({STATE} q, {STATE} k, {STATE} v{inputs}) => ({STATE} y) {{ {nodes} y = Attention({attention}) }}""")
    onnx.checker.check_model(model)
    log = Log()
    builder = trt.Builder(log)
    network = builder.create_network(0)
    assert trt.OnnxParser(network, log).parse(model.SerializeToString())
    profile, config = builder.create_optimization_profile(), builder.create_builder_config()
    for value in model.graph.input:
        axes = [axis.dim_value or axis.dim_param for axis in value.type.tensor_type.shape.dim]
        shapes = [[sizes.get(axis, axis) for axis in axes] for sizes in ({"batch": 1, "tokens": 1}, LARGEST, LARGEST)]
        profile.set_shape(value.name, *shapes)
    config.add_optimization_profile(profile)
    assert builder.build_serialized_network(network, config) is not None
    lines = (re.match(r"Total Activation Memory: (\d+) bytes", message) for message in log.messages)
    return int(next(line for line in lines if line)[1]) / 1e6


LARGEST = {"batch": BATCH, "tokens": TOKENS}
EXPAND = """batch = Shape <start = 0, end = 1> (q) tokens = Shape <start = 2, end = 3> (q) one = Constant <value_ints = [1]> ()
    shape = Concat <axis = 0> (batch, one, tokens, tokens) mask = Expand(row, shape)"""
found = {
    "none": planned("", "", "q, k, v"),
    "row": planned(f", float16{ROW} mask", "", "q, k, v, mask"),
    "boolean row": planned(f", bool{ROW} mask", "", "q, k, v, mask"),
    "input of pairs": planned(f", float16{PAIRS} mask", "", "q, k, v, mask"),
    "expanded row": planned(f", float16{ROW} row", EXPAND, "q, k, v, mask"),
    "row and column": planned(
        f", float16{ROW} row, float16[1, 1, tokens, 1] column", "mask = Add(row, column)", "q, k, v, mask"
    ),
    "boolean input of pairs": planned(f", bool{PAIRS} mask", "", "q, k, v, mask"),
}
print("tensorrt_rtx", trt.__version__, *(f"{name}: {size:.0f} MB" for name, size in found.items()), sep="\n")
pairs = BATCH * TOKENS**2 * 2 / 1e6
linear = ["none", "row", "boolean row", "input of pairs"]
assert all((size < 100) if name in linear else (size > pairs) for name, size in found.items())
PYTHON
