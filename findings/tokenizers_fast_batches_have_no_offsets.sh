#!/usr/bin/env bash
# Library: tokenizers 0.23.3
# Guess: `Tokenizer.encode_batch_fast` gives what `encode_batch` gives, in less time.
# Happens: ids are the same, but every offset is (0, 0), as its documentation says, and no token has a word. An encoding does
#   not tell which of the two made it.
# Minded: runtime/hdruntime/text/tokenization.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check tokenizers==0.23.3
"$folder/venv/bin/python" - <<'PYTHON'
import tokenizers
from tokenizers import Tokenizer, models, pre_tokenizers

tokenizer = Tokenizer(models.WordLevel({"river": 0, "mill": 1}, unk_token="mill"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
texts = ["river mill", "mill"]
(slow, _), (fast, _) = tokenizer.encode_batch(texts), tokenizer.encode_batch_fast(texts)
print("tokenizers", tokenizers.__version__)
for name, encoding in (("encode_batch", slow), ("encode_batch_fast", fast)):
    print(name, encoding.ids, encoding.offsets, encoding.word_ids)
assert slow.ids == fast.ids
assert slow.offsets == [(0, 5), (6, 10)] and fast.offsets == [(0, 0), (0, 0)]
assert slow.word_ids == [0, 1] and fast.word_ids == [None, None]
PYTHON
