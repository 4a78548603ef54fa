#!/usr/bin/env bash
# Library: transformers 5.23.0
# Guess: a BERT whose configuration has `is_causal` true is causal, or the key has no meaning for a model that sees both sides.
# Happens: it is causal in batches without padding, where attention gets no mask, and sees both sides in batches with padding:
#   a text's states depend on whether a longer text is beside it.
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

torch.manual_seed(0)
sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
model = BertModel(BertConfig(vocab_size=64, **sizes, is_causal=True)).eval()
ids = torch.arange(5, 13).repeat(2, 1)
padded = torch.ones_like(ids)
padded[1, 5:] = 0
with torch.no_grad():
    alone = model(ids[:1]).last_hidden_state
    beside = model(ids, attention_mask=padded).last_hidden_state[:1]
    model.config.is_causal = False
    both_sides = model(ids[:1]).last_hidden_state
difference = {
    "alone and beside": (alone - beside).abs().max().item(),
    "beside and both sides": (beside - both_sides).abs().max().item(),
}
print("transformers", transformers.__version__, "differences:", difference)
assert difference["alone and beside"] > 1e-3 and difference["beside and both sides"] < 1e-5
PYTHON
