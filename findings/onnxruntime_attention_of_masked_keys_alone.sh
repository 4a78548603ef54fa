#!/usr/bin/env bash
# Library: onnxruntime 1.31.1 (com.microsoft.MultiHeadAttention)
# Guess: a row of keys that are all masked gives 0, NaN or the mean of the values; PyTorch and ONNX's Attention differ, too.
# Happens: it gives what it gives without any mask, to 0.001: `mask_filter_value`, which is added to the scores of masked keys, is
#   -10000, so that scores beside each other stay as they were. With -1e30 it is the mean of the values. ONNX's Attention gives 0,
#   in ONNX Runtime, in OpenVINO 2026.4.1 and in onnx's reference.
# Minded: exporter/hdexport/lowering/multi_head_attention.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnxruntime==1.31.1 openvino==2026.4.1 \
    onnx==1.23.2 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
import onnx
import onnxruntime
import openvino
from onnx.reference import ReferenceEvaluator

TOKENS, SIZE = 6, 8
source = np.random.default_rng(0)
q, k, v = (source.normal(size=(1, TOKENS, SIZE)).astype(np.float32) for _ in "qkv")


def multi_head(attributes, masked):
    """Of a batch of one text and one head, whose tokens are all padding, or none."""
    state = f"float[1, {TOKENS}, {SIZE}]"
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>
        attend ({state} q, {state} k, {state} v, int32[1, {TOKENS}] mask) => ({state} y)
        {{ y = com.microsoft.MultiHeadAttention <num_heads = 1{attributes}> (q, k, v, , mask) }}""")
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"q": q, "k": k, "v": v, "mask": np.full((1, TOKENS), int(not masked), np.int32)})[0]


def standard():
    """ONNX's Attention, by three libraries."""
    state = f"float[1, 1, tokens, {SIZE}]"
    model = onnx.parser.parse_model(f"""
        <ir_version: 11, opset_import: ["" : 23]>
        attend ({state} q, {state} k, {state} v, bool[1, 1, tokens, tokens] mask) => ({state} y)
        {{ y = Attention(q, k, v, mask) }}""")
    onnx.checker.check_model(model)
    data = model.SerializeToString()
    feeds = {"q": q[:, None], "k": k[:, None], "v": v[:, None], "mask": np.zeros((1, 1, TOKENS, TOKENS), bool)}
    core = openvino.Core()
    yield onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"]).run(None, feeds)[0]
    yield core.compile_model(core.read_model(data), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(feeds)[0]
    yield ReferenceEvaluator(model).run(None, feeds)[0]


unmasked, masked, low = multi_head("", False), multi_head("", True), multi_head(", mask_filter_value = -1e30", True)
difference, mean = np.abs(masked - unmasked).max(), v.mean(1, keepdims=True)
print(f"onnxruntime {onnxruntime.__version__}: all keys masked and none: {difference:.1e} apart, and",
      f"{np.abs(masked - mean).max():.1e} from the mean; with -1e30 {np.abs(low - mean).max():.1e} from it")
assert difference < 2e-3 < 0.05 < np.abs(masked - mean).max() and np.abs(low - mean).max() < 1e-6
assert all((each == 0).all() for each in standard())
PYTHON
