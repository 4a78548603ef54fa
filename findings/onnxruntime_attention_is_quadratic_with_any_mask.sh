#!/usr/bin/env bash
# Library: onnxruntime 1.31.1
# Guess: MultiHeadAttention on a CPU is flash attention, with or without a mask, and ONNX's Attention (opset 23) is it, too.
# Happens: only without any mask is memory linear in tokens. At 4096 tokens and 8 heads a call takes 16 MB without, and 530 MB,
#   all attention scores, with a key padding mask, a length that is the whole sequence's, a bias, or `unidirectional`. Attention
#   of opset 23 and 24 always has all scores.
# Minded: runtime/hdruntime/backends/onnxruntime/cpu.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnxruntime==1.31.1 onnx==1.23.2 numpy==2.4.6
cd "$folder"
cat > peak.py <<'PYTHON'
import resource
import sys

import numpy as np
import onnx
import onnxruntime

case, domain, node, kind, *shape = sys.argv[1:]
mask = f", {kind}[{','.join(shape)}] mask" if shape else ""
model = onnx.parser.parse_model(f"""
    <ir_version: 10, opset_import: ["" : {domain or 23}, "com.microsoft" : 1]>
    attention (float[1, 4096, 256] q, float[1, 4096, 256] k, float[1, 4096, 256] v{mask}) => (float[1, 4096, 256] y)
    {{ y = {node} }}""")
feeds = {name: np.ones((1, 4096, 256), np.float32) for name in "qkv"}
if shape:
    is_length = shape == ["1"]
    dtype = np.int32 if kind == "int32" else np.float32
    feeds["mask"] = np.full([int(size) for size in shape], 4096 if is_length else kind == "int32", dtype)
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
options.enable_cpu_mem_arena = False
session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
session.run(None, feeds)
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1000
scores = 8 * 4096**2 * 4 / 1e6
print(f"onnxruntime {onnxruntime.__version__} {case}: {grown:.0f} MB; all scores are {scores:.0f} MB")
assert grown < 40 if case == "nothing" else grown > 0.9 * scores
PYTHON
multi="com.microsoft.MultiHeadAttention <num_heads = 8"
run() { "$folder/venv/bin/python" peak.py "$@"; }
run nothing "" "$multi> (q, k, v)" ""
run "length of 4096" "" "$multi> (q, k, v, , mask)" int32 1
run "mask of keys" "" "$multi> (q, k, v, , mask)" int32 1 4096
run bias "" "$multi> (q, k, v, , , mask)" float 1 1 4096 4096
run causal "" "$multi, unidirectional = 1> (q, k, v)" ""
for opset in 23 24; do
    run "Attention $opset" "$opset" "Attention <q_num_heads = 8, kv_num_heads = 8> (q, k, v)" ""
    run "Attention $opset causal" "$opset" "Attention <q_num_heads = 8, kv_num_heads = 8, is_causal = 1> (q, k, v)" ""
done
