#!/usr/bin/env bash
# Library: openvino 2026.4.1
# Guess: a compiled model's nodes take kilobytes beside its weights: to compute the attention of a long text in four parts, with
#   the same operators over slices of the queries, costs a session no memory.
# Happens: on a CPU each MatMul, Softmax and MatMul that OpenVINO fuses takes about a megabyte, even if all are equal: 56 of them
#   take 71 MB, and 5 MB as nodes of their own (SNIPPETS_MODE DISABLE), whose scores then stand in memory.
# Minded: exporter/hdexport/attention/dense/openvino_causal.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check openvino==2026.4.1 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import ctypes
from pathlib import Path

import numpy as np
import openvino
from openvino import opset13 as op

HEADS, HEAD_DIM = 16, 128
core, kept = openvino.Core(), []


def megabytes():
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) / 1024


def attentions(number):
    states = given = op.parameter([-1, HEADS, -1, HEAD_DIM], np.float32)
    for _ in range(number):
        scores = op.matmul(states, op.transpose(states, op.constant([0, 1, 3, 2])), False, False)
        states = op.matmul(op.softmax(scores, 3), states, False, False)
    return openvino.Model([op.result(states)], [given], "attentions")


def compiled(number, **options):
    """Megabytes that a model takes, and its fused nodes."""
    model, before = attentions(number), megabytes()
    kept.append(core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32", **options}))
    nodes = [node.get_rt_info()["layerType"].astype(str) for node in kept[-1].get_runtime_model().get_ops()]
    return megabytes() - before, nodes.count("Subgraph")


compiled(1)
one, _ = compiled(1)
many, fused = compiled(56)
single, unfused = compiled(56, SNIPPETS_MODE="DISABLE")
print("openvino", openvino.__version__)
print(f"one attention: {one:.1f} MB; 56: {many:.1f} MB, {fused} of them fused; 56 of single nodes: {single:.1f} MB")
assert fused == 56 and unfused == 0
assert many > 35 and single < many / 3
PYTHON
