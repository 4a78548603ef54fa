#!/usr/bin/env bash
# Library: transformers 5.23.0, tokenizers 0.23.3
# Guess: a checkpoint's tokenizer truncates texts at one length, whichever of the two libraries loads its files.
# Happens: tokenizers reads the truncation in tokenizer.json, and transformers reads `model_max_length` in
#   tokenizer_config.json. Where the first is 8 and the second is 16, tokenizers makes 8 tokens of a long text. AutoTokenizer
#   makes 16 with `truncation=True`, and all 30 without, because the first call also switches tokenizer.json's truncation off.
# Minded: exporter/hdexport/package/readers.py, exporter/hdexport/checkpoint/tokenizer_files.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.23.0 tokenizers==0.23.3
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import json
import sys
from pathlib import Path

import tokenizers
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

folder, text = Path(sys.argv[1]), "a " * 30
made = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, "[UNK]"))
made.pre_tokenizer = pre_tokenizers.Whitespace()
made.enable_truncation(8)
made.save(str(folder / "tokenizer.json"))
config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 16, "unk_token": "[UNK]"}
(folder / "tokenizer_config.json").write_text(json.dumps(config))

loaded = Tokenizer.from_file(str(folder / "tokenizer.json"))
auto = transformers.AutoTokenizer.from_pretrained(folder)
before = auto.backend_tokenizer.truncation["max_length"]
found = {
    "tokenizers": len(loaded.encode(text).ids),
    "AutoTokenizer": len(auto(text)["input_ids"]),
    "its tokenizer's truncation": (before, auto.backend_tokenizer.truncation),
    "truncation=True": len(auto(text, truncation=True)["input_ids"]),
}
print("transformers", transformers.__version__, "tokenizers", tokenizers.__version__, found)
assert list(found.values()) == [8, 30, (8, None), 16]
PYTHON
