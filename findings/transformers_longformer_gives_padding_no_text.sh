#!/usr/bin/env bash
# Library: transformers 5.23.0
# Guess: a padding token of a Longformer attends to the text, as in BERT: its last hidden state depends on the text, and only
#   a mask keeps it out of a mean.
# Happens: the attention's output for padding is 0 in every layer, so that rows of padding are equal for all texts. A
#   comparison with a kernel that computes these rows, or that leaves NaN in them, has to leave them out.
# Minded: exporter/hdexport/attention/window/attention_type.py
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
from transformers import BertConfig, BertModel, LongformerConfig, LongformerModel

SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
}
torch.manual_seed(0)
mask = torch.ones(2, 16, dtype=torch.long)
mask[:, 12:] = 0
ids = torch.where(mask == 1, torch.randint(4, 128, mask.shape), 1)
found = {}
for name, model in (
    ("Longformer", LongformerModel(LongformerConfig(**SIZES, attention_window=8))),
    ("BERT", BertModel(BertConfig(**SIZES))),
):
    with torch.no_grad():
        first, second = model.eval()(ids, attention_mask=mask).last_hidden_state
    # How far the states of two different texts are apart, for tokens and for padding.
    found[name] = [(first - second)[rows].abs().max().item() for rows in (slice(12), slice(12, None))]
print("transformers", transformers.__version__, "differences of texts, of padding:", found)
assert found["Longformer"][1] == 0 and min(found["BERT"] + found["Longformer"][:1]) > 1e-3
PYTHON
