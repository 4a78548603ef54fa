#!/usr/bin/env bash
# Library: sentence-transformers 6.2.0
# Guess: a Dense module whose configuration names an activation that is not PyTorch's, such as transformers' GELU, is computed
#   so, or is not loaded without `trust_remote_code`.
# Happens: it is loaded with Tanh in place of the activation, and embeddings are others. A line of the log says so; there is no
#   error. PyTorch's activations are loaded as named.
# Minded: exporter/hdexport/checkpoint/heads.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
install() {
    "$folder/venv/bin/pip" install --quiet --disable-pip-version-check "$@" \
        torch==2.13.0+cpu sentence-transformers==6.2.0 transformers==5.23.0 numpy==2.4.6
}
# The build for CPUs, from wherever pip is told to look, or from PyTorch's own index.
install 2> "$folder/errors" || install --extra-index-url https://download.pytorch.org/whl/cpu
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import json
import sys

import sentence_transformers
from sentence_transformers.base.modules import Dense

folder, found = sys.argv[1], {}
Dense(4, 2).save(folder)
file = f"{folder}/config.json"
with open(file) as opened:
    config = json.load(opened)
for name in ("torch.nn.modules.activation.ReLU", "transformers.activations.GELUActivation"):
    with open(file, "w") as opened:
        json.dump({**config, "activation_function": name}, opened)
    found[name.rpartition(".")[2]] = type(Dense.load(folder).activation_function).__name__
print("sentence-transformers", sentence_transformers.__version__, found)
assert found == {"ReLU": "ReLU", "GELUActivation": "Tanh"}
PYTHON
