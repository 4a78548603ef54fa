#!/usr/bin/env bash
# Library: sentence-transformers 6.2.0
# Guess: embeddings of a model with a Normalize module have the length 1, also with `truncate_dim`.
# Happens: `truncate_dim` takes the first dimensions after all modules: the length is below 1, and another for each text, so
#   that dot products are not cosines. `normalize_embeddings=True` truncates first.
# Minded: runtime/hdruntime/sentence_encoder.py
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

import numpy as np
import sentence_transformers
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

folder, words = sys.argv[1] + "/model", ["[PAD]", "[UNK]", "a", "b"]
made = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, "[UNK]"))
made.pre_tokenizer = pre_tokenizers.Whitespace()
PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", pad_token="[PAD]").save_pretrained(folder)
torch.manual_seed(0)
sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
BertModel(BertConfig(vocab_size=64, **sizes)).save_pretrained(folder)
model = SentenceTransformer(modules=[Transformer(folder), Pooling(32, "mean"), Normalize()], device="cpu", truncate_dim=8)
found = {}
ways = {"alone": {}, "with normalize_embeddings": {"normalize_embeddings": True}, "whole": {"truncate_dim": 32}}
for name, options in ways.items():
    found[name] = np.linalg.norm(model.encode(["a", "b a"], **options), axis=1)
print("sentence-transformers", sentence_transformers.__version__, "lengths:", found)
assert np.allclose(found["whole"], 1, atol=1e-5) and np.allclose(found["with normalize_embeddings"], 1, atol=1e-5)
assert (found["alone"] < 0.9).all()
PYTHON
