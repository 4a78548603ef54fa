"""Spring AI's TransformersEmbeddingModel: a file of ONNX that loads from bytes, its tokenizer, and properties."""

from __future__ import annotations

from collections.abc import Mapping

from hdexport.package.files import write_tokenizer
from hdexport.package.graph import GraphOptions, Outputs, write_graph
from hdexport.package.readers import djl_mean
from hdexport.package.target import Package, PackageTarget
from hdruntime.arrays import FloatArray

_PROPERTIES = """# Spring AI's embedding model; the paths are relative to the classpath.
spring.ai.model.embedding=transformers
spring.ai.embedding.transformer.onnx.model-uri=classpath:/{name}/model.onnx
spring.ai.embedding.transformer.tokenizer.uri=classpath:/{name}/tokenizer.json
# The library truncates to 512 tokens unless both say otherwise.
spring.ai.embedding.transformer.tokenizer.options.maxLength={length}
spring.ai.embedding.transformer.tokenizer.options.modelMaxLength={length}
"""


def _write(package: Package) -> None:
    write_graph(package.bundle, package.directory / "model.onnx", package.graph)
    write_tokenizer(package)
    (package.directory / "application.properties").write_text(
        _PROPERTIES.format(name=package.name, length=package.max_seq_length), encoding="utf-8"
    )


def _run(package: Package, text: str) -> Mapping[str, FloatArray]:
    """A masked mean of ``last_hidden_state``, which Spring AI never normalizes."""
    return djl_mean(package, text, model_max_length=package.max_seq_length)


TARGET = PackageTarget(
    name="spring-ai",
    system="Spring AI",
    source="TransformersEmbeddingModel.java, Spring AI 2.0.1; HuggingFaceTokenizer.java, DJL 0.37",
    write=_write,
    run=_run,
    next_step="Put the folder on the classpath, and application.properties' lines into yours.",
    # Any pooling is right under the mean of the same vector for every token.
    graph=GraphOptions(dtype="float32", outputs=Outputs.POOLED_TOKENS, single_file=True),
    takes=frozenset({"dtype"}),
)
