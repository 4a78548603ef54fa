#!/usr/bin/env bash
# Library: transformers 5.23.0
# Guess: the answer of a BigBird for a text does not depend on the texts before it.
# Happens: a text that is too short for sparse attention makes the model dense for good, with one warning: texts after it get
#   other numbers, in memory quadratic in tokens.
# Minded: exporter/hdexport/families/big_bird.py
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
from transformers import BigBirdConfig, BigBirdModel

torch.manual_seed(0)
config = BigBirdConfig(
    vocab_size=128,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=256,
    attention_type="block_sparse",
    block_size=4,
    num_random_blocks=1,
)
model = BigBirdModel(config).eval()
ids = torch.randint(4, 64, (1, 128))
with torch.no_grad():
    before = model(ids).last_hidden_state
    again = (model(ids).last_hidden_state - before).abs().max().item()
    model(ids[:, :8])
    after = (model(ids).last_hidden_state - before).abs().max().item()
print("transformers", transformers.__version__, "now", model.attention_type)
print("change by a repetition", again, "after a short text", after)
assert again == 0 and after > 1e-3 and model.attention_type == "original_full"
PYTHON
