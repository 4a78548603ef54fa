#!/usr/bin/env bash
# Library: tokenizers 0.23.3
# Guess: a tokenizer.json gives a text the same ids in every process.
# Happens: not if a normalizer makes one text of several added tokens, such as "Foo" and "foo" under lower casing: one of them
#   is chosen anew at each load, by the order of a hash table. 40 loads of one file, in one process, give the word both ids. An
#   added token with `normalized` false is right.
# Minded: runtime/hdruntime/text/tokenizer_file.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check tokenizers==0.23.3
"$folder/venv/bin/python" - <<'PYTHON'
import tokenizers
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers


def ids(*, normalized):
    """What 40 loads of one file make of a text."""
    made = Tokenizer(models.WordLevel({"[UNK]": 0}, "[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    made.add_tokens([AddedToken(content, normalized=normalized) for content in ("Foo", "foo")])
    file = made.to_str()
    return {tuple(Tokenizer.from_str(file).encode("foo").ids) for _ in range(40)}


found = {normalized: ids(normalized=normalized) for normalized in (True, False)}
print("tokenizers", tokenizers.__version__, "ids of foo, by normalized:", found)
assert found == {True: {(1,), (2,)}, False: {(2,)}}
PYTHON
