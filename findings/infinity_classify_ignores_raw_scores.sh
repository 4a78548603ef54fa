#!/usr/bin/env bash
# Library: infinity_emb 0.0.78
# Guess: `raw_scores` of `/classify` chooses between logits and probabilities, as it does for `/rerank`, and the usage of
#   a response counts tokens.
# Happens: the answer is the probabilities whatever `raw_scores` is. The usage is the number of characters.
# Minded: runtime/hdruntime/serve/interfaces/vllm.py, where `raw_scores` gives logits, and docs/serve_api.md says it
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
install() {
    "$folder/venv/bin/pip" install --quiet --disable-pip-version-check "$@" infinity_emb==0.0.78 torch==2.13.0+cpu \
        transformers==4.57.6 sentence-transformers==3.4.1 numpy==1.26.4
}
# The build for CPUs, from wherever pip is told to look, or from PyTorch's own index.
install 2> "$folder/errors" || install --extra-index-url https://download.pytorch.org/whl/cpu
export HF_HUB_OFFLINE=1 INFINITY_ANONYMOUS_USAGE_STATS=0
"$folder/venv/bin/python" - "$folder" 2> "$folder/log" <<'PYTHON' || { cat "$folder/log" >&2; exit 1; }
import asyncio
import sys
from pathlib import Path

import torch
from infinity_emb import AsyncEmbeddingEngine, EngineArgs
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

model = Path(sys.argv[1]) / "model"
model.mkdir()
text = "a good day"
words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *text.split()]
(model / "vocab.txt").write_text("\n".join(words))
tokenizer = BertTokenizerFast(str(model / "vocab.txt"), model_max_length=16)
tokenizer.save_pretrained(model)
torch.manual_seed(0)
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
classifier = BertForSequenceClassification(BertConfig(vocab_size=len(words), num_labels=3, **sizes)).eval()
classifier.classifier.weight.data *= 50
classifier.save_pretrained(model)
tokens = tokenizer(text, return_tensors="pt")
logits = classifier(**tokens).logits[0]


async def answers():
    options = {"engine": "torch", "device": "cpu", "dtype": "float32", "model_warmup": False}
    engine = AsyncEmbeddingEngine.from_args(
        EngineArgs(model_name_or_path=str(model), bettertransformer=False, compile=False, **options)
    )
    async with engine:
        return [await engine.classify(sentences=[text], raw_scores=raw_scores) for raw_scores in (False, True)]


(plain, usage), (raw, _) = asyncio.run(answers())
print("logits", sorted(logits.tolist(), reverse=True))
print("raw_scores=False", [each["score"] for each in plain[0]])
print("raw_scores=True ", [each["score"] for each in raw[0]])
print("usage", usage, "tokens", tokens["input_ids"].numel(), "characters", len(text))
assert plain == raw, "raw_scores has an effect"
probabilities = sorted(logits.softmax(0).tolist(), reverse=True)
assert all(abs(each["score"] - value) < 1e-5 for each, value in zip(raw[0], probabilities, strict=True))
assert usage == len(text) != tokens["input_ids"].numel(), "usage counts tokens"
PYTHON
