#!/usr/bin/env bash
# Library: TensorRT-RTX 1.7.1
# Guess: TopK is as large as memory allows, as in ONNX Runtime, so that it can sort; or the parser, which sees the number,
#   says no.
# Happens: 3840 values are the most. A constant of 3841 is parsed, and the build fails, in the last of its steps; a number
#   that the graph computes, as in a sort of all values, fails if the profile's longest input is longer. TensorRT's page of
#   ITopKLayer has the limit. It takes no GPU to see this.
# Minded: exporter/hdexport/graph/targets/tensorrt/lowering.py, plugins/hdplugins/attention/lsh/onnx_functions.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check tensorrt_rtx_cu13==1.7.1.116 onnx==1.23.2
"$folder/venv/bin/python" - <<'PYTHON'
import onnx
import tensorrt_rtx as trt


class Log(trt.ILogger):
    """Keeps messages."""

    def __init__(self):
        super().__init__()
        self.messages = []

    def log(self, severity, message):
        self.messages.append(message)


def outcome(count, values):
    """"built", or what fails: the best of up to `values`, as many as `count` (None for all)."""
    number = "count = Shape(x)" if count is None else f"count = Constant <value_ints = [{count}]> ()"
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : 20]>
        g (float[n] x) => (float[k] best, int64[k] places) {{ {number} best, places = TopK(x, count) }}""")
    onnx.checker.check_model(model)
    log = Log()
    builder = trt.Builder(log)
    network = builder.create_network(0)
    if not trt.OnnxParser(network, log).parse(model.SerializeToString()):
        return "parser"
    profile, config = builder.create_optimization_profile(), builder.create_builder_config()
    profile.set_shape("x", (count or 1,), (values,), (values,))
    config.add_optimization_profile(profile)
    if builder.build_serialized_network(network, config) is not None:
        return "built"
    assert any("K exceeds the maximum value allowed (3840)" in message for message in log.messages)
    return "build fails"


cases = ((3840, 100000), (3841, 5000), (None, 3840), (None, 3841))
found = {case: outcome(*case) for case in cases}
print("tensorrt_rtx", trt.__version__, found)
assert list(found.values()) == ["built", "build fails", "built", "build fails"]
PYTHON
