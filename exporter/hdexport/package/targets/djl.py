"""DJL's text embedding translator: a folder with the graph, the tokenizer and serving.properties."""

from __future__ import annotations

from hdexport.package.files import write_library_files
from hdexport.package.graph import GraphOptions, Outputs, write_graph
from hdexport.package.readers import djl_mean
from hdexport.package.target import Package, PackageTarget

_PROPERTIES = """engine=OnnxRuntime
option.modelName=model
option.mapLocation=true
translatorFactory=ai.djl.huggingface.translator.TextEmbeddingTranslatorFactory
includeTokenTypes={token_types}
pooling=mean
normalize=false
padding=true
truncation=true
maxLength={length}
modelMaxLength={length}
"""


def _write(package: Package) -> None:
    write_graph(package.bundle, package.directory / "model.onnx", package.graph)
    write_library_files(package)
    token_types = any(spec.name == "token_type_ids" for spec in package.bundle.manifest.inputs)
    (package.directory / "serving.properties").write_text(
        _PROPERTIES.format(length=package.max_seq_length, token_types=str(token_types).lower()), encoding="utf-8"
    )


TARGET = PackageTarget(
    name="djl",
    system="DJL and DJL Serving",
    source="HuggingFaceTokenizer.java and TextEmbeddingTranslator.java, DJL 0.37",
    write=_write,
    run=djl_mean,
    next_step="Criteria.builder().optModelPath(Paths.get(FOLDER)), or serving.properties in DJL Serving's model store.",
    graph=GraphOptions(dtype="float32", outputs=Outputs.POOLED_TOKENS),
    takes=frozenset({"dtype"}),
)
