#!/usr/bin/env bash
# Library: tokenizers 0.23.3, transformers 5.23.0
# Guess: a truncated text has at most `max_length` tokens, or there is an error.
# Happens: if `max_length` is less than the number of special tokens, here 1 with [CLS] and [SEP], the text is not truncated
#   at all, without a message: 22 tokens. With 2, only the special tokens are left. transformers' `truncation=True` gives
#   equal results, since tokenizers truncates for it.
# Minded: exporter/hdexport/verify/from_text.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.23.0 tokenizers==0.23.3
"$folder/venv/bin/python" - <<'PYTHON'
import tokenizers
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

made = Tokenizer(models.WordLevel({"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "a": 3}, "[UNK]"))
made.pre_tokenizer = pre_tokenizers.Whitespace()
made.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
library = transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]")
print("tokenizers", tokenizers.__version__, "transformers", transformers.__version__)
text, found = "a " * 20, []
for length in (1, 2, 3):
    made.enable_truncation(length)
    found.append((len(made.encode(text).ids), len(library(text, truncation=True, max_length=length)["input_ids"])))
    print("max_length", length, "tokens", *found[-1])
assert found == [(22, 22), (2, 2), (3, 3)]
PYTHON
