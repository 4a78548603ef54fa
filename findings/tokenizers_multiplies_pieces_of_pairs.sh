#!/usr/bin/env bash
# Library: tokenizers 0.23.3
# Guess: `Encoding.overflowing` of a truncated pair has about as many pieces as both texts together: it grows with length.
# Happens: where both texts are truncated (`longest_first`, the default), it has a piece for every piece of the first text with
#   every piece of the second. Four times the length takes sixteen times the pieces, and their memory.
# Minded: runtime/hdruntime/text/partial_texts.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check tokenizers==0.23.3
"$folder/venv/bin/python" - <<'PYTHON'
import tokenizers
from tokenizers import Tokenizer, models, pre_tokenizers

tokenizer = Tokenizer(models.WordLevel({"river": 0}, unk_token="river"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer.enable_truncation(8)
pieces = {}
for tokens in (16, 64, 256):
    text = "river " * tokens
    pieces[tokens] = 1 + len(tokenizer.encode(text, text).overflowing)
print("tokenizers", tokenizers.__version__, "pieces of a pair by tokens of each text", pieces)
assert pieces == {tokens: (tokens // 4) ** 2 for tokens in pieces}
PYTHON
