"""One graph from strings to embeddings, with onnxruntime-extensions' tokenizers: Oracle AI Database and BigQuery."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from hdexport.package.files import write_text
from hdexport.package.graph import GraphOptions, Outputs, write_graph
from hdexport.package.target import Package, PackageTarget
from hdexport.package.tokenizer.check import KINDS, Difference, differences
from hdexport.package.tokenizer.graph import (
    DOMAIN,
    ML_DOMAIN,
    ML_OPSET,
    TokenizerGraph,
    read_tokenizer,
    tokenizer_graph,
    tokenizer_model,
)
from hdplugins.op_builder import OpBuilder
from hdruntime.arrays import FloatArray
from hdruntime.bundle.manifest import Role
from hdruntime.bundle.reader import Bundle
from hdruntime.errors import InputError, Setting
from hdruntime.optional import require

INPUT, OUTPUT = "input", "embedding"
"""Names that Oracle's LOAD_ONNX_MODEL takes by default."""

_ORACLE = """-- Oracle AI Database 26ai, 23ai: the directory object MODELS holds model.onnx.
BEGIN
    DBMS_VECTOR.LOAD_ONNX_MODEL(
        directory => 'MODELS',
        file_name => 'model.onnx',
        model_name => '$identifier',
        metadata => JSON('{"function": "embedding", "embeddingOutput": "embedding", "input": {"input": ["DATA"]}}')
    );
END;
/

-- A VECTOR($size, FLOAT32) of a text:
SELECT VECTOR_EMBEDDING($identifier USING 'a text' AS data) FROM dual;
"""
_BIGQUERY = """-- BigQuery: gsutil cp model.onnx gs://BUCKET/$name/; the names of the columns are those of the graph.
CREATE OR REPLACE MODEL `DATASET.$identifier`
    OPTIONS (MODEL_TYPE = 'ONNX', MODEL_PATH = 'gs://BUCKET/$name/model.onnx');

-- An ARRAY<FLOAT64> of $size numbers for each text:
SELECT * FROM ML.PREDICT(MODEL `DATASET.$identifier`, (SELECT text AS input, id FROM `DATASET.documents`));
"""
_NUL = "A text ends at its first NUL (U+0000): onnxruntime-extensions reads strings of C"


def _write(package: Package) -> tuple[str, ...]:
    bundle = package.bundle
    info = bundle.manifest.tokenizer
    assert info is not None
    for kind in package.options.accept_differences:
        if kind not in KINDS:
            raise InputError(parameter="accept_differences", value=kind, accepted=f"one of {', '.join(KINDS)}")
    tokenizer = read_tokenizer(bundle)
    graph = tokenizer_graph(tokenizer)
    options: dict[str, Any] = {
        "pad_id": info.pad_token_id,
        "truncation_side": info.truncation_side,
        "prompt": package.prompt,
    }
    notes = _compare_ids(package, graph, tokenizer, options) if package.options.check else ()
    write = functools.partial(graph.write, max_tokens=package.max_seq_length, **options)
    finish = functools.partial(_put_before, bundle=bundle, write=write)
    write_graph(bundle, package.directory / "model.onnx", package.graph, finish)
    identifier = "".join(letter if letter.isascii() and letter.isalnum() else "_" for letter in package.name)
    for name, template in (("oracle.sql", _ORACLE), ("bigquery.sql", _BIGQUERY)):
        write_text(
            package, name, template.replace("$identifier", identifier if identifier[0].isalpha() else f"m_{identifier}")
        )
    return (*notes, _NUL)


def _put_before(model: ir.Model, bundle: Bundle, write: Any) -> None:
    """Let a tokenizer's nodes feed the graph."""
    graph, numbers = model.graph, itertools.count()
    texts = ir.Value(name=INPUT, type=ir.TensorType(ir.DataType.STRING), shape=ir.Shape(["batch"]))
    op = OpBuilder.before(
        graph[0], name_value=lambda kind: f"tokenizer.{kind}.{next(numbers)}", opset=graph.opset_imports[""]
    )
    ids, mask = write(op, texts)
    for value in (*graph.initializers.values(), *(each for node in graph for each in node.outputs)):
        if value.name in (INPUT, OUTPUT):
            value.name = f"{value.name}.model"
    specs = {spec.name: spec for spec in bundle.manifest.inputs}
    for value in graph.inputs:
        spec = specs[value.name or ""]
        fed = {Role.IDS: ids, Role.MASK: mask}.get(spec.role)
        fed = op.Expand(0, op.Shape(ids)) if fed is None else fed
        if value.type is not None and value.dtype != ir.DataType.INT64:
            fed = op.Cast(fed, to=value.dtype)
        ir.convenience.replace_all_uses_with(value, fed)
    graph.inputs[:] = [texts]
    graph.outputs[0].name = OUTPUT
    graph.opset_imports.update({DOMAIN: 1, ML_DOMAIN: ML_OPSET})


def _compare_ids(
    package: Package, graph: TokenizerGraph, tokenizer: Any, options: Mapping[str, Any]
) -> tuple[str, ...]:
    """Reject a tokenizer whose ids differ on a kind of text that is not accepted."""
    accepted = set(package.options.accept_differences)
    limit = package.max_seq_length
    opset = package.graph.opset
    plain = {**options, "prompt": ""}
    whole = _ids_of(tokenizer_model(graph, opset=opset, max_tokens=2**31, **plain))
    cut = _ids_of(tokenizer_model(graph, opset=opset, max_tokens=limit, **plain))
    tokenizer.enable_truncation(limit, direction=options["truncation_side"])
    differing = differences(whole, cut, tokenizer, max_tokens=limit)
    rejected = [each for each in differing if each.kind not in accepted]
    if rejected:
        raise InputError(
            "The ids of onnxruntime-extensions differ from the bundle's tokenizer: "
            f"{'; '.join(map(_described, rejected))}.",
            hint=(
                "Accept these kinds of texts (",
                Setting("accept_differences", ",".join(each.kind for each in rejected)),
                "), or tokenize outside of the graph: ",
                Setting("target", "onnx"),
            ),
        )
    return tuple(f"Ids differ, as accepted, for texts of the kind {_described(each)}" for each in differing)


def _described(difference: Difference) -> str:
    actual, expected = (" ".join(tokens[:12]) for tokens in (difference.actual, difference.expected))
    return (
        f"{difference.kind} ({difference.texts} of {difference.compared} texts, such as {difference.text[:40]!a}: "
        f"{actual} instead of {expected})"
    )


def _ids_of(model: ir.Model) -> Any:
    session = _session(ir.to_proto(model).SerializeToString())

    def ids(texts: Sequence[str]) -> list[list[int]]:
        rows, mask = session.run(None, {INPUT: np.array(texts, dtype=object)})
        return [row[kept == 1].tolist() for row, kept in zip(rows, mask, strict=True)]

    return ids


def _session(model: bytes | str) -> Any:
    onnxruntime = require("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(require("onnxruntime_extensions").get_library_path())
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


@functools.lru_cache(maxsize=1)
def _loaded(path: Path, modified: int) -> Any:
    return _session(str(path))


def _run(package: Package, text: str) -> Mapping[str, FloatArray]:
    """The graph's own output for one text."""
    path = package.directory / "model.onnx"
    (embedding,) = _loaded(path, path.stat().st_mtime_ns).run([OUTPUT], {INPUT: np.array([text], dtype=object)})
    return {"sentence_embedding": embedding}


TARGET = PackageTarget(
    name="text-in",
    system="Oracle AI Database, BigQuery, and ONNX Runtime with onnxruntime-extensions",
    source="https://docs.oracle.com/en/database/oracle/oracle-database/26/vecse/load_onnx_model-procedure.html",
    tried=("onnxruntime 1.31.1 with onnxruntime-extensions 0.15.2", "1.20.0 with 0.12.0", "1.15.1 with 0.9.0"),
    write=_write,
    run=_run,
    next_step="FOLDER/oracle.sql or FOLDER/bigquery.sql, or register_custom_ops_library and load FOLDER/model.onnx",
    # BigQuery has ONNX Runtime 1.12, which reads opset 17 and IR version 8.
    graph=GraphOptions(opset=17, ir_version=8, dtype="float32", outputs=Outputs.POOLED, single_file=True),
    takes=frozenset({"opset", "ir_version", "dtype", "single_file", "name", "prompt_name", "accept_differences"}),
    prompts=True,
)
