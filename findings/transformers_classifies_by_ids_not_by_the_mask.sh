#!/usr/bin/env bash
# Library: transformers 5.23.0
# Guess: `Qwen3ForSequenceClassification` and its like read the last token that the attention mask has.
# Happens: they read the last one whose id is not `pad_token_id`, whatever the mask says. Padding of another id is read as the
#   text's last token, and a text that ends with the id of padding, as where padding is the end of text, is read one token
#   earlier.
# Minded: tests/support/hugging_face.py
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
from transformers import Qwen3Config, Qwen3ForSequenceClassification

torch.manual_seed(0)
sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
config = Qwen3Config(vocab_size=32, intermediate_size=64, **sizes, pad_token_id=0, num_labels=2)
model = Qwen3ForSequenceClassification(config).eval()


def logits(*ids, padding=0):
    mask = torch.ones(1, len(ids), dtype=torch.long)
    mask[0, len(ids) - padding :] = 0
    with torch.no_grad():
        return model(torch.tensor([ids]), attention_mask=mask).logits


text = logits(5, 6, 7)
found = {
    "padding of its id": (logits(5, 6, 7, 0, 0, padding=2) - text).abs().max().item(),
    "padding of another id": (logits(5, 6, 7, 9, 9, padding=2) - text).abs().max().item(),
    "a text with its id": (logits(5, 6, 7, 0) - text).abs().max().item(),
}
print("transformers", transformers.__version__, "difference from 5 6 7:", found)
assert found["padding of its id"] < 1e-6 and found["a text with its id"] < 1e-6 and found["padding of another id"] > 1e-3
PYTHON
