"""Batch jobs run in this process, on tiny bundles whose answers are easy to tell."""

from __future__ import annotations

import dataclasses
import json
import random
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet
from onnx import TensorProto, helper, numpy_helper

import hdruntime
from hdexport.support.bundle_writer import seal
from hdruntime.bundle.manifest import TensorSpec
from hdruntime.bundle.reader import Bundle, open_bundle
from hdruntime.jobs import JobOptions, plan_job, run_job
from hdruntime.jobs.progress import JobProgress, RowCounts
from hdruntime.jobs.row_inference import LocalPool
from hdruntime.jobs.rows import Row
from hdruntime.jobs.shards import Shard, ShardResult

WORDS = ("long", "documents", "are", "read", "whole", ".")
VOCABULARY = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "long", "documents", "are", "read", "whole", "nan", ".")
"""Vocabulary of the tiny bundles, in the order of the ids."""

MAX_WORDS = 14
"""The tiny bundles accept 16 tokens, of which two are special."""


def run(
    bundle: Path,
    inputs: str | Path,
    output: str | Path,
    *,
    on_progress: Callable[[JobProgress], None] | None = None,
    **options: object,
) -> JobProgress:
    opened = open_bundle(bundle)
    job = plan_job(opened, [inputs], output, options=JobOptions(**options))  # type: ignore[arg-type]
    with hdruntime.load(opened) as session:
        return run_job(job, LocalPool(session, job.task, options=job.options), on_progress=on_progress)


class WordPool:
    """Does shards without a session: the vector of a text is made of its checksum, "nan" is a bad text.

    For tests that do not depend on the process that runs the rows.
    """

    shard_characters = 2**17

    def __init__(self, *, computes_beside: bool = False) -> None:
        self.computes_beside = computes_beside

    def map(self, shards: Iterator[Shard]) -> Generator[tuple[Shard, ShardResult], None, None]:
        for shard in shards:
            results = [_result(row) for row in shard.rows]
            errors = [result for result in results if result["error"] is not None]
            counts = RowCounts(
                rows=len(results),
                tokens=sum(len(row.text.split()) for row in shard.rows),
                errors={"input": len(errors)} if errors else {},
                first_error=str(errors[0]["error"]) if errors else None,
                dropped_columns=sorted({name for row in shard.rows for name in row.dropped}),
            )
            yield shard, ShardResult(results=results, counts=counts)


def _result(row: Row) -> dict[str, object]:
    error = "a bad text" if row.text == "nan" else row.error
    vector = np.full(4, zlib.crc32(row.text.encode()) % 1000, np.float32)
    values = {"embedding": None if error else vector, "tokens": len(row.text.split()), "error": error}
    return {"id": row.id, **row.kept, **values}


def run_words(
    bundle: Bundle,
    inputs: Sequence[Path],
    output: Path,
    *,
    on_progress: Callable[[JobProgress], None] | None = None,
    computes_beside: bool = False,
    **options: object,
) -> JobProgress:
    """Run a job with `WordPool`; the bundle must be one of vectors of four dimensions."""
    job = plan_job(bundle, inputs, output, options=JobOptions(**options))  # type: ignore[arg-type]
    return run_job(job, WordPool(computes_beside=computes_beside), on_progress=on_progress)


def write_rows(path: Path, texts: Sequence[object]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        rows: list[dict[str, Any]] = pa.parquet.read_table(path).to_pylist()
        return rows
    return [json.loads(line) for line in path.read_text().splitlines()]


def content_of(output: Path) -> str:
    """The bytes of a file, or the names and bytes of a directory's files, without a space."""
    if output.is_dir():
        return ",".join(f"{path.name}={path.read_bytes().hex()}" for path in sorted(output.iterdir()))
    return output.read_bytes().hex()


def results(bundle: Path, texts: Sequence[Any], *, ending: str = ".jsonl", **options: object) -> list[dict[str, Any]]:
    """The output of a job over texts."""
    output = bundle.with_name(f"out{ending}")
    run(bundle, write_rows(bundle.with_name("in.jsonl"), texts), output, **options)
    return read(output)


def stop_at(rows: int) -> Callable[[JobProgress], None]:
    """Stops a job when so many rows are done."""

    def stop(progress: JobProgress) -> None:
        if progress.rows >= rows:
            raise KeyboardInterrupt

    return stop


def random_texts(count: int) -> list[str]:
    chosen = random.Random(count)
    return [" ".join(chosen.choices(WORDS, k=chosen.randint(0, MAX_WORDS))) for _ in range(count)]


def embeddings(bundle: Path, texts: list[str]) -> np.ndarray:
    """One text at a time, so that nothing of batching is in the expected values."""
    with hdruntime.load(bundle) as session:
        return np.concatenate([session.embed([text]) for text in texts])


def gather_bundle(
    bundle: Path,
    task: str,
    tables: dict[str, np.ndarray],
    *,
    labels: tuple[str, ...] = (),
    config: dict[str, object] | None = None,
    mask_token_id: int | None = None,
) -> Path:
    """Turn a tiny bundle into one whose outputs are rows of tables, looked up by token id.

    A table of shape [ids] gives an output [batch, tokens], one of [ids, n] gives [batch, tokens, n]; for
    text-classification the output is the row of the second token, the text's first.
    """
    of_second_token = task == "text-classification"
    nodes = []
    outputs = []
    constants = [numpy_helper.from_array(np.array(1), "second")]
    for name, table in tables.items():
        shape = ["batch", *table.shape[1:]] if of_second_token else ["batch", "tokens", *table.shape[1:]]
        looked_up = f"{name}_of_tokens" if of_second_token else name
        constants.append(numpy_helper.from_array(table.astype(np.float32), f"{name}_table"))
        nodes.append(helper.make_node("Gather", [f"{name}_table", "input_ids"], [looked_up]))
        if of_second_token:
            nodes.append(helper.make_node("Gather", [looked_up, "second"], [name], axis=1))
        outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "tokens"])
        for name in ("input_ids", "attention_mask")
    ]
    graph = helper.make_graph(nodes, "gather", inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    manifest = open_bundle(bundle).manifest
    assert manifest.tokenizer is not None
    onnx.save(model, bundle / "model.onnx")
    (bundle / "config.json").write_text(json.dumps(config or {}))
    specs = [
        TensorSpec(
            name=output.name,
            dtype="float32",
            shape=tuple(size.dim_param or size.dim_value for size in output.type.tensor_type.shape.dim),
        )
        for output in outputs
    ]
    changed = dataclasses.replace(
        manifest,
        task=task,
        outputs=tuple(specs),
        labels=labels,
        tokenizer=dataclasses.replace(manifest.tokenizer, mask_token_id=mask_token_id),
    )
    seal(bundle, changed)
    return bundle


def forget_unknown_token(bundle: Path, *, model: str = "WordLevel") -> None:
    """Take [UNK] out of a tiny bundle's vocabulary, as careless training leaves a tokenizer."""
    manifest = open_bundle(bundle).manifest
    path = bundle / "tokenizer.json"
    settings = json.loads(path.read_text())
    settings["model"]["vocab"].pop("[UNK]")
    settings["model"]["type"] = model
    if model == "WordPiece":
        settings["model"] |= {"continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    path.write_text(json.dumps(settings))
    seal(bundle, manifest)


def left_in(directory: Path) -> list[str]:
    """Names in a directory, without state folders that are there for a finished job."""
    return sorted(path.name for path in directory.iterdir() if not _is_record(path))


def _is_record(path: Path) -> bool:
    if path.suffix != ".job" or not {file.name for file in path.iterdir()} <= {"job.json", "manifest.json", "lock"}:
        return False
    manifest = path / "manifest.json"
    return not manifest.exists() or bool(json.loads(manifest.read_text())["is_done"])
