#!/usr/bin/env bash
# Library: transformers 5.23.0, PyTorch 2.13.0 on a CPU
# Guess: "eager" and "sdpa" are two implementations of one attention, equal but for rounding.
# Happens: not for a token that the mask lets see nothing, as a window far from a short text leaves it: "sdpa" gives it 0, and
#   "eager" the mean of all values, padding's among them.
# Minded: plugins/hdplugins/attention/window/reference.py, and docs/token_vectors.md says it
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
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertSelfAttention

print("transformers", transformers.__version__, "PyTorch", torch.__version__)
states = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(0))
mask = torch.zeros(1, 1, 6, 6)
mask[..., 2, :] = torch.finfo(torch.float32).min
found = {}
for name in ("eager", "sdpa"):
    torch.manual_seed(0)
    layer = BertSelfAttention(BertConfig(hidden_size=32, num_attention_heads=2, attn_implementation=name)).eval()
    with torch.no_grad():
        found[name] = layer(states, mask if name == "eager" else mask == 0)[0][0]
        mean = layer.value(states)[0].mean(0)
rows = [0, 1, 3, 4, 5]
print("largest value of the row: eager", found["eager"][2].abs().max().item(), "sdpa", found["sdpa"][2].abs().max().item())
assert torch.allclose(found["eager"][rows], found["sdpa"][rows], atol=1e-6)
assert torch.allclose(found["eager"][2], mean, atol=1e-6) and not found["sdpa"][2].any()
PYTHON
