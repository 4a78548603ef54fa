#!/usr/bin/env bash
# Library: sentence-transformers 6.2.0
# Guess: `encode(..., output_value="token_embeddings")` gives an array of each text's own tokens.
# Happens: sentence-transformers removes padding after a text only. With a tokenizer that pads on the left, as most decoders'
#   tokenizers do, a short text has as many rows as the longest text in its batch, padding first, and nothing tells how many
#   rows are padding.
# Minded: tests/runtime/test_sentence_transformers.py
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
import sys

import sentence_transformers
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3Model

folder, words = sys.argv[1] + "/model", ["[PAD]", "[UNK]", "w"]
made = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, "[UNK]"))
made.pre_tokenizer = pre_tokenizers.Whitespace()
torch.manual_seed(0)
sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
Qwen3Model(Qwen3Config(vocab_size=64, intermediate_size=64, **sizes, pad_token_id=0)).save_pretrained(folder)
found = {}
for side in ("right", "left"):
    library = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", pad_token="[PAD]", padding_side=side)
    library.save_pretrained(folder)
    model = SentenceTransformer(modules=[Transformer(folder), Pooling(32, "mean")], device="cpu")
    found[side] = [len(rows) for rows in model.encode(["w w w", "w " * 20], output_value="token_embeddings")]
print("sentence-transformers", sentence_transformers.__version__, "rows of texts of 3 and 20 tokens:", found)
assert found == {"right": [3, 20], "left": [20, 20]}
PYTHON
