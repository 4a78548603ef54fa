#!/usr/bin/env bash
# Library: openvino 2026.4.1
# Guess: `infer` of a request raises an error of a run, whatever the number of threads, as `start_async` and `wait` do.
# Happens: with INFERENCE_NUM_THREADS 1 `infer` returns normally, and the request has an output of the wrong shape: a Reshape
#   of six values to 4 x 4 gives the 2 x 3 of the run before. Two threads, or `start_async` and `wait` with one, raise the error.
# Minded: runtime/hdruntime/backends/openvino/runner.py, exporter/hdexport/graph/targets/openvino/target.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check openvino==2026.4.1 onnx==1.23.2 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
import onnx
import openvino

MODEL = onnx.parser.parse_model("""
    <ir_version: 10, opset_import: ["" : 20]>
    reshape (float[n] x, int64[2] shape) => (float[a,b] y) {
        twice = Add(x, x)
        y = Reshape(twice, shape)
    }""")
onnx.checker.check_model(MODEL, full_check=True)


def outcome(threads, *, asynchronous):
    """What a run gives whose values cannot have the shape, after one that was right."""
    core = openvino.Core()
    options = {"INFERENCE_NUM_THREADS": threads}
    request = core.compile_model(core.read_model(MODEL.SerializeToString()), "CPU", options).create_infer_request()
    x = np.arange(6, dtype=np.float32)
    request.infer({"x": x, "shape": np.array([2, 3])})
    assert request.get_output_tensor(0).shape == [2, 3]
    try:
        if asynchronous:
            request.start_async({"x": x, "shape": np.array([4, 4])})
            request.wait()
        else:
            request.infer({"x": x, "shape": np.array([4, 4])})
    except RuntimeError as error:
        return str(error).strip().splitlines()[-1]
    return tuple(request.get_output_tensor(0).shape)


print("openvino", openvino.__version__)
found = {}
for threads in (1, 2):
    for asynchronous in (False, True):
        found[threads, asynchronous] = outcome(threads, asynchronous=asynchronous)
        print(threads, "thread(s),", "start_async and wait:" if asynchronous else "infer:", found[threads, asynchronous])
assert found.pop((1, False)) == (2, 3)
assert all("conflicts with the reshape pattern (4.4)" in str(other) for other in found.values())
PYTHON
