#!/usr/bin/env bash
# Library: tokenizers 0.23.3, sentencepiece 0.2.3
# Guess: `normalizers.Precompiled` of a SentencePiece model's map normalizes as SentencePiece does.
# Happens: of a letter with two accents, each a character of its own, it drops the second: "e" + U+0301 + U+0302 becomes
#   U+00E9, and SentencePiece makes U+00E9 U+0302 of it. The normalizer looks up a whole grapheme of fewer than six
#   bytes, and takes its shortest known beginning for all of it. Vietnamese in NFD loses tones.
# Minded: exporter/hdexport/package/tokenizer/sentence_pieces.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check tokenizers==0.23.3 sentencepiece==0.2.3 \
    protobuf==7.36.2
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import sentencepiece
import tokenizers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import normalizers

with open("texts.txt", "w") as file:
    file.writelines(f"the river flows past mill {number}\n" for number in range(200))
sentencepiece.SentencePieceTrainer.train(
    input="texts.txt", model_prefix="model", vocab_size=40, hard_vocab_limit=False, minloglevel=2
)
model = sentencepiece_model_pb2.ModelProto()
with open("model.model", "rb") as file:
    model.ParseFromString(file.read())
ours = normalizers.Precompiled(model.normalizer_spec.precompiled_charsmap)
theirs = sentencepiece.SentencePieceProcessor(model_file="model.model")
print("tokenizers", tokenizers.__version__, "sentencepiece", sentencepiece.__version__)
for text, kept in (("e\u0301", "\u00e9"), ("e\u0301\u0302", "\u00e9"), ("e\u0302\u0301", "\u00ea")):
    found, expected = ours.normalize_str(text), theirs.normalize(text).removeprefix("\u2581")
    print(ascii(text), "tokenizers", ascii(found), "sentencepiece", ascii(expected))
    assert found == kept
    assert (found == expected) == (len(text) == 2)
PYTHON
