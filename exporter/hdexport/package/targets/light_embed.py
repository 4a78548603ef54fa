"""light-embed: a graph whose output is the embedding, its tokenizer, and the configuration that loads them."""

from __future__ import annotations

from collections.abc import Mapping

from hdexport.package.files import with_graph
from hdexport.package.graph import GraphOptions, Outputs
from hdexport.package.readers import run_onnx, transformers_tokenizer
from hdexport.package.target import Package, PackageTarget
from hdruntime.arrays import FloatArray

_SCRIPT = '''"""$name in light-embed: `from embed import model`, then `model.encode(texts)`."""

from pathlib import Path

from light_embed import TextEmbedding

# The graph pools and normalizes.
CONFIG = {"onnx_file": "model.onnx", "normalize": False}
model = TextEmbedding(str(Path(__file__).parent), model_config=CONFIG)
'''


def _run(package: Package, text: str) -> Mapping[str, FloatArray]:
    return run_onnx(package.directory / "model.onnx", transformers_tokenizer(package.directory).encode(text))


TARGET = PackageTarget(
    name="light-embed",
    system="light-embed",
    source="light_embed/text_embedding.py and modules/ort_text.py, light-embed 1.0.9",
    tried=("light-embed 1.0.9",),
    write=with_graph({"embed.py": _SCRIPT}),
    run=_run,
    next_step="FOLDER/embed.py loads the model; model.encode(texts) gives the embeddings.",
    graph=GraphOptions(dtype="float32", outputs=Outputs.POOLED),
    takes=frozenset({"dtype", "name"}),
)
