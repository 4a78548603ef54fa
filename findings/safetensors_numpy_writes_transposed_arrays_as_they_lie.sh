#!/usr/bin/env bash
# Library: safetensors 0.8.0
# Guess: `safetensors.numpy.save_file` writes any array, or refuses one that is not contiguous, as `safetensors.torch` does.
# Happens: a transposed array is written as it lies in memory, under its transposed shape, without a message: the file is valid
#   and holds other numbers. `np.ascontiguousarray` before saving makes it right. PyTorch's function raises a ValueError. The
#   docstring says that arrays need to be contiguous.
# Minded: exporter/hdexport/checkpoint/tensorflow/converted.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check safetensors==0.8.0 numpy==2.4.6
"$folder/venv/bin/python" - "$folder/model.safetensors" <<'PYTHON'
import sys

import numpy as np
import safetensors
from safetensors.numpy import load_file, save_file

kernel = np.arange(6, dtype=np.float32).reshape(2, 3)
save_file({"transposed": kernel.T, "contiguous": np.ascontiguousarray(kernel.T)}, sys.argv[1])
found = load_file(sys.argv[1])
print("safetensors", safetensors.__version__, {name: array.tolist() for name, array in found.items()})
assert (found["contiguous"] == kernel.T).all()
assert found["transposed"].shape == (3, 2) and (found["transposed"].ravel() == kernel.ravel()).all()
PYTHON
