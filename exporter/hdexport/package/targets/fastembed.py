"""fastembed's custom models: a graph, its tokenizer, and the lines that register them."""

from __future__ import annotations

from collections.abc import Mapping

from hdexport.package.files import with_graph
from hdexport.package.graph import GraphOptions, Outputs
from hdexport.package.readers import run_onnx, transformers_tokenizer
from hdexport.package.target import Package, PackageTarget
from hdruntime.arrays import FloatArray

_SCRIPT = '''"""$name in fastembed: `from embed import model`, then `model.embed(texts)`."""

from pathlib import Path

from fastembed import TextEmbedding
from fastembed.common.model_description import ModelSource, PoolingType

NAME = "$name"
TextEmbedding.add_custom_model(
    model=NAME,
    # Every token has the pooled embedding.
    pooling=PoolingType.CLS,
    normalization=False,
    sources=ModelSource(url="https://localhost"),  # never asked: the files are beside this one
    dim=$size,
    model_file="model.onnx",
)
model = TextEmbedding(NAME, specific_model_path=str(Path(__file__).parent))
'''


def _run(package: Package, text: str) -> Mapping[str, FloatArray]:
    """The state of the first token."""
    encoding = transformers_tokenizer(package.directory).encode(text)
    return {"sentence_embedding": run_onnx(package.directory / "model.onnx", encoding)["last_hidden_state"][0, 0]}


TARGET = PackageTarget(
    name="fastembed",
    system="fastembed",
    source="fastembed/common/preprocessor_utils.py and text/custom_text_embedding.py, fastembed 0.9.1",
    tried=("fastembed 0.9.1",),
    write=with_graph({"embed.py": _SCRIPT}),
    run=_run,
    next_step="FOLDER/embed.py registers the model; TextEmbedding(...).embed(texts) gives the embeddings.",
    graph=GraphOptions(dtype="float32", outputs=Outputs.POOLED_TOKENS),
    takes=frozenset({"dtype", "name"}),
)
