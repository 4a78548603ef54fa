#!/usr/bin/env bash
# Library: safetensors 0.8.0
# Guess: equal tensors with equal metadata make equal files, byte for byte, so that a file's hash tells whether a model
#   changed.
# Happens: safetensors writes the keys of `metadata` in an order that changes from one call to the next: 20 calls with six
#   keys usually gave 20 different files. With one key, such as transformers' "format", or without metadata the bytes are
#   equal, whatever the order of the tensors.
# Minded: exporter/hdexport/checkpoint/extended_files.py, exporter/hdexport/checkpoint/tensorflow/converted.py (one key alone)
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check safetensors==0.8.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
import safetensors
from safetensors.numpy import save

tensors = {"b": np.zeros(2, np.float32), "a": np.ones(3, np.float32)}
metadata = {str(number): "value" for number in range(6)}
found = {
    "six keys": len({save(tensors, metadata) for _ in range(20)}),
    "one key": len({save(tensors, {"format": "pt"}) for _ in range(20)}),
    "tensors in another order": len({save(tensors), save(dict(reversed(tensors.items())))}),
}
print("safetensors", safetensors.__version__, "different files:", found)
assert found["six keys"] > 1 and found["one key"] == found["tensors in another order"] == 1
PYTHON
