#!/usr/bin/env bash
# Library: onnx_ir 1.1.0
# Guess: an error that a pass raises reaches the caller of `passes.Sequential`, as it reaches the caller of the pass itself.
# Happens: Sequential raises a PassError in its place, whose message is about the pass, and the error is its `__cause__`: an
#   `except` for a type of one's own, around a list of passes, catches nothing.
# Minded: exporter/hdexport/graph/passes/graph_pass.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnx_ir==1.1.0 onnx==1.23.2
"$folder/venv/bin/python" - <<'PYTHON'
import onnx
import onnx_ir


class TooLong(Exception):
    pass


class Check(onnx_ir.passes.InPlacePass):
    def call(self, model):
        raise TooLong("at most 8 rows")


def raised(called):
    model = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 20]> g (float[n] x) => (float[n] y) { y = Relu(x) }'
    )
    try:
        called(onnx_ir.from_proto(model))
    except Exception as error:
        return error
    return None


alone, listed = raised(Check()), raised(onnx_ir.passes.Sequential(Check()))
print("onnx_ir", onnx_ir.__version__)
print(type(alone).__name__, "by itself, in a list", type(listed).__name__, "of", repr(listed.__cause__))
assert type(alone) is TooLong and type(listed) is onnx_ir.passes.PassError
assert type(listed.__cause__) is TooLong and "at most 8 rows" not in str(listed)
PYTHON
