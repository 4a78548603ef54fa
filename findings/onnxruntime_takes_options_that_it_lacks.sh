#!/usr/bin/env bash
# Library: onnxruntime 1.31.1
# Guess: a session's option that does not exist, a key of its configuration or the name of an optimizer to disable, is an error or
#   a warning.
# Happens: ONNX Runtime reports neither. With SkipLayerNormalizationFusion for SkipLayerNormFusion the optimizer goes on
#   fusing. The misspelt key `session.intra_op.allow_spining` is accepted, and the key for bfloat16 products on ARM is
#   accepted on other processors.
# Minded: runtime/hdruntime/backends/onnxruntime/__init__.py, runtime/hdruntime/backends/onnxruntime/cpu.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnxruntime==1.31.1 onnx==1.23.2 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import os
import pathlib
import tempfile

import numpy as np
import onnx
import onnxruntime

model = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["" : 20]>
    normal (float[b, n, 64] x, float[b, n, 64] z) => (float[b, n, 64] y) <float[64] scale = {%s}, float[64] shift = {%s}>
    { sum = Add(x, z) y = LayerNormalization(sum, scale, shift) }""" % ((", ".join(["1"] * 64),) * 2))
folder = pathlib.Path(tempfile.mkdtemp())


def operators(disabled):
    """Operators after optimization, and what the library printed."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    for key in ("session.intra_op.allow_spining", "mlas.enable_gemm_fastmath_arm64_bfloat16", "of.nobody"):
        options.add_session_config_entry(key, "1")
    with open(folder / "log", "w+b") as log:
        before = os.dup(2)
        os.dup2(log.fileno(), 2)
        try:
            session = onnxruntime.InferenceSession(
                model.SerializeToString(), options, providers=["CPUExecutionProvider"], disabled_optimizers=disabled
            )
            session.run(None, dict.fromkeys("xz", np.ones((1, 2, 64), np.float32)))
        finally:
            os.dup2(before, 2)
    lines = [line for line in (folder / "log").read_text().splitlines() if "hardware specific" not in line and line.strip()]
    return [node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node], lines


right, misspelled = operators(["SkipLayerNormFusion"]), operators(["SkipLayerNormalizationFusion"])
print("onnxruntime", onnxruntime.__version__, "SkipLayerNormFusion:", right, "SkipLayerNormalizationFusion:", misspelled)
assert right == (["Add", "LayerNormalization"], [])
assert misspelled == (["SkipLayerNormalization"], [])
PYTHON
