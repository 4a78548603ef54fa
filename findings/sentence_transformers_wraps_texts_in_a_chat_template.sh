#!/usr/bin/env bash
# Library: sentence-transformers 6.2.0, transformers 5.23.0
# Guess: `SentenceTransformer` of a checkpoint without sentence-transformers' files is its model and mean pooling: a text has
#   the tokens that its tokenizer gives it.
# Happens: if the tokenizer has a chat template, as most decoders' tokenizers have, sentence-transformers puts each text into
#   the template as a user's message, without a warning: it embeds another text.
# Minded: exporter/hdexport/checkpoint/sentence_settings.py
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
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3Model

folder, words = sys.argv[1] + "/model", ["[PAD]", "[UNK]", "user", "a", "text"]
made = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, "[UNK]"))
made.pre_tokenizer = pre_tokenizers.Whitespace()
library = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", pad_token="[PAD]")
torch.manual_seed(0)
sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
Qwen3Model(Qwen3Config(vocab_size=64, intermediate_size=64, **sizes, pad_token_id=0)).save_pretrained(folder)
found = {}
for template in (None, "{% for message in messages %}{{ message.role }} {{ message.content }}{% endfor %}"):
    library.chat_template = template
    library.save_pretrained(folder)
    ids = SentenceTransformer(folder, device="cpu").preprocess(["a text"])["input_ids"][0].tolist()
    found["with" if template else "without"] = [words[number] for number in ids]
print("sentence-transformers", sentence_transformers.__version__, "a text,", found)
assert found == {"without": ["a", "text"], "with": ["user", "a", "text"]}
PYTHON
