#!/usr/bin/env bash
# Library: transformers 5.23.0
# Guess: rotary positions of the type "dynamic" depend on the text's own length: beside a longer text, a text has the states
#   that it has alone.
# Happens: transformers scales them by the longest row of the batch, padding included, once it is longer than the trained
#   positions. A text of 4 tokens gets other states beside a text of 40, and beside padding to 17 in a model of 16 positions.
# Minded: exporter/hdexport/model/rotary.py
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
from transformers import Qwen3Config, Qwen3Model

torch.manual_seed(0)
sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
config = Qwen3Config(vocab_size=64, intermediate_size=64, **sizes, max_position_embeddings=16, rope_parameters=rope)
model = Qwen3Model(config).eval()


def states(length):
    """Of the same four tokens, padded to a length; beside a text of that length."""
    ids = torch.arange(5, 5 + length).repeat(2, 1)
    mask = torch.ones_like(ids)
    mask[0, 4:] = 0
    with torch.no_grad():
        return model(ids, attention_mask=mask).last_hidden_state[0, :4]


alone = states(4)
found = {length: (states(length) - alone).abs().max().item() for length in (16, 17, 40)}
print("transformers", transformers.__version__, "difference by the batch's length:", found)
assert found[16] < 1e-5 and found[17] > 1e-4 and found[40] > 1e-3
PYTHON
