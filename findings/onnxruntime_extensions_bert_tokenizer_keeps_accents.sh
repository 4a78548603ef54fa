#!/usr/bin/env bash
# Library: onnxruntime-extensions 0.15.2
# Guess: the graph that `gen_processing_models` makes of an uncased BertTokenizer gives the tokenizer's ids, or there is an
#   error.
# Happens: it does not strip accents. `strip_accents` is null in such tokenizers, which means "as lower casing says" in
#   transformers and tokenizers, and the graph takes it for false. Words with accents become pieces with [UNK], without a
#   warning: two in "naive cafe" with accents, both words of the vocabulary.
# Minded: exporter/hdexport/package/tokenizer/graph.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnxruntime==1.31.1 onnxruntime-extensions==0.15.2 \
    onnx==1.23.2 transformers==5.23.0 tokenizers==0.23.3 numpy==2.4.6
cd "$folder"
printf '%s\n' '[PAD]' '[UNK]' '[CLS]' '[SEP]' '[MASK]' naive cafe na '##ive' caf > vocab.txt
"$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
import onnxruntime
import onnxruntime_extensions
from transformers import BertTokenizer

words = [line.strip() for line in open("vocab.txt")]
tokenizer = BertTokenizer(vocab={word: number for number, word in enumerate(words)}, do_lower_case=True)
graph = onnxruntime_extensions.gen_processing_models(tokenizer, pre_kwargs={})[0]
options = onnxruntime.SessionOptions()
options.register_custom_ops_library(onnxruntime_extensions.get_library_path())
session = onnxruntime.InferenceSession(graph.SerializeToString(), options, providers=["CPUExecutionProvider"])
text = "na\u00efve caf\u00e9"
found = session.run(["input_ids"], {session.get_inputs()[0].name: np.array([text])})[0].ravel().tolist()
expected = tokenizer(text)["input_ids"]
print("onnxruntime-extensions", onnxruntime_extensions.__version__)
print("graph", [words[number] for number in found], "tokenizer", [words[number] for number in expected])
assert [words[number] for number in expected] == ["[CLS]", "naive", "cafe", "[SEP]"]
assert found != expected and words.index("[UNK]") in found
PYTHON
