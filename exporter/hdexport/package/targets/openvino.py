"""OpenVINO's IR with its tokenizer as a second model: openvino-genai's pipelines, and OpenVINO Model Server."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hdexport.package.files import write_json, write_library_files
from hdexport.package.graph import GraphOptions, Outputs, write_graph
from hdexport.package.target import EMBEDDERS, Package, PackageTarget, is_reranker
from hdruntime.arrays import FloatArray
from hdruntime.bundle.manifest import Task
from hdruntime.errors import InputError
from hdruntime.optional import require

_GRAPH = """input_stream: "REQUEST_PAYLOAD:input"
output_stream: "RESPONSE_PAYLOAD:output"
node {{
  name: "{node}"
  calculator: "{calculator}"
  input_side_packet: "{packet}:node"
  input_stream: "REQUEST_PAYLOAD:input"
  output_stream: "RESPONSE_PAYLOAD:output"
  node_options: {{
    [type.googleapis.com/mediapipe.{options}]: {{
      models_path: "./",
      target_device: "CPU",
      plugin_config: '{{"INFERENCE_PRECISION_HINT": "f32"}}'{more}
    }}
  }}
}}
"""


def _write(package: Package) -> None:
    openvino = require("openvino")
    tokenizers = require("openvino_tokenizers")
    from transformers import AutoTokenizer

    directory, is_embedder = package.directory, package.bundle.manifest.task in EMBEDDERS
    write_library_files(package)
    graph = dataclasses.replace(
        package.graph, outputs=Outputs.POOLED_TOKENS if is_embedder else Outputs.BUNDLE, weights_file="weights"
    )
    source = directory / "source.onnx"
    write_graph(package.bundle, source, graph)
    model = openvino.convert_model(str(source))
    openvino.save_model(
        model, directory / "openvino_model.xml", compress_to_fp16=package.bundle.manifest.dtype == "float16"
    )
    inputs = [port.any_name for port in model.inputs]
    del model
    for file in (source, directory / "weights"):
        file.unlink(missing_ok=True)
    tokenizer = tokenizers.convert_tokenizer(
        AutoTokenizer.from_pretrained(directory, local_files_only=True),
        with_detokenizer=False,
        truncation=True,
        max_length=package.max_seq_length,
        number_of_inputs=2 if is_reranker(package.bundle.manifest) else 1,
    )
    made = {name for port in tokenizer.outputs for name in port.names}
    if missing := [name for name in inputs if name not in made]:
        raise InputError(
            f"openvino_tokenizers makes a tokenizer without {', '.join(missing)}, an input of this bundle's graph.",
            hint="Choose another target, or serve the bundle: hdexport serve",
        )
    openvino.save_model(tokenizer, directory / "openvino_tokenizer.xml")
    _write_server_files(package, is_embedder)


def _write_server_files(package: Package, is_embedder: bool) -> None:
    if is_embedder:
        pooling = ",\n      normalize_embeddings: true,\n      pooling: CLS"
        names = {
            "node": "EmbeddingsExecutor",
            "calculator": "EmbeddingsCalculatorOV",
            "packet": "EMBEDDINGS_NODE_RESOURCES",
            "options": "EmbeddingsCalculatorOVOptions",
        }
    else:
        pooling = ""
        names = {
            "node": "RerankExecutor",
            "calculator": "RerankCalculatorOV",
            "packet": "RERANK_NODE_RESOURCES",
            "options": "RerankCalculatorOVOptions",
        }
    (package.directory / "graph.pbtxt").write_text(_GRAPH.format(**names, more=pooling), encoding="utf-8")
    write_json(
        package.directory / "config.json.model_server",
        {"model_config_list": [], "mediapipe_config_list": [{"name": package.name, "base_path": "."}]},
    )


def _run(package: Package, *texts: str) -> Mapping[str, FloatArray]:
    """What the pipeline computes: its tokenizer's model, the model, and the state of the first token, normalized."""
    tokenizer, model = _compiled(package.directory)
    inputs = tokenizer({number: [text] for number, text in enumerate(texts)})
    feeds = {port.any_name: inputs[port.any_name] for port in model.inputs}
    result = model(feeds)
    outputs = {name: result[port] for port in model.outputs for name in port.names}
    if package.bundle.manifest.task in EMBEDDERS:
        return {"sentence_embedding": np.asarray(outputs["last_hidden_state"])[0, 0]}
    return {"logits": np.asarray(outputs["logits"])}


@functools.lru_cache(maxsize=1)
def _compiled(directory: Path) -> tuple[Any, Any]:
    require("openvino_tokenizers")  # registers its operators
    core = require("openvino").Core()
    return (
        core.compile_model(directory / "openvino_tokenizer.xml", "CPU"),
        core.compile_model(directory / "openvino_model.xml", "CPU", {"INFERENCE_PRECISION_HINT": "f32"}),
    )


TARGET = PackageTarget(
    name="openvino",
    system="OpenVINO GenAI and Model Server",
    source="src/cpp/src/rag/text_embedding_pipeline.cpp, openvino.genai 2026.4; demos/embeddings/README.md, "
    "model_server 2026",
    tried=("openvino-genai 2026.4.1 (embeddings and reranking)",),
    write=_write,
    run=_run,
    next_step='openvino_genai.TextEmbeddingPipeline(FOLDER, "CPU") or TextRerankPipeline, or FOLDER in OpenVINO Model '
    "Server",
    tasks=EMBEDDERS | {Task.TEXT_CLASSIFICATION},
    graph=GraphOptions(opset=20, ir_version=10, dtype="float32"),
    takes=frozenset({"name"}),
)
