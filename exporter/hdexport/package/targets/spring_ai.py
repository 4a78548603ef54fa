"""Spring AI's TransformersEmbeddingModel: a file of ONNX that loads from bytes, its tokenizer, and properties."""

from __future__ import annotations

from hdexport.package.files import with_graph, write_tokenizer
from hdexport.package.graph import GraphOptions, Outputs
from hdexport.package.readers import djl_mean
from hdexport.package.target import PackageTarget

_PROPERTIES = """# Spring AI's embedding model; the paths are relative to the classpath.
spring.ai.model.embedding=transformers
spring.ai.embedding.transformer.onnx.model-uri=classpath:/$name/model.onnx
spring.ai.embedding.transformer.tokenizer.uri=classpath:/$name/tokenizer.json
# The library truncates to 512 tokens unless both say otherwise.
spring.ai.embedding.transformer.tokenizer.options.maxLength=$length
spring.ai.embedding.transformer.tokenizer.options.modelMaxLength=$length
"""


TARGET = PackageTarget(
    name="spring-ai",
    system="Spring AI",
    source="TransformersEmbeddingModel.java, Spring AI 2.0.1; HuggingFaceTokenizer.java, DJL 0.37",
    write=with_graph({"application.properties": _PROPERTIES}, library_files=write_tokenizer),
    run=djl_mean,
    next_step="Put the folder on the classpath, and application.properties' lines into yours.",
    # Any pooling is right under the mean of the same vector for every token.
    graph=GraphOptions(dtype="float32", outputs=Outputs.POOLED_TOKENS, single_file=True),
    takes=frozenset({"dtype"}),
)
