"""LangChain4j's OnnxEmbeddingModel: a graph and a WordPiece tokenizer."""

from __future__ import annotations

from collections.abc import Mapping

from tokenizers import Tokenizer, models

from hdexport.package.files import with_graph, write_tokenizer
from hdexport.package.graph import GraphOptions, Outputs
from hdexport.package.readers import DJL_LONGEST, djl_tokenizer, run_onnx
from hdexport.package.target import Package, PackageTarget
from hdruntime.arrays import FloatArray
from hdruntime.bundle.reader import Bundle
from hdruntime.errors import InputError

_JAVA = """import dev.langchain4j.model.embedding.onnx.OnnxEmbeddingModel;
import dev.langchain4j.model.embedding.onnx.PoolingMode;

EmbeddingModel model = new OnnxEmbeddingModel("model.onnx", "tokenizer.json", PoolingMode.MEAN);
"""


def _check(bundle: Bundle) -> None:
    assert bundle.manifest.tokenizer is not None
    model = Tokenizer.from_file(str(bundle.file(bundle.manifest.tokenizer.file))).model
    if not isinstance(model, models.WordPiece):
        raise InputError(
            f"LangChain4j writes a text's tokens as a text again, which is right for WordPiece alone; this bundle's "
            f"tokenizer is {type(model).__name__}.",
            hint="Serve the bundle, and use LangChain4j's OpenAiEmbeddingModel: hdexport serve",
        )


def _run(package: Package, text: str) -> Mapping[str, FloatArray]:
    """One partition: a text of at most 512 tokens has at most 510 without the special ones."""
    tokenizer = djl_tokenizer(package.directory / "tokenizer.json")
    tokens = tokenizer.encode(text).tokens[1:-1]
    written = " ".join(tokens).replace(" ##", "").strip()
    if tokenizer.encode(written).tokens[1:-1] != tokens:
        written = "".join(tokens)
    states = run_onnx(package.directory / "model.onnx", tokenizer.encode(written))["last_hidden_state"]
    return {"sentence_embedding": states[0].mean(0)}


TARGET = PackageTarget(
    name="langchain4j",
    system="LangChain4j",
    source="OnnxBertBiEncoder.java, langchain4j 289c771a; HuggingFaceTokenizer.java, DJL 0.37",
    write=with_graph({"Embedding.java": _JAVA}, library_files=write_tokenizer),
    run=_run,
    next_step='new OnnxEmbeddingModel("model.onnx", "tokenizer.json", PoolingMode.MEAN)',
    graph=GraphOptions(dtype="float32", outputs=Outputs.POOLED_TOKENS, single_file=True),
    takes=frozenset({"dtype"}),
    longest=DJL_LONGEST,
    check=_check,
)
