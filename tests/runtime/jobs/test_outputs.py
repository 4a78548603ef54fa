"""Kept columns, metadata, converted vectors, and matrices."""

from __future__ import annotations

import dataclasses
import datetime
import json
import pickle
import uuid
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet
import pytest

from hdexport.support.bundle_writer import seal
from hdruntime.bundle.identity import identity_of_bundle
from hdruntime.bundle.reader import open_bundle
from hdruntime.bundle.sentence_settings import SentenceSettings
from hdruntime.errors import InputError, OutputExistsError
from hdruntime.jobs import JobOptions, VectorOptions, json_cells, plan_job, run_job, writers
from hdruntime.jobs.arrow_columns import array_of_cells
from hdruntime.jobs.progress import JobProgress
from hdruntime.jobs.rows import Columns
from hdruntime.jobs.shards import Shard, ShardResult
from hdruntime.jobs.writers import ResultFormat
from hdruntime.tasks import text_inference
from hdruntime.text.embeddings import EmbeddingPrecision, normalized, quantized
from hdruntime.text.encoding import Overflow
from support.comparators import named_case
from support.job_runs import (
    VOCABULARY,
    WordPool,
    embeddings,
    gather_bundle,
    left_in,
    random_texts,
    read,
    run,
    run_words,
    write_rows,
)

BundleMaker = Callable[..., Path]


def write(path: Path, *rows: str) -> Path:
    path.write_text("".join(f"{row}\n" for row in rows))
    return path


KEPT = {
    "numbers": (["5", "2.5", "NaN"], [5, 2.5, None], pa.float64()),
    "booleans": (["true", "false", "null"], [True, False, None], pa.bool_()),
    "large integers": (["5", "36893488147419103232", "null"], [5, 2**65, None], pa.string()),
    "several kinds": (['"a"', '{"b": [1, "ü"]}', "3"], ["a", {"b": [1, "ü"]}, 3], pa.string()),
    "nothing": (["null", "null", "null"], [None, None, None], pa.string()),
}


@pytest.mark.parametrize("name", KEPT)
def test_kept_columns_of_json_have_the_type_of_all_their_values(bundle_path: Path, tmp_path: Path, name: str) -> None:
    written, values, kind = KEPT[name]
    rows = write(tmp_path / "in.jsonl", *(f'{{"text": "long", "x": {value}, "y": 1}}' for value in written))
    columns = Columns(keep=("x",))
    run(bundle_path, rows, tmp_path / "out.jsonl", columns=columns)
    assert [row["x"] for row in read(tmp_path / "out.jsonl")] == values
    run(bundle_path, rows, tmp_path / "out.parquet", columns=columns)
    table = pa.parquet.read_table(tmp_path / "out.parquet")
    assert table.column_names == ["id", "x", "embedding", "tokens", "error"]
    assert table.schema.field("x").type == kind
    found = table.column("x").to_pylist()
    if kind == pa.string():
        found = [value if value in values else json.loads(value) for value in found]
    assert [None if value != value else value for value in found] == values


def test_kept_columns_of_parquet_keep_their_types(bundle_path: Path, tmp_path: Path) -> None:
    nanoseconds = pa.scalar(1, pa.timestamp("ns"))
    table = pa.table(
        {
            "text": ["long", None],
            "time": pa.array([nanoseconds, None], pa.timestamp("ns")),
            "day": [datetime.date(2024, 2, 29), None],
            "raw": [b"\xff", None],
            "tags": [["a"], []],
            "nested": [{"a": 1}, None],
            "class": pa.array(["x", "y"]).dictionary_encode(),
            "": pa.array([1, 2], pa.int8()),
        }
    )
    pa.parquet.write_table(table, tmp_path / "in.parquet")
    columns = Columns(keep=None)
    named_twice = Columns(keep=(*table.column_names, "day"))
    run(bundle_path, tmp_path / "in.parquet", tmp_path / "out.parquet", columns=named_twice)
    kept = pa.parquet.read_table(tmp_path / "out.parquet").select(table.column_names)
    decoded = table.set_column(6, "class", table.column("class").cast(pa.string()))
    assert kept.equals(decoded.cast(kept.schema))
    assert [field.type for field in kept.schema] == [field.type for field in decoded.schema]
    run(bundle_path, tmp_path / "in.parquet", tmp_path / "out.jsonl", columns=columns)
    first, second = read(tmp_path / "out.jsonl")
    assert (first["day"], first["raw"], first["nested"], first["class"]) == ("2024-02-29", "/w==", {"a": 1}, "x")
    assert str(first["time"]).startswith("1970-01-01 00:00:00.000000001")
    assert (second["time"], second[""], second["error"] is None) == (None, 2, False)


UUIDS = [uuid.UUID(int=number) for number in (1, 2)]
OF_UUIDS = pa.array([each.bytes for each in UUIDS], pa.uuid())
IDS = {
    "UUIDs": (OF_UUIDS, [str(each) for each in UUIDS]),
    "decimals": (pa.array([Decimal("1.50"), Decimal("-2.00")]), ["1.50", "-2.00"]),
    "numbers": (pa.array([8.0, 0.5]), [8.0, 0.5]),
    "large integers": (pa.array([2**63 + 1, 7], pa.uint64()), [2**63 + 1, 7]),
    "booleans": (pa.array([True, False]), [True, False]),
    "bytes": (pa.array([b"\xff", b""]), ["/w==", ""]),
    "bytes of one size": (pa.array([b"ab", b"\x00\x01"], pa.binary(2)), ["YWI=", "AAE="]),
    "days": (pa.array([datetime.date(2024, 2, 29), datetime.date.min]), ["2024-02-29", "0001-01-01"]),
    "moments": (
        pa.array([datetime.datetime(2024, 2, 29, 1, 2), datetime.datetime.min]),
        ["2024-02-29 01:02:00", "0001-01-01 00:00:00"],
    ),
    "nanoseconds": (pa.array([1, 10**9], pa.time64("ns")), ["00:00:00.000000001", "00:00:01.000000000"]),
    "lists": (pa.array([[1, 2], []]), [[1, 2], []]),
    "lists of UUIDs": (pa.ListArray.from_arrays([0, 1, 2], OF_UUIDS), [[str(each)] for each in UUIDS]),
    "structs": (
        pa.array([{"a": 1, "b": ["x"]}, {"a": None, "b": None}]),
        [{"a": 1, "b": ["x"]}, {"a": None, "b": None}],
    ),
    "maps": (pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int8())), [[["a", 1]], []]),
    "vectors": (pa.array([[[1, 2]], []], pa.list_(pa.list_(pa.int8(), 2))), [[[1, 2]], []]),
    "tensors": (pa.FixedShapeTensorArray.from_numpy_ndarray(np.eye(2, dtype=np.float32)), [[1.0, 0.0], [0.0, 1.0]]),
}
"""Kind -> the column in Parquet, and its values in JSON Lines."""


class SendingPool(WordPool):
    """Sends shards and results through pickle, as Ray does."""

    def map(self, shards: Iterator[Shard]) -> Iterator[tuple[Shard, ShardResult]]:
        for shard in shards:
            for _, result in super().map(iter([pickle.loads(pickle.dumps(shard))])):
                yield shard, pickle.loads(pickle.dumps(result))


def test_an_id_of_any_type_is_kept_in_every_output_however_it_is_named(bundle_path: Path, tmp_path: Path) -> None:
    bundle, inputs = open_bundle(bundle_path), [tmp_path / "in.parquet"]

    def ids_in(output: str, columns: Columns) -> Any:
        options = JobOptions(columns=columns, force=True)
        run_job(plan_job(bundle, inputs, tmp_path / output, options=options), SendingPool())
        return np.load(tmp_path / output)["id"] if output.endswith(".npz") else tmp_path / output

    for kind, (ids, values) in IDS.items():
        with named_case(kind):
            pa.parquet.write_table(pa.table({"id": ids, "text": ["long", "read"]}), inputs[0])
            named = (Columns(id="id"), Columns(keep=("id",)), Columns(id="id", keep=None)) if kind == "UUIDs" else ()
            for columns in (Columns(), *named):
                kept = pa.parquet.read_table(ids_in("out.parquet", columns)).column("id").combine_chunks()
                assert kept.equals(ids)
                assert [row["id"] for row in read(ids_in("out.jsonl", columns))] == values
            texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
            assert [str(each) for each in ids_in("out.npz", Columns())] == texts


NO_IDS = {
    "null": (pa.array([None, 1.5]), "Column 'id' is null; an id is required."),
    "NaN": (pa.array([float("nan"), 1.5]), "Column 'id' is nan; an id is required."),
    "a null among scalars": (pa.array([None, b"a"]), "Column 'id' is null; an id is required."),
    "a day too late": (pa.array([3 * 10**6, 1], pa.int32()).cast(pa.date32()), "Row 1 of the file holds a value that"),
    "a moment too late": (pa.array([2**62, 1], pa.timestamp("us")), "Column 'id' holds a time outside of the years 1"),
}


def test_what_is_no_id_fails_its_row(bundle_path: Path, tmp_path: Path) -> None:
    for kind, (ids, error) in NO_IDS.items():
        with named_case(kind):
            pa.parquet.write_table(pa.table({"id": ids, "text": ["long", "read"]}), tmp_path / "in.parquet")
            done = run_words(open_bundle(bundle_path), [tmp_path / "in.parquet"], tmp_path / f"{kind}.jsonl")
            bad, good = read(tmp_path / f"{kind}.jsonl")
            assert (bad["id"], good["error"], done.failed_rows) == (None, None, 1)
            assert bad["error"].startswith(error)


MIXED_IDS = {
    "integers and numbers": ([[3], [0.5]], [3.0, 0.5]),
    "large integers and numbers": ([[2**53 + 1], [0.5]], ["9007199254740993", "0.5"]),
    "unsigned and negative integers": ([pa.array([2**63], pa.uint64()), [-1]], ["9223372036854775808", "-1"]),
    "decimals and integers": ([[Decimal("0.10")], [5]], ["0.10", "5"]),
    "UUIDs and texts": ([OF_UUIDS[:1], ["x"]], [str(UUIDS[0]), "x"]),
    "nulls and integers": ([[None], [5]], [None, 5]),
}
"""Kind -> the ids of two files, and those of the output in Parquet."""


def test_ids_of_several_types_have_one_that_changes_no_value(bundle_path: Path, tmp_path: Path) -> None:
    inputs = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    for kind, (columns, ids) in MIXED_IDS.items():
        with named_case(kind):
            for path, column in zip(inputs, columns, strict=True):
                pa.parquet.write_table(pa.table({"id": column, "text": ["long"]}), path)
            run_words(open_bundle(bundle_path), inputs, tmp_path / f"{kind}.parquet")
            assert [row["id"] for row in read(tmp_path / f"{kind}.parquet")] == ids


def test_ids_of_json_lines_may_differ_in_type(bundle_path: Path, tmp_path: Path) -> None:
    values = ["doc-7", 8.0, 2**53 + 1, 2**70, True, [1], {"a": "ü"}]
    rows = write(tmp_path / "in.jsonl", *(json.dumps({"id": value, "text": "long"}) for value in values))
    bundle = open_bundle(bundle_path)
    run_words(bundle, [rows], tmp_path / "out.jsonl")
    assert [row["id"] for row in read(tmp_path / "out.jsonl")] == values
    run_words(bundle, [rows], tmp_path / "out.parquet")
    texts = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values]
    assert [row["id"] for row in read(tmp_path / "out.parquet")] == texts
    numbers = write(tmp_path / "numbers.jsonl", *(f'{{"id": {value}, "text": "long"}}' for value in (2**53 + 1, 0.5)))
    run_words(bundle, [numbers], tmp_path / "numbers.parquet")
    assert [row["id"] for row in read(tmp_path / "numbers.parquet")] == ["9007199254740993", "0.5"]


def test_a_value_that_the_common_type_of_all_inputs_lacks_stops_the_job(bundle_path: Path, tmp_path: Path) -> None:
    inputs = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    for path, values in zip(inputs, ([[2**53 + 1]], [[0.5]]), strict=True):
        pa.parquet.write_table(pa.table({"id": values, "text": ["long"]}), path)
    message = (
        "column 'id' is list<.*double> for all inputs together, and a value does not fit.*\nGive the inputs one type"
    )
    with pytest.raises(InputError, match=message):
        run_words(open_bundle(bundle_path), inputs, tmp_path / "out.parquet")
    run_words(open_bundle(bundle_path), inputs, tmp_path / "out.jsonl")
    assert [row["id"] for row in read(tmp_path / "out.jsonl")] == [[2**53 + 1], [0.5]]


def test_rows_that_fail_keep_their_columns_and_half_a_character_fails_one(bundle_path: Path, tmp_path: Path) -> None:
    rows = write(
        tmp_path / "in.jsonl", '{"text": null, "x": 1}', '{"text": "long", "x": "\\ud800"}', "{", '{"text": "nan"}'
    )
    run(bundle_path, rows, tmp_path / "out.jsonl", columns=Columns(keep=("x",)))
    found = read(tmp_path / "out.jsonl")
    assert [row["x"] for row in found] == [1, None, None, None]
    assert found[1]["error"] == "Column 'x' holds half of a surrogate pair."


def test_a_kept_column_with_the_name_of_a_result_is_refused(bundle_path: Path, tmp_path: Path) -> None:
    rows = write(tmp_path / "in.jsonl", '{"text": "long", "tokens": 1, "error": 2}')
    message = "names of result columns: error, tokens.\nRename them, or list the others: keep_columns"
    with pytest.raises(InputError, match=message):
        run(bundle_path, rows, tmp_path / "out.jsonl", columns=Columns(keep=None))


def test_a_column_whose_name_no_output_takes_is_left_out_and_named(
    bundle_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = write(tmp_path / "in.jsonl", '{"text": "long", "\\ud800": 1}')
    run(bundle_path, rows, tmp_path / "out.jsonl", columns=Columns(keep=None))
    assert list(read(tmp_path / "out.jsonl")[0]) == ["id", "text", "embedding", "tokens", "error"]
    assert r"by a valid name: \ud800; to keep them" in caplog.text


def test_columns_that_appear_after_the_first_rows_are_named_at_the_end(
    bundle_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(text_inference, "_WINDOW_TEXTS", 60)
    late = '{"text": "read", "x": 1, "late": 2, "later": 3}'
    rows = write(tmp_path / "in.jsonl", *['{"text": "long", "x": 0}'] * 100, *[late] * 30)
    bundle = open_bundle(bundle_path)

    def stop(progress: JobProgress) -> None:
        if progress.rows == 120:
            raise KeyboardInterrupt

    for keep, dropped in (None, ["late", "later"]), (("x",), []):
        output = tmp_path / f"{len(dropped)}.jsonl"
        with pytest.raises(KeyboardInterrupt):
            run_words(bundle, [rows], output, columns=Columns(keep=keep), on_progress=stop)
        caplog.clear()
        # Rows of the first run count, too.
        done = run_words(bundle, [rows], output, columns=Columns(keep=keep))
        assert (done.resumed_rows, done.dropped_columns) == (120, dropped)
        assert ("the output lacks columns" in caplog.text) == bool(dropped)
        assert not dropped or "of its file has by a valid name: late, later; to keep them, add them" in caplog.text


def matrix_of(path: Path) -> np.ndarray:
    if path.suffix == ".npy":
        return np.load(path)
    if path.suffix == ".npz":
        return np.load(path)["embedding"]
    if path.suffix == ".parquet":
        return np.stack(pa.parquet.read_table(path).column("embedding").to_numpy())
    return np.array([row["embedding"] for row in read(path)])


@pytest.mark.parametrize(
    ("ending", "dtype", "normalize", "dimensions"),
    [
        *(("parquet", dtype, True, 3) for dtype in EmbeddingPrecision),
        ("jsonl", EmbeddingPrecision.FLOAT16, False, None),
        ("npy", EmbeddingPrecision.INT8, True, None),
        ("npz", EmbeddingPrecision.FLOAT32, False, 3),
    ],
)
def test_vectors_are_truncated_then_normalised_then_quantised(
    bundle_path: Path, tmp_path: Path, ending: str, dtype: EmbeddingPrecision, normalize: bool, dimensions: int | None
) -> None:
    texts = random_texts(20)
    rows = write_rows(tmp_path / "in.jsonl", [*texts[:5], None, *texts[5:], "nan"])
    options = VectorOptions(truncate_dim=dimensions, normalize=normalize, output_dtype=dtype)
    output = tmp_path / f"out.{ending}"
    done = run(bundle_path, rows, output, vectors=options, skip_failed=True)
    expected = embeddings(bundle_path, texts)[:, :dimensions]
    expected = quantized(normalized(expected) if normalize else expected, dtype)
    found = matrix_of(output)
    assert (done.rows, done.failed_rows, found.shape) == (22, 2, expected.shape)
    assert ending == "jsonl" or found.dtype == expected.dtype
    if dtype.needs_ranges:
        # Where a batch's last digits differ, a value may be a step away.
        assert np.abs(found.astype(int) - expected.astype(int)).max() <= 1
    else:
        np.testing.assert_allclose(found, expected, atol=2e-3 if dtype is EmbeddingPrecision.FLOAT16 else 1e-6)


def test_int8_divides_the_range_of_the_first_shard(
    bundle_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_inference, "_WINDOW_TEXTS", 10)
    texts = random_texts(40)
    rows = write_rows(tmp_path / "in.jsonl", [None] * 10 + texts)
    options = VectorOptions(output_dtype=EmbeddingPrecision.INT8)
    run(bundle_path, rows, tmp_path / "out.parquet", vectors=options, skip_failed=True)
    vectors = embeddings(bundle_path, texts)
    # The first shard with vectors is the second.
    ranges = np.stack([vectors[:10].min(axis=0), vectors[:10].max(axis=0)])
    metadata = pa.parquet.read_schema(tmp_path / "out.parquet").metadata
    np.testing.assert_allclose(json.loads(metadata[b"hdexport.ranges"]), ranges, atol=1e-6)
    found = matrix_of(tmp_path / "out.parquet").astype(int)
    assert np.abs(found - quantized(vectors, "int8", ranges)).max() <= 1
    assert np.abs(found - quantized(vectors, "int8")).max() > 1
    with pytest.raises(InputError, match=r"output_dtype='int8' takes each dimension's range .* a single vector"):
        run(bundle_path, write_rows(tmp_path / "one.jsonl", ["long"]), tmp_path / "one.parquet", vectors=options)


@pytest.mark.parametrize("ending", ["npy", "npz"])
def test_failed_rows_are_nan_in_a_matrix_unless_left_out(bundle_path: Path, tmp_path: Path, ending: str) -> None:
    rows = write(
        tmp_path / "in.jsonl", '{"id": "a", "text": "long"}', '{"id": "b", "text": "nan"}', '{"id": 5, "text": "read"}'
    )
    good = embeddings(bundle_path, ["long", "read"])
    for skip in (False, True):
        run(bundle_path, rows, tmp_path / f"{skip}.{ending}", skip_failed=skip)
        expected = good if skip else np.insert(good, 1, np.nan, axis=0)
        np.testing.assert_allclose(matrix_of(tmp_path / f"{skip}.{ending}"), expected, atol=1e-6)
    if ending == "npz":
        arrays = np.load(tmp_path / "False.npz")
        assert arrays["id"].tolist() == ["a", "b", "5"]
        assert (arrays["failed"].tolist(), arrays["tokens"].tolist()) == ([False, True, False], [3, 3, 3])
        assert json.loads(str(arrays["metadata"]))["hdexport.model"] == "tiny"
        long = write(tmp_path / "long.jsonl", *(json.dumps({"text": text}) for text in ("long " * 15, "nan", "read")))
        run(bundle_path, long, tmp_path / "long.npz", overflow=Overflow.TRUNCATE)
        arrays = np.load(tmp_path / "long.npz")
        assert arrays["truncated"].tolist() == [True, False, False]
        assert arrays["tokens_given"].tolist() == [17, 0, 3]


def test_ids_of_a_matrix_are_integers_where_all_are(bundle_path: Path, tmp_path: Path) -> None:
    for rows, ids in (['{"id": 5, "text": "long"}'], [5]), (['{"id": 5, "text": "long"}', "{"], ["5", ""]):
        run(bundle_path, write(tmp_path / "in.jsonl", *rows), tmp_path / "out.npz", force=True)
        assert np.load(tmp_path / "out.npz")["id"].tolist() == ids


def test_vectors_in_parquet_are_lists_of_any_size(bundle_path: Path, tmp_path: Path) -> None:
    """Of lists of a fixed size with a null, as a failed row's vector is, pyarrow 17 to 25 reads none."""
    inputs = write_rows(tmp_path / "in.jsonl", ["long documents", "nan", "are read"])
    for output, options in (("v.parquet", {}), ("v", {}), ("q.parquet", {"vectors": VectorOptions(truncate_dim=2)})):
        run(bundle_path, inputs, tmp_path / output, **options)
        table = pyarrow.dataset.dataset(tmp_path / output).to_table()
        assert pa.types.is_list(table.schema.field("embedding").type)
        first, failed, last = table["embedding"].to_pylist()
        assert failed is None
        assert len(first) == len(last) == (4 if output.startswith("v") else 2)


def test_vectors_of_float32_have_no_dictionary_in_parquet(bundle_path: Path, tmp_path: Path) -> None:
    table = pa.table({"text": ["long", "read"], "kept": [["a"], ["a", "b"]]})
    pa.parquet.write_table(table, tmp_path / "in.parquet")
    for output, dtype, expected in (
        ("v.parquet", EmbeddingPrecision.FLOAT32, {"embedding"}),
        ("v", EmbeddingPrecision.FLOAT32, {"embedding"}),
        # Of 256 values, a dictionary's numbers take less than the int32 that Parquet has for an int8.
        ("int8.parquet", EmbeddingPrecision.INT8, set()),
    ):
        options = {"vectors": VectorOptions(output_dtype=dtype), "columns": Columns(keep=None)}
        run(bundle_path, tmp_path / "in.parquet", tmp_path / output, **options)
        written = tmp_path / output if output.endswith(".parquet") else tmp_path / output / "part-00000.parquet"
        group = pa.parquet.read_metadata(written).row_group(0)
        columns = [group.column(number) for number in range(group.num_columns)]
        names = {each.path_in_schema.partition(".")[0] for each in columns if not each.has_dictionary_page}
        assert names == expected


ARRAYS = {
    "vectors": ([np.eye(2)[0], None, np.eye(2)[1]], pa.list_(pa.float32(), 2)),
    "vectors of any size": ([np.zeros(0), np.arange(3.0), None], pa.list_(pa.float32())),
    "vectors of tokens": ([np.eye(2), None, np.zeros((0, 2))], pa.list_(pa.list_(pa.float32(), 2))),
    "rows of any size": ([np.eye(2), None], pa.list_(pa.list_(pa.float64()))),
    "large lists": ([np.arange(3.0), None], pa.large_list(pa.float64())),
    "words": ([np.array(["a", "bc"]), None], pa.list_(pa.string())),
    "arrays and lists": ([np.array([1, 2]), [3], None], pa.list_(pa.int8())),
}
"""Kind -> cells of a task's column, and its type."""


def test_an_array_of_any_type_is_a_list() -> None:
    for name, (cells, kind) in ARRAYS.items():
        with named_case(name):
            column = array_of_cells(list(cells), pa.field("x", kind))
            column.validate(full=True)
            assert column.type == kind
            assert column.to_pylist() == [cell.tolist() if isinstance(cell, np.ndarray) else cell for cell in cells]
    encoding = writers.encoding_of(ResultFormat.PARQUET, [pa.field("x", pa.list_(pa.float32(), 2))])
    with pytest.raises(
        InputError, match=r"The column 'x' is fixed_size_list.*, and a value does not fit: its length is 1"
    ):
        list(encoding.encode([{"x": np.zeros(3)}, {"x": np.zeros(1)}]))


def lines_of(field: pa.Field, cells: list[np.ndarray | None]) -> list[Any]:
    """The values of a column in JSON Lines, as Python reads them."""
    rows = [{field.name: cell} for cell in cells]
    encoded = b"".join(writers.encoding_of(ResultFormat.JSONL, [field]).encode(rows))
    return [json.loads(line, parse_constant=str)[field.name] for line in encoded.splitlines()]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_float_of_json_lines_reads_back_as_it_was(
    dtype: type[np.floating[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_cells, "_NUMBERS", 1000)
    if dtype is np.float16:
        numbers = np.arange(2**16, dtype=np.uint16).view(np.float16)
        numbers = numbers[np.isfinite(numbers)]
    else:
        hard = np.array([0.0, 1.0, 2**24, 1e-7, 1e20, 1e-5, 1 / 3, *10.0 ** np.arange(-44, 39)], np.float32)
        random = np.random.default_rng(0).integers(0, 0x7F800000, 10_000, dtype=np.uint32).view(np.float32)
        limits = np.finfo(np.float32)
        numbers = np.array([limits.max, limits.tiny, limits.smallest_subnormal])
        numbers = np.concatenate([hard, numbers, random])
        numbers = np.concatenate([numbers, -numbers])
    lists, of_tokens = pa.list_(pa.from_numpy_dtype(dtype)), numbers[: len(numbers) // 4 * 4].reshape(-1, 4)
    cells: list[np.ndarray | None] = [numbers, None, numbers[:0], numbers[:1]]
    whole, none, nothing, one = lines_of(pa.field("embedding", lists), cells)
    assert (none, nothing, one) == (None, [], whole[:1])
    np.testing.assert_array_equal(np.array(whole, dtype), numbers)
    first, none, nothing, last = lines_of(
        pa.field("embedding", pa.list_(lists)), [of_tokens[:-2], None, of_tokens[:0], of_tokens[-2:]]
    )
    assert (none, nothing) == (None, [])
    np.testing.assert_array_equal(np.array(first + last, dtype), of_tokens)


def test_json_lines_have_null_for_what_is_no_number() -> None:
    found = lines_of(
        pa.field("embedding", pa.list_(pa.float32())), [np.array([1, np.nan, np.inf, -np.inf], np.float32)]
    )
    assert found == [[1, None, None, None]]


def test_parquet_metadata_describes_the_vectors(bundle_path: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "in.jsonl", ["long", "read"])
    options = VectorOptions(normalize=True, output_dtype=EmbeddingPrecision.FLOAT16)
    run(bundle_path, rows, tmp_path / "out.parquet", vectors=options)
    metadata = pa.parquet.read_schema(tmp_path / "out.parquet").metadata
    assert {key.decode(): value.decode() for key, value in metadata.items() if key != b"ARROW:schema"} == {
        "hdexport.version": "0.1.0",
        "hdexport.model": "tiny",
        "hdexport.bundle": identity_of_bundle(open_bundle(bundle_path).manifest),
        "hdexport.task": "feature-extraction",
        "hdexport.pooling": "mean",
        "hdexport.normalized": "true",
        "hdexport.dtype": "float16",
    }


@pytest.mark.parametrize(
    ("settings", "options", "said"),
    [
        (None, VectorOptions(), (b"unknown", b"unknown")),
        ({"pooling": ("cls", "max"), "normalize": True}, VectorOptions(), (b"cls+max", b"true")),
        ({"pooling": ("cls",), "normalize": True}, VectorOptions(truncate_dim=3), (b"cls", b"false")),
    ],
)
def test_parquet_metadata_states_the_pooling(
    new_bundle: BundleMaker,
    tmp_path: Path,
    settings: dict[str, Any] | None,
    options: VectorOptions,
    said: tuple[bytes, bytes],
) -> None:
    bundle = new_bundle(task="sentence-similarity")
    sentence = settings and SentenceSettings(kind="encoder", max_seq_length=16, **settings)
    seal(bundle, dataclasses.replace(open_bundle(bundle).manifest, sentence=sentence))
    run(bundle, write_rows(tmp_path / "in.jsonl", ["long"]), tmp_path / "out.parquet", vectors=options)
    metadata = pa.parquet.read_schema(tmp_path / "out.parquet").metadata
    assert (metadata[b"hdexport.pooling"], metadata[b"hdexport.normalized"]) == said


def test_a_vector_that_float16_cannot_hold_is_a_failed_row(new_bundle: BundleMaker, tmp_path: Path) -> None:
    table = np.ones((len(VOCABULARY), 4))
    table[VOCABULARY.index("long")] = 1e6
    bundle = gather_bundle(new_bundle(), "feature-extraction", {"last_hidden_state": table})
    rows = write_rows(tmp_path / "in.jsonl", ["read", "long", "whole"])
    options = VectorOptions(output_dtype=EmbeddingPrecision.FLOAT16)
    done = run(bundle, rows, tmp_path / "out.jsonl", vectors=options)
    found = read(tmp_path / "out.jsonl")
    assert [row["embedding"] is None for row in found] == [False, True, False]
    assert str(found[1]["error"]).startswith("The embedding has a value that is too large for float16.\nAdd norm")
    assert (done.failed_rows, done.errors, done.tokens) == (1, {"input": 1}, 6)


def refused(bundle: Path, tmp_path: Path, output: str, **options: Any) -> str:
    rows = write_rows(tmp_path / "in.jsonl", ["long"])
    with pytest.raises(InputError) as raised:
        plan_job(open_bundle(bundle), [rows], tmp_path / output, options=JobOptions(**options))
    return str(raised.value)


def test_outputs_that_the_task_or_format_does_not_support_are_refused(new_bundle: BundleMaker, tmp_path: Path) -> None:
    embedding = new_bundle()
    classes = gather_bundle(new_bundle("classes"), "text-classification", {"logits": np.zeros((len(VOCABULARY), 2))})
    assert "A .npy file is for embeddings" in refused(classes, tmp_path, "out.npy")
    assert "normalize and truncate_dim are for embeddings" in refused(
        classes, tmp_path, "out.jsonl", vectors=VectorOptions(normalize=True)
    )
    assert "cannot be truncated to 5 dimensions; these have 4" in refused(
        embedding, tmp_path, "out.jsonl", vectors=VectorOptions(truncate_dim=5)
    )
    assert "cannot hold keep_columns" in refused(embedding, tmp_path, "out.npz", columns=Columns(keep=("text",)))
    assert refused(
        embedding, tmp_path, "out.npy", vectors=VectorOptions(output_dtype=EmbeddingPrecision.BINARY)
    ).endswith("failed rows are NaN, which binary lacks.\nLeave them out: skip_failed=True")


def test_shards_become_one_array_in_order(bundle_path: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "in.jsonl", [f"{number}" for number in range(5000)])
    run_words(open_bundle(bundle_path), [rows], tmp_path / "out.npz")
    run_words(open_bundle(bundle_path), [rows], tmp_path / "out.jsonl")
    arrays = np.load(tmp_path / "out.npz")
    found = read(tmp_path / "out.jsonl")
    assert arrays["id"].tolist() == [row["id"] for row in found]
    assert arrays["embedding"].tolist() == [row["embedding"] for row in found]


def test_vectors_have_the_models_own_number_of_dimensions_by_default(new_bundle: BundleMaker, tmp_path: Path) -> None:
    bundle = new_bundle(task="sentence-similarity")
    sentence = SentenceSettings(kind="encoder", max_seq_length=16, truncate_dim=3)
    seal(bundle, dataclasses.replace(open_bundle(bundle).manifest, sentence=sentence))
    rows = write_rows(tmp_path / "in.jsonl", ["long"])
    for asked, width in ((None, 3), (2, 2)):
        run(bundle, rows, tmp_path / "out.jsonl", vectors=VectorOptions(truncate_dim=asked), force=True)
        assert len(read(tmp_path / "out.jsonl")[0]["embedding"]) == width


def test_a_directory_of_parquet_files_is_one_data_set(
    bundle_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_inference, "_WINDOW_TEXTS", 4)
    monkeypatch.setattr(writers, "_GROUP_ROWS", 4)
    monkeypatch.setattr(writers, "_PART_ROWS", 8)
    inputs = write_rows(tmp_path / "in.jsonl", [*random_texts(18), "nan"])
    run(bundle_path, inputs, tmp_path / "whole.parquet")
    directory = tmp_path / "parts"
    # One that is there and empty is taken, as by programs that make it first.
    directory.mkdir()
    run(bundle_path, inputs, directory)
    assert [path.name for path in sorted(directory.iterdir())] == [f"part-0000{part}.parquet" for part in range(3)]
    whole, parts = pa.parquet.read_table(tmp_path / "whole.parquet"), pyarrow.dataset.dataset(directory).to_table()
    assert parts.equals(whole)
    assert [pa.parquet.read_metadata(path).num_rows for path in sorted(directory.iterdir())] == [8, 8, 3]
    for path in directory.iterdir():
        assert pa.parquet.read_schema(path).metadata[b"hdexport.task"] == b"feature-extraction"
    # The same job is done already; another one replaces it if it may.
    assert run(bundle_path, inputs, directory).resumed_rows == 19
    fewer = write_rows(tmp_path / "fewer.jsonl", random_texts(3))
    with pytest.raises(OutputExistsError, match=r"parts exists\.\nReplace it with force=True"):
        run(bundle_path, fewer, directory)
    run(bundle_path, fewer, directory, force=True)
    assert pyarrow.dataset.dataset(directory).count_rows() == 3
    run(bundle_path, write_rows(tmp_path / "none.jsonl", ["nan"]), tmp_path / "none", skip_failed=True)
    assert pyarrow.dataset.dataset(tmp_path / "none").to_table().column_names == whole.column_names
    left = ["bundle", "fewer.jsonl", "in.jsonl", "none", "none.jsonl", "parts", "whole.parquet"]
    assert left_in(tmp_path) == left
