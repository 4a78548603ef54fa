"""Elasticsearch's inference API, with `hdexport serve` as the service: Elasticsearch runs no ONNX of others."""

from __future__ import annotations

from hdexport.package.files import write_bundle, write_json
from hdexport.package.target import Package, PackageTarget


def _write(package: Package) -> None:
    write_bundle(package, package.directory / "bundle")
    write_json(
        package.directory / "inference.json",
        {
            "service": "openai",
            "service_settings": {
                "api_key": "API_KEY",
                "model_id": package.name,
                "url": "https://HOST/v1/embeddings",
                "dimensions": package.hidden_size,
                "similarity": "cosine",
                "max_input_tokens": package.max_seq_length,
            },
        },
    )


TARGET = PackageTarget(
    name="elasticsearch",
    system="Elasticsearch",
    source="https://www.elastic.co/docs/api/doc/elasticsearch/operation/operation-inference-put-openai",
    write=_write,
    next_step="hdexport serve FOLDER/bundle behind https, then: PUT _inference/text_embedding/ID with inference.json",
    takes=frozenset({"name"}),
)
