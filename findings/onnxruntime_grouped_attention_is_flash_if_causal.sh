#!/usr/bin/env bash
# Library: onnxruntime 1.27.0, 1.28.0, 1.31.1
# Guess: of one attention, MultiHeadAttention and GroupQueryAttention of com.microsoft have one kernel on a CPU, and the layout of
#   keys and values, [batch, tokens, hidden] or [batch, heads, tokens, head_dim], is only a layout.
# Happens: flash attention, whose memory is linear in tokens, is MultiHeadAttention's only if it is not causal and keys and values
#   have three axes, and GroupQueryAttention's only if it is causal, since 1.28. At 4096 tokens of 8 heads that is 17 to 25 MB,
#   and all others take 540 MB and more, all attention scores.
# Minded: exporter/hdexport/attention/dense/lower.py, exporter/hdexport/lowering/multi_head_attention.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnxruntime==1.31.1 onnx==1.23.2 numpy==2.4.6
cat > "$folder/peak.py" <<'PYTHON'
import resource
import sys

import numpy as np
import onnx
import onnxruntime

node, *shape = sys.argv[1].split("; ")
is_linear = sys.argv[2] == "linear"
TOKENS, HEADS = 4096, 8
state, grouped = f"float[1, {TOKENS}, {HEADS * 32}]", node.startswith("Group")
keys = shape[0] if shape else state
more = ", int32[1] last, int32 total" if grouped else ""
caches = f", float[1, {HEADS}, all, 32] keys, float[1, {HEADS}, all, 32] values" if grouped else ""
model = onnx.parser.parse_model(f"""
    <ir_version: 9, opset_import: ["" : 20, "com.microsoft" : 1]>
    attend ({state} q, {keys} k, {keys} v{more}) => ({state} y{caches})
    {{ y{", keys, values" if grouped else ""} = com.microsoft.{node} (q, k, v{",,, last, total" if grouped else ""}) }}""")
feeds = {"last": np.array([TOKENS - 1], np.int32), "total": np.array(TOKENS, np.int32)} if grouped else {}
for value in model.graph.input[:3]:
    feeds[value.name] = np.ones([axis.dim_value for axis in value.type.tensor_type.shape.dim], np.float32)
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
options.enable_cpu_mem_arena = False
session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
session.run(None, feeds)
grown, scores = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1000, HEADS * TOKENS**2 * 4 / 1e6
print(f"onnxruntime {onnxruntime.__version__} {node}, keys {keys}: {grown:.0f} MB; all scores are {scores:.0f} MB")
assert grown < 50 if is_linear else grown > 0.9 * scores
PYTHON
run() { "$folder/venv/bin/python" "$folder/peak.py" "$@"; }
multi="MultiHeadAttention <num_heads = 8"
group="GroupQueryAttention <num_heads = 8, kv_num_heads = 8"
run "$multi>" linear
run "$multi>; float[1, 8, 4096, 32]" quadratic
run "$multi, unidirectional = 1>" quadratic
run "$group>" linear
run "$group, causal = 0>" quadratic
for case in 1.28.0:linear 1.27.0:quadratic; do
    version=${case%:*}
    "$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps "onnxruntime==$version"
    run "$group>" "${case#*:}"
done
