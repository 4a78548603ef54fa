#!/usr/bin/env bash
# Library: sentence-transformers 5.7.0 with optimum-onnx 0.1.0 and optimum-intel 1.27.0 (transformers 4.57.6)
# Guess: `backend="onnx"` and `backend="openvino"` compute what PyTorch does, as modules after the model run in PyTorch in all
#   three, or there is an error.
# Happens: both export the last hidden states alone. A model with WeightedLayerPooling, which weighs the states of several
#   layers, is loaded and gives other embeddings, without an error. Mean pooling, a Dense and `max_seq_length` give equal
#   embeddings. sentence-transformers 6.2.0 with optimum-intel 2.2.0 and transformers 5.5.4 does not differ in this.
# Minded: exporter/hdexport/checkpoint/library_files.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
install() {
    "$folder/venv/bin/pip" install --quiet --disable-pip-version-check "$@" \
        torch==2.13.0+cpu sentence-transformers==5.7.0 optimum==2.1.0 optimum-onnx==0.1.0 \
        optimum-intel==1.27.0 transformers==4.57.6 onnx==1.23.2 onnxruntime==1.32.0 openvino==2026.4.1 numpy==2.4.6
}
# The build for CPUs, from wherever pip is told to look, or from PyTorch's own index.
install 2> "$folder/errors" || install --extra-index-url https://download.pytorch.org/whl/cpu
"$folder/venv/bin/python" - "$folder" 2> "$folder/log" <<'PYTHON' || { cat "$folder/log"; exit 1; }
import logging
import sys

import numpy as np
import sentence_transformers
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Dense, Pooling, Transformer, WeightedLayerPooling
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

logging.disable()
folder, words = sys.argv[1] + "/model", ["[PAD]", "[UNK]", "a", "b"]
made = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, "[UNK]"))
made.pre_tokenizer = pre_tokenizers.Whitespace()
PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", pad_token="[PAD]").save_pretrained(folder)
torch.manual_seed(0)
sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
BertModel(BertConfig(vocab_size=64, **sizes)).save_pretrained(folder)
layers = Transformer(folder, config_args={"output_hidden_states": True})
made_of = {
    "mean, Dense": [Transformer(folder, max_seq_length=8), Pooling(32, "mean"), Dense(32, 16)],
    "layers": [layers, WeightedLayerPooling(32, num_hidden_layers=2, layer_start=1), Pooling(32, "mean")],
}
# On some processors OpenVINO's default is bfloat16.
options = {"torch": {}, "onnx": {}, "openvino": {"ov_config": {"INFERENCE_PRECISION_HINT": "f32"}}}
texts, found = ["a b a", "b " * 20], {}
for number, (name, modules) in enumerate(made_of.items()):
    saved = f"{sys.argv[1]}/{number}"
    SentenceTransformer(modules=modules, device="cpu").save(saved)
    answers = {
        backend: SentenceTransformer(saved, backend=backend, device="cpu", model_kwargs=kwargs).encode(texts)
        for backend, kwargs in options.items()
    }
    found[name] = {backend: float(np.abs(answers[backend] - answers["torch"]).max()) for backend in ("onnx", "openvino")}
print("sentence-transformers", sentence_transformers.__version__, "differences from PyTorch:", found)
assert max(found["mean, Dense"].values()) < 1e-5 and min(found["layers"].values()) > 1e-3
PYTHON
