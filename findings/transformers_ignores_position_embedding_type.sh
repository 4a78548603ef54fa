#!/usr/bin/env bash
# Library: transformers 5.23.0
# Guess: a BERT whose configuration has `position_embedding_type` "relative_key" is computed so, as version 4 did, or there is
#   an error.
# Happens: version 5 ignores the key, without a message: the model has learned absolute positions, and the same answers as one
#   with "absolute". 4.57.6 has a table of distances in each layer, and other answers.
# Minded: exporter/hdexport/checkpoint/config.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
install() {
    "$folder/venv/bin/pip" install --quiet --disable-pip-version-check "$@" torch==2.13.0+cpu transformers==5.23.0 numpy==2.4.6
}
# The build for CPUs, from wherever pip is told to look, or from PyTorch's own index.
install 2> "$folder/errors" || install --extra-index-url https://download.pytorch.org/whl/cpu
"$folder/venv/bin/python" - <<'PYTHON'
import torch
import transformers
from transformers import BertConfig, BertModel


def answer(**settings):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model = BertModel(BertConfig(vocab_size=64, max_position_embeddings=64, **sizes, **settings)).eval()
    with torch.no_grad():
        states = model(torch.arange(5, 35)[None]).last_hidden_state
    return states, [name for name in model.state_dict() if "distance" in name]


plain, _ = answer()
relative, tables = answer(position_embedding_type="relative_key")
print("transformers", transformers.__version__, "difference", (plain - relative).abs().max().item(), "tables", tables)
assert torch.equal(plain, relative) and not tables
PYTHON
