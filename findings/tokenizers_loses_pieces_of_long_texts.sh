#!/usr/bin/env bash
# Library: tokenizers 0.23.2
# Guess: of a truncated text, `Encoding.overflowing` has all pieces that do not fit.
# Happens: version 0.23.2, like 0.23.1, tokenizes no further than the first piece, with and without a stride, so that the
#   rest is lost: of 40 words and 8 tokens per piece there is no overflow at all, and with special tokens one short piece.
#   0.23.3 gives all pieces. Reported as issue 2091 of huggingface/tokenizers.
# Minded: pyproject.toml, which excludes both; runtime/hdruntime/text/splitting.py, which splits by itself
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for version in 0.23.2 0.23.3; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install --quiet --disable-pip-version-check "tokenizers==$version"
    "$folder/$version/bin/python" - <<'PYTHON'
import tokenizers
from tokenizers import Tokenizer, models, pre_tokenizers

words = [f"w{number}" for number in range(40)]
tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="w0"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
for stride in (0, 1, 2):
    tokenizer.enable_truncation(8, stride=stride)
    encoding = tokenizer.encode(" ".join(words))
    pieces = [encoding, *encoding.overflowing]
    lost = set(range(40)).difference(*(piece.ids for piece in pieces))
    print("tokenizers", tokenizers.__version__, "stride", stride, "pieces", len(pieces), "lost tokens", len(lost))
    if tokenizers.__version__ == "0.23.2":
        assert len(pieces) == 1 and len(lost) == 32
    else:
        assert len(pieces) > 4 and not lost
PYTHON
done
