#!/usr/bin/env bash
# Library: transformers 5.23.0
# Guess: an MPNet with `relative_attention_num_buckets` 64 in its configuration tells 64 ranges of distances apart.
# Happens: only the table of biases has 64 rows. Distances are always put into 32 buckets, so that rows from 32 on, whatever is
#   in them, change no answer.
# Minded: exporter/hdexport/families/mpnet.py
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
from transformers import MPNetConfig, MPNetModel

torch.manual_seed(0)
config = MPNetConfig(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=520,
    relative_attention_num_buckets=64,
)
model = MPNetModel(config).eval()
ids = torch.randint(4, 64, (1, 500))
with torch.no_grad():
    table = model.encoder.relative_attention_bias.weight
    before = model(ids).last_hidden_state
    table[32:] += 100 * torch.randn(32, 2)
    upper = (model(ids).last_hidden_state - before).abs().max().item()
    table[:32] += torch.randn(32, 2)
    lower = (model(ids).last_hidden_state - before).abs().max().item()
print("transformers", transformers.__version__, "rows", len(table))
print("change by rows from 32 on", upper, "by rows before", lower)
assert len(table) == 64 and upper == 0 and lower > 1e-3
PYTHON
