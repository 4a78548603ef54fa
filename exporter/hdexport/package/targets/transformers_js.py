"""Transformers.js in Node and in browsers: ``onnx/model.onnx`` beside the model's configuration."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

from hdexport.package.files import write_json, write_library_files
from hdexport.package.graph import Dtype, write_graph
from hdexport.package.readers import run_onnx, transformers_tokenizer
from hdexport.package.target import Package, PackageTarget
from hdruntime.arrays import FloatArray
from hdruntime.bundle.manifest import Task

_FOLDER = "onnx"

_SUFFIXES: Mapping[Dtype, str] = {"float32": "", "float16": "_fp16", "int8": "_quantized"}
_NAMES: Mapping[Dtype, str] = {"float32": "fp32", "float16": "fp16", "int8": "q8"}
"""The library's names of dtypes, and the suffixes of their files: src/utils/dtypes.js, 4.3."""


def _write(package: Package) -> None:
    write_library_files(package)
    folder = package.directory / _FOLDER
    folder.mkdir()
    outside = {}
    for dtype in package.dtypes:
        file = _file(dtype)
        # The library asks for weights by this name.
        options = dataclasses.replace(package.of(dtype).graph, weights_file=f"{file}_data")
        write_graph(package.bundle, folder / file, options)
        if (folder / options.weights_file).is_file():
            outside[file] = 1
    settings: dict[str, object] = {}
    if outside:
        settings["use_external_data_format"] = outside
    if package.options.dtype:
        # By default, transformers.js loads q8 in WebAssembly and fp32 elsewhere.
        settings["dtype"] = _NAMES[package.options.dtype]
    if settings:
        config = json.loads((package.directory / "config.json").read_text(encoding="utf-8"))
        write_json(package.directory / "config.json", config | {"transformers.js_config": settings})


def _file(dtype: Dtype) -> str:
    return f"model{_SUFFIXES[dtype]}.onnx"


def _run(package: Package, text: str, pair: str | None = None) -> Mapping[str, FloatArray]:
    """As transformers.js with ``truncation: true``: by model_max_length of tokenizer_config.json alone."""
    assert package.graph.dtype is not None
    encoding = transformers_tokenizer(package.directory).encode(text, pair)
    return run_onnx(package.directory / _FOLDER / _file(package.graph.dtype), encoding)


TARGET = PackageTarget(
    name="transformers.js",
    system="Transformers.js",
    source="packages/transformers/src/tokenization_utils.js and src/utils/model-loader.js, 4.3",
    tried=("@huggingface/transformers 4.3.2 in Node 20 and in Chromium 156: fp32, fp16, q8",),
    write=_write,
    run=_run,
    dtypes=lambda manifest: ("float32", *(("float16",) if manifest.dtype == "float16" else ()), "int8"),
    takes=frozenset({"dtype", "single_file"}),
    next_step="pipeline('feature-extraction', FOLDER, {dtype: 'fp32'}), or the pipeline of the bundle's task: "
    "docs/browser.md",
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
