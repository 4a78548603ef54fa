"""OpenSearch's ML Commons: a zip with one graph and its tokenizer, and the body that registers it."""

from __future__ import annotations

import functools
import hashlib
import zipfile

from hdexport.package.files import write_json, write_tokenizer
from hdexport.package.graph import GraphOptions, Outputs, write_graph
from hdexport.package.prompts import prompts_of_package
from hdexport.package.readers import DJL_LONGEST, djl_mean
from hdexport.package.target import Package, PackageTarget

_MODEL_TYPE = "bert"
"""The type for which ML Commons feeds three inputs; DJL demands exactly those of the graph."""


def _write(package: Package) -> None:
    write_graph(package.bundle, package.directory / "model.onnx", package.graph)
    write_tokenizer(package)
    archive = package.directory / f"{package.name}.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for name in ("model.onnx", "tokenizer.json"):
            file.write(package.directory / name, name)
    query, document = prompts_of_package(package)
    # With a prefix, requests must say whether their texts are queries or passages.
    prefixes = {"query_prefix": query, "passage_prefix": document} if query or document else {}
    write_json(
        package.directory / "register.json",
        {
            "name": package.name,
            "version": "1.0.0",
            "model_format": "ONNX",
            "function_name": "TEXT_EMBEDDING",
            "model_content_size_in_bytes": archive.stat().st_size,
            "model_content_hash_value": hashlib.sha256(archive.read_bytes()).hexdigest(),
            "model_config": {
                "model_type": _MODEL_TYPE,
                "embedding_dimension": package.hidden_size,
                "framework_type": "sentence_transformers",
                "pooling_mode": "MEAN",
                "normalize_result": "false",
                **prefixes,
            },
            "url": f"https://HOST/{archive.name}",
        },
    )


TARGET = PackageTarget(
    name="opensearch",
    system="OpenSearch",
    source="ONNXSentenceTransformerTextEmbeddingTranslator.java, ml-commons 17db055f, with ONNX Runtime 1.16.3 and "
    "DJL 0.31.1",
    write=_write,
    run=functools.partial(djl_mean, model_max_length=DJL_LONGEST),
    prompts=True,
    next_step="Put the .zip where the cluster reaches it, its address into register.json, and: POST "
    "/_plugins/_ml/models/_register",
    graph=GraphOptions(dtype="float32", outputs=Outputs.POOLED_TOKENS, single_file=True, token_type_ids=True),
    takes=frozenset({"dtype", "name"}),
    longest=DJL_LONGEST,
)
