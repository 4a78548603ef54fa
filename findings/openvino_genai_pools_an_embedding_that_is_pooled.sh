#!/usr/bin/env bash
# Library: openvino-genai 2026.4.1
# Guess: TextEmbeddingPipeline takes a model's only output [batch, hidden], `sentence_embedding`, for the embedding that it
#   is, or a message names the output.
# Happens: it pools the output whatever its rank, and such a model is not loaded: a RuntimeError about an axis out of the
#   tensor's rank. With one output [batch, tokens, hidden] that has the embedding as the state of every token, each pooling
#   gives the embedding.
# Minded: exporter/hdexport/package/targets/openvino.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check openvino-genai==2026.4.1.0 \
    openvino-tokenizers==2026.4.1.0 transformers==5.23.0 tokenizers==0.23.3 onnx==1.23.2 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import json
from pathlib import Path

import numpy as np
import onnx
import openvino
import openvino_genai
from openvino_tokenizers import convert_tokenizer
from transformers import BertTokenizer

MODEL = """
    <ir_version: 8, opset_import: ["" : 18]>
    embed (int64[batch, tokens] input_ids, int64[batch, tokens] attention_mask, int64[batch, tokens] token_type_ids)
        => (float[{shape}] {output}) {{
        rows = Gather(table, input_ids)
        axis = Constant <value = int64[1] {{1}}> ()
        {nodes}
    }}"""
POOLED = "sentence_embedding = ReduceMean <keepdims = 0> (rows, axis)"
TOKENS = "last_hidden_state = Identity(rows)"
words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "river", "mill"]
table = np.random.default_rng(0).normal(size=(len(words), 8)).astype(np.float32)


def load(name, shape, nodes):
    folder = Path(name)
    folder.mkdir()
    model = onnx.parser.parse_model(MODEL.format(shape=shape, output=name, nodes=nodes))
    model.graph.initializer.append(onnx.numpy_helper.from_array(table, "table"))
    onnx.save(model, folder / "model.onnx")
    openvino.save_model(openvino.convert_model(str(folder / "model.onnx")), folder / "openvino_model.xml")
    tokenizer = BertTokenizer(vocab={word: number for number, word in enumerate(words)})
    openvino.save_model(convert_tokenizer(tokenizer), folder / "openvino_tokenizer.xml")
    (folder / "config.json").write_text(json.dumps({"model_type": "bert", "max_position_embeddings": 512}))
    return openvino_genai.TextEmbeddingPipeline(str(folder), "CPU")


print("openvino-genai", openvino_genai.__version__)
print("tokens", len(load("last_hidden_state", "batch, tokens, 8", TOKENS).embed_query("river mill")))
try:
    load("sentence_embedding", "batch, 8", POOLED)
    raise SystemExit("an output of rank 2 is taken")
except RuntimeError as error:
    print("pooled:", next(line for line in str(error).splitlines() if "rank" in line))
PYTHON
