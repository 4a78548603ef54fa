#!/usr/bin/env bash
# Library: transformers 5.23.0 beside 4.57.6
# Guess: AutoTokenizer takes a tokenizer.json as it is, as version 4 did, whatever class tokenizer_config.json names.
# Happens: for a class such as GPT2Tokenizer version 5 reads vocabulary and merges alone, and makes normalizer and splitting
#   anew by the class's defaults, without a message. A tokenizer.json that splits off every digit, as many models for code do,
#   gives "11" two tokens in version 4 and in tokenizers, and one in version 5. With the class `PreTrainedTokenizerFast` the file
#   stays as it is.
# Minded: exporter/hdexport/checkpoint/tokenizer_files.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
cd "$folder"
for version in 4.57.6 5.23.0; do
    "$folder/venv/bin/pip" install --quiet --disable-pip-version-check "transformers==$version"
    "$folder/venv/bin/python" - 2> "$folder/warnings" <<'PYTHON'
import json
from pathlib import Path

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

made = Tokenizer(models.BPE({"1": 0, "11": 1, "<|endoftext|>": 2}, [("1", "1")]))
steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
made.pre_tokenizer = pre_tokenizers.Sequence(steps)
found = {"tokenizers": made.encode("11").ids}
for kind in ("GPT2Tokenizer", "PreTrainedTokenizerFast"):
    folder = Path(kind)
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
    found[kind] = transformers.AutoTokenizer.from_pretrained(kind)("11")["input_ids"]
print("transformers", transformers.__version__, found)
assert found["tokenizers"] == found["PreTrainedTokenizerFast"] == [0, 0]
assert found["GPT2Tokenizer"] == ([0, 0] if transformers.__version__ < "5" else [1])
PYTHON
done
