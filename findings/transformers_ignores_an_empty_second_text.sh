#!/usr/bin/env bash
# Library: transformers 5.23.0
# Guess: a tokenizer makes equal ids of a pair, whether a call passes the pair alone or a batch that holds it.
# Happens: not if the second text is empty. Alone, `tokenizer("a", "")`, it is left out, as None would be: [CLS] a [SEP]. In a
#   batch, `tokenizer(["a"], [""])`, it is a second text with a separator of its own, as it is for tokenizers: [CLS] a [SEP]
#   [SEP].
# Minded: exporter/hdexport/checkpoint/tokenizer_ids.py, exporter/hdexport/verify/from_text.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.23.0 tokenizers==0.23.3
"$folder/venv/bin/python" - <<'PYTHON'
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

made = Tokenizer(models.WordLevel({"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "a": 3}, "[UNK]"))
made.pre_tokenizer = pre_tokenizers.Whitespace()
made.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
library = transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]")
found = {
    "alone": library("a", "")["input_ids"],
    "batch": library(["a"], [""])["input_ids"][0],
    "tokenizers": made.encode("a", "").ids,
}
print("transformers", transformers.__version__, found)
assert found == {"alone": [1, 3, 2], "batch": [1, 3, 2, 2], "tokenizers": [1, 3, 2, 2]}
PYTHON
