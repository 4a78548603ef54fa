#!/usr/bin/env bash
# Library: sentence-transformers 6.2.0
# Guess: an embedding does not depend on the texts beside it in a batch: padding is masked.
# Happens: a CNN module convolves over the states of padding, so that the last tokens of a short text see them. Its embedding
#   is another beside a longer text, and with `batch_size=1`.
# Minded: tests/runtime/test_sentence_settings.py
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
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import CNN, Pooling
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

folder, words = sys.argv[1] + "/model", ["[PAD]", "[UNK]", "a", "b"]
made = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, "[UNK]"))
made.pre_tokenizer = pre_tokenizers.Whitespace()
PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", pad_token="[PAD]").save_pretrained(folder)
torch.manual_seed(0)
sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
BertModel(BertConfig(vocab_size=64, **sizes)).save_pretrained(folder)
texts, found = ["a b a", "b " * 20], {}
for name, modules in (("plain", [Pooling(32, "mean")]), ("CNN", [CNN(32, 8), Pooling(24, "mean")])):
    model = SentenceTransformer(modules=[Transformer(folder), *modules], device="cpu")
    found[name] = float(np.abs(model.encode(texts)[0] - model.encode(texts, batch_size=1)[0]).max())
print("sentence-transformers", sentence_transformers.__version__, "difference beside a longer text:", found)
assert found["plain"] < 1e-5 and found["CNN"] > 1e-3
PYTHON
