"""Packages of a trained model in the systems themselves, each in an environment of its own: `make test-all` makes them.

A text has up to 3 000 words; every embedding is compared with the bundle's.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hdruntime
from hdexport.checkpoint import default_model
from hdexport.package.check import COSINES, sample_texts
from hdexport.package.write import PackageOptions, package_bundle
from hdruntime.bundle.reader import open_bundle
from support.commands import run_here
from support.comparators import assert_same_directions

ROOT = Path(__file__).parents[3]
READERS = ROOT / ".venv" / "readers"
SOURCES = [ROOT / name for name in ("runtime", "plugins")]
TEXTS = [text for _, text in sample_texts()]

ONNX_RUNTIME = """
import json, sys
import numpy as np, onnxruntime
from tokenizers import Tokenizer

tokenizer = Tokenizer.from_file("tokenizer.json")
session = onnxruntime.InferenceSession(open("model.onnx", "rb").read(), providers=["CPUExecutionProvider"])
found = []
for text in json.load(sys.stdin):
    encoding = tokenizer.encode(text)
    values = {"input_ids": encoding.ids, "attention_mask": encoding.attention_mask, "token_type_ids": encoding.type_ids}
    feeds = {each.name: np.array([values[each.name]], np.int64) for each in session.get_inputs()}
    found.append(session.run(["sentence_embedding"], feeds)[0][0].tolist())
print(json.dumps(found))
"""
TRACT = """
import json, sys
import numpy as np, tract
from tokenizers import Tokenizer

tokenizer = Tokenizer.from_file("tokenizer.json")
model = tract.onnx().load("model.onnx").into_model().into_runnable()
found = []
for text in json.load(sys.stdin):
    encoding = tokenizer.encode(text)
    inputs = [encoding.ids, encoding.attention_mask, encoding.type_ids]
    outputs = model.run([np.array([values], np.int64) for values in inputs])
    found.append(outputs[1].to_numpy()[0].tolist())
print(json.dumps(found))
"""
FASTEMBED = """
import json, sys
sys.path.insert(0, ".")
from embed import model
print(json.dumps([next(iter(model.embed([text]))).tolist() for text in json.load(sys.stdin)]))
"""
LIGHT_EMBED = """
import json, sys
sys.path.insert(0, ".")
from embed import model
print(json.dumps([model.encode([text])[0].tolist() for text in json.load(sys.stdin)]))
"""
LANCEDB = """
import json, sys, tempfile
sys.path.insert(0, ".")
import lancedb
from embed import function
from lancedb.pydantic import LanceModel, Vector

class Document(LanceModel):
    text: str = function.SourceField()
    vector: Vector(function.ndims()) = function.VectorField()

with tempfile.TemporaryDirectory() as folder:
    table = lancedb.connect(folder).create_table("documents", schema=Document)
    texts = json.load(sys.stdin)
    table.add([{"text": text} for text in texts])
    assert table.search(texts[1]).limit(1).to_list()[0]["text"] == texts[1]
    print(json.dumps(table.to_arrow()["vector"].to_pylist()))
"""
MLFLOW = """
import json, subprocess, sys, tempfile
import mlflow.pyfunc

with tempfile.TemporaryDirectory() as folder:
    subprocess.run([sys.executable, "save.py", folder + "/model"], check=True, stdout=subprocess.DEVNULL)
    model = mlflow.pyfunc.load_model(folder + "/model")
    print(json.dumps(model.predict(json.load(sys.stdin)).tolist()))
"""
OPENVINO = """
import json, sys
import openvino_genai

config = openvino_genai.TextEmbeddingPipeline.Config()
config.normalize = True
pipeline = openvino_genai.TextEmbeddingPipeline(".", "CPU", config, INFERENCE_PRECISION_HINT="f32")
print(json.dumps([list(pipeline.embed_query(text)) for text in json.load(sys.stdin)]))
"""
OPENVINO_RERANKING = """
import json, sys
import openvino_genai

documents = json.load(sys.stdin)
config = openvino_genai.TextRerankPipeline.Config()
config.top_n = len(documents)
pipeline = openvino_genai.TextRerankPipeline(".", "CPU", config, INFERENCE_PRECISION_HINT="f32")
together = [score for _, score in sorted(pipeline.rerank(sys.argv[1], documents))]
alone = [pipeline.rerank(sys.argv[1], [document])[0][1] for document in documents]
print(json.dumps([together, alone]))
"""
QUERY = "who grinds wheat"
TEXT_IN = """
import json, sys
import numpy as np, onnxruntime, onnxruntime_extensions

options = onnxruntime.SessionOptions()
options.register_custom_ops_library(onnxruntime_extensions.get_library_path())
model = open("model.onnx", "rb").read()
session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
texts = [np.array([text], dtype=object) for text in json.load(sys.stdin)]
print(json.dumps([session.run(["embedding"], {"input": text})[0][0].tolist() for text in texts]))
"""
PROGRAMS = {
    "onnxruntime": ("onnx", {}, ONNX_RUNTIME),
    "tract": ("onnx", {"token_type_ids": True}, TRACT),
    "fastembed": ("fastembed", {}, FASTEMBED),
    "light-embed": ("light-embed", {}, LIGHT_EMBED),
    "lancedb": ("lancedb", {}, LANCEDB),
    "mlflow": ("mlflow", {}, MLFLOW),
    "openvino": ("openvino", {}, OPENVINO),
    "extensions-oldest": ("text-in", {}, TEXT_IN),
    "extensions-oml4py": ("text-in", {}, TEXT_IN),
}
"""Reader -> the target of its package, options, and a program: texts as JSON on standard input, embeddings on standard
output."""
INT8 = ("onnxruntime", "tract", "fastembed", "light-embed")
"""Readers of packages with 8-bit weights."""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("reader", "dtype"),
    [(reader, dtype) for reader in PROGRAMS for dtype in ("float32", "int8") if dtype == "float32" or reader in INT8],
)
def test_a_reader_gives_the_bundles_embeddings(
    reader: str, dtype: Any, embedder: Path, embeddings: np.ndarray, tmp_path: Path
) -> None:
    python = READERS / reader / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{python.parent.parent} is made by make test-all")
    target, options, program = PROGRAMS[reader]
    if reader in INT8:
        options = {**options, "dtype": dtype}
    package_bundle(open_bundle(embedder), PackageOptions(target=target, output=tmp_path / "package", **options))
    done = subprocess.run(
        [python, "-c", program],
        input=json.dumps(TEXTS),
        cwd=tmp_path / "package",
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, SOURCES))},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    found = np.array(json.loads(done.stdout.splitlines()[-1]))
    assert_same_directions(found, embeddings, cosine=COSINES[dtype])


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample model with a head of one score, whose weights are random, for 4096 tokens."""
    from transformers import AutoTokenizer, BertForSequenceClassification, set_seed

    folder = tmp_path_factory.mktemp("reranker")
    set_seed(0)
    sample = default_model()[0]
    BertForSequenceClassification.from_pretrained(sample, num_labels=1).save_pretrained(folder / "checkpoint")
    AutoTokenizer.from_pretrained(sample).save_pretrained(folder / "checkpoint")
    options = ("--max-len", "4096", "--target", "onnx", "--verify", "none", "--task", "text-classification")
    done = run_here("build", folder / "checkpoint", *options, "-o", folder / "bundle")
    assert done.returncode == 0, done.stderr
    return folder / "bundle"


@pytest.mark.nightly
def test_openvinos_pipeline_gives_the_scores_of_the_bundle(reranker: Path, tmp_path: Path) -> None:
    """Of documents in one padded batch, and of each alone; the pipeline's score is the sigmoid of the logit."""
    python = READERS / "openvino" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{python.parent.parent} is made by make test-all")
    package_bundle(open_bundle(reranker), PackageOptions(target="openvino", output=tmp_path / "package"))
    done = subprocess.run(
        [python, "-c", OPENVINO_RERANKING, QUERY],
        input=json.dumps(TEXTS),
        cwd=tmp_path / "package",
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    with hdruntime.load(reranker, "onnxruntime", max_seq_length="bundle") as session:
        encodings = session.tokenize([QUERY] * len(TEXTS), TEXTS, overflow="truncate")
        logits = np.array([each["logits"][0] for each in session.infer(encodings)], np.float64)
    expected = 1 / (1 + np.exp(-logits))
    assert np.ptp(expected) > 1e-3, "the documents have scores of their own"
    for found in json.loads(done.stdout.splitlines()[-1]):
        np.testing.assert_allclose(found, expected, atol=1e-6)
