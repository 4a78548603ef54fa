"""Transformers.js in Node and in browsers: ``onnx/model.onnx`` beside the model's configuration."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from hdexport.package.files import write_json, write_library_files
from hdexport.package.graph import write_graph
from hdexport.package.readers import run_onnx, transformers_tokenizer
from hdexport.package.target import Package, PackageTarget
from hdruntime.bundle.manifest import Task

if TYPE_CHECKING:
    from hdruntime.arrays import FloatArray

_FOLDER = "onnx"


def _write(package: Package) -> None:
    write_library_files(package)
    folder = package.directory / _FOLDER
    folder.mkdir()
    forms: dict[str, Literal["float32", "float16"]] = {"model": "float32"}
    if package.bundle.manifest.dtype == "float16":
        forms["model_fp16"] = "float16"
    for name, dtype in forms.items():
        # The library asks for weights by this name.
        options = dataclasses.replace(package.graph, dtype=dtype, weights_file=f"{name}.onnx_data")
        write_graph(package.bundle, folder / f"{name}.onnx", options)
    outside = {f"{name}.onnx": 1 for name in forms if (folder / f"{name}.onnx_data").is_file()}
    if outside:
        config = json.loads((package.directory / "config.json").read_text(encoding="utf-8"))
        settings = {"transformers.js_config": {"use_external_data_format": outside}}
        write_json(package.directory / "config.json", config | settings)


def _run(package: Package, text: str, pair: str | None = None) -> Mapping[str, FloatArray]:
    """``truncation: true`` of the library: model_max_length of tokenizer_config.json; tokenizer.json's is not read."""
    encoding = transformers_tokenizer(package.directory).encode(text, pair)
    return run_onnx(package.directory / _FOLDER / "model.onnx", encoding)


TARGET = PackageTarget(
    name="transformers.js",
    system="Transformers.js",
    source="packages/transformers/src/tokenization_utils.js and src/utils/model-loader.js, 4.3",
    tried=("@huggingface/transformers 4.3.2 in Node 20", "and in Chromium"),
    write=_write,
    run=_run,
    next_step="pipeline('feature-extraction', FOLDER, {dtype: 'fp32'}), with pooling 'mean' or 'cls' as in 1_Pooling.",
    tasks=frozenset(
        {
            Task.SENTENCE_SIMILARITY,
            Task.FEATURE_EXTRACTION,
            Task.TEXT_CLASSIFICATION,
            Task.TOKEN_CLASSIFICATION,
            Task.FILL_MASK,
            Task.QUESTION_ANSWERING,
        }
    ),
)
