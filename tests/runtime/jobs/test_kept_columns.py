"""Kept columns of Parquet files: they stay columns, and tables are as if they were values of rows."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from hdruntime.bundle.reader import open_bundle
from hdruntime.jobs import JobOptions, arrow_columns, input_files, plan_job, row_reader, run_job, shards
from hdruntime.jobs.input_search import find_inputs
from hdruntime.jobs.kept_columns import AS_COLUMNS
from hdruntime.jobs.row_reader import read_rows
from hdruntime.jobs.rows import Columns, Row
from hdruntime.jobs.shards import Shard, ShardResult, split_into_shards
from support.comparators import named_case
from support.job_runs import WordPool, read, run_words, stop_at

ROWS = 600
"""More than are read at a time."""

DAY = datetime.datetime(2024, 2, 28, 1, 2, 3)
STRUCTS = [{"a": {"n": 1, "at": DAY}, "b": "ü"}, {"a": None, "b": None}, None, {"a": {"n": None, "at": None}, "b": ""}]

STAY = {
    "texts": pa.array(["a", "zwölf", None, ""]),
    "large texts": pa.array(["a", "zwölf", None, ""], pa.large_string()),
    "bytes": pa.array([b"\xff", b"ab", None, b""]),
    "booleans": pa.array([True, False, None, True]),
    "integers": pa.array([1, -2, None, 0], pa.int8()),
    "large integers": pa.array([1, 2**64 - 1, None, 0], pa.uint64()),
    "floats": pa.array([1.5, -2, None, 0], pa.float32()),
    "days": pa.array([1, -2, None, 0], pa.int32()).cast(pa.date32()),
    "moments": pa.array([DAY, DAY.replace(year=1), None, DAY.replace(month=1)], pa.timestamp("us")),
    "moments of a zone": pa.array([1, -2, None, 0], pa.timestamp("ms", "Europe/Berlin")),
    "nanoseconds": pa.array([1, -2, None, 0], pa.timestamp("ns")),
    "times": pa.array([1, 2, None, 0], pa.time64("us")),
    "classes": pa.array(["a", "zwölf", None, "a"]).dictionary_encode(),
    "structs": pa.array(STRUCTS),
}
"""Kind -> values that are columns in Parquet and stay columns."""

VALUES = {
    "lists": pa.array([[1], [], None, [2, 3]]),
    "nothing": pa.nulls(4),
    "decimals": pa.array([1, 2, None, 0]).cast(pa.decimal128(20)),
    "structs of lists": pa.array([{"a": [1]}, {"a": None}, None, {"a": []}]),
    "structs of nanoseconds": pa.array(
        [{"a": 1000}, {"a": None}, None, {"a": 0}], pa.struct({"a": pa.timestamp("ns")})
    ),
}
"""Kind -> values that are columns in Parquet and become values of rows."""


def repeated(column: pa.Array, rows: int = ROWS) -> pa.Array:
    return column.take(pa.array([number % len(column) for number in range(rows)]))


def write(path: Path, rows: int = ROWS, **columns: pa.Array) -> Path:
    texts = [None if number % 50 == 7 else f"read {number}" for number in range(rows)]
    pa.parquet.write_table(pa.table({"text": texts, **columns}), path, row_group_size=100)
    return path


def rows_in(file: Path, *keep: str) -> list[Row]:
    columns = Columns(keep=keep)
    return list(read_rows(find_inputs([file], columns=columns), columns=columns))


class Chunks(WordPool):
    """Gives three results of the first row of a shard and of each row after a failed one, as late chunking does."""

    def map(self, shards: Iterator[Shard]) -> Iterator[tuple[Shard, ShardResult]]:
        for shard, result in super().map(shards):
            found: list[dict[str, object]] = []
            for row in result.results:
                found += [row] * (3 if not found or found[-1]["error"] else 1)
            yield shard, result._replace(results=found)


def test_a_kept_column_stays_a_column(bundle_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "in.parquet", **{name: repeated(column) for name, column in (STAY | VALUES).items()})
    table = pa.parquet.read_table(file)
    converted: list[pa.DataType] = []

    def cells(column: Any) -> list[Any]:
        converted.append(column.type)
        return input_files.cells_of_column(column)

    monkeypatch.setattr(row_reader, "cells_of_column", cells)
    monkeypatch.setattr(arrow_columns, "cells_of_column", cells)
    keep = (*STAY, *VALUES)
    run_words(open_bundle(bundle_path), [file], tmp_path / "out.parquet", columns=Columns(keep=keep))
    assert set(converted) == {pa.string(), *(table.schema.field(name).type for name in VALUES)}
    # Of strings, the texts alone.
    assert converted.count(pa.string()) == converted.count(pa.null())
    found = pa.parquet.read_table(tmp_path / "out.parquet")
    for name in keep:
        with named_case(name):
            expected = table.column(name).combine_chunks()
            if pa.types.is_dictionary(expected.type):
                expected = expected.dictionary_decode()
            if pa.types.is_null(expected.type):
                expected = pa.nulls(ROWS, pa.null())
            assert found.column(name).combine_chunks().equals(expected)
    assert found.column("error").null_count == ROWS - 12


def test_kept_columns_follow_their_rows(bundle_path: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "in.parquet", number=pa.array(range(ROWS)), struct=repeated(STAY["structs"]))
    columns = Columns(keep=("number", "struct"))
    for skip_failed in (False, True):
        with named_case(skip_failed):
            options = JobOptions(columns=columns, skip_failed=skip_failed, force=True)
            run_job(plan_job(open_bundle(bundle_path), [file], tmp_path / "out.parquet", options=options), Chunks())
            rows = read(tmp_path / "out.parquet")
            assert [row["struct"] for row in rows] == [STRUCTS[row["number"] % 4] for row in rows]
            of_row = {number: 0 if skip_failed and number % 50 == 7 else 1 for number in range(ROWS)}
            of_row |= {0: 3, **dict.fromkeys(range(8, ROWS, 50), 3)}
            expected = [number for number, times in of_row.items() for _ in range(times)]
            assert [row["number"] for row in rows] == [row["id"] for row in rows] == expected


def test_a_value_that_cannot_be_kept_fails_its_row_alone(bundle_path: Path, tmp_path: Path) -> None:
    bad = pa.array([b"a", b"\xff"]).view(pa.string())
    late = pa.array([1, 2**62], pa.timestamp("us"))
    days = pa.StructArray.from_arrays([pa.array([1, 3 * 10**6], pa.int32()).cast(pa.date32())], ["day"])
    for name, column, error in (
        ("text", bad, "Column 'x' is not valid UTF-8: its byte 1, invalid start byte."),
        ("moment", late, "Column 'x' holds a time outside of the years 1 to 9999."),
        ("struct", days, "Row 301 of the file holds a value that cannot be read: "),
    ):
        with named_case(name):
            places = pa.array([int(number == 300) for number in range(ROWS)])
            file = write(tmp_path / "in.parquet", x=column.take(places), y=pa.array(range(ROWS)))
            output = tmp_path / f"{name}.parquet"
            run_words(open_bundle(bundle_path), [file], output, columns=Columns(keep=("x", "y")))
            found = pa.parquet.read_table(output)
            assert found.schema.field("x").type == column.type
            assert found["error"][300].as_py().startswith(error)
            assert found["x"].is_valid().to_pylist() == [number != 300 for number in range(ROWS)]
            expected = [None if name == "struct" and number == 300 else number for number in range(ROWS)]
            assert found["y"].to_pylist() == expected
            # How many rows were read with the bad one changes no checksum.
            rows = rows_in(file, "x", "y")
            columns = Columns(keep=("x", "y"))
            files = find_inputs([file], columns=columns)
            for number in (5, 256, 299, 300, 511):
                after = read_rows(files, columns=columns, start=rows[number].end)
                assert [row.end for row in after] == [row.end for row in rows[number + 1 :]]


def test_a_checksum_shows_every_change_of_a_kept_value(tmp_path: Path) -> None:
    for name, column in STAY.items():
        with named_case(name):
            ends = {}
            for order in ([0, 1, 2, 3], [1, 0, 2, 3], [2, 1, 0, 3], [0, 1, 3, 2], [0, 1, 2, 2], [0, 1, 1, 3]):
                values = column.take(pa.array(order))
                rows = rows_in(write(tmp_path / "in.parquet", rows=4, x=values), "x")
                assert all(AS_COLUMNS in row.kept for row in rows)
                ends[str(values.to_pylist())] = rows[-1].end.checksum
            assert len(set(ends.values())) == len(ends) > 4


def test_inputs_of_several_types_make_one_column(bundle_path: Path, tmp_path: Path) -> None:
    for name, first, second, kind in (
        ("integers", STAY["integers"], pa.array([2**40, 1, None, 2]), pa.int64()),
        ("moments", STAY["moments"], pa.array([1, 2, None, 3], pa.timestamp("s")), pa.timestamp("us")),
        ("nothing", pa.nulls(4), STAY["structs"], STAY["structs"].type),
        ("classes", STAY["classes"], STAY["texts"], pa.string()),
        ("texts and numbers", STAY["texts"], STAY["integers"], pa.string()),
    ):
        for flip in (False, True):
            with named_case(name, flip):
                inputs = [
                    write(tmp_path / f"{number}.parquet", x=repeated(column))
                    for number, column in enumerate((second, first) if flip else (first, second))
                ]
                output = tmp_path / f"{name}-{flip}.parquet"
                run_words(open_bundle(bundle_path), inputs, output, columns=Columns(keep=("x",)))
                found = pa.parquet.read_table(output)["x"].combine_chunks()
                assert found.type == kind
                values = [value for each in inputs for value in pa.parquet.read_table(each)["x"].to_pylist()]
                if "numbers" in name:
                    values = [value if isinstance(value, str | None) else str(value) for value in values]
                assert found.to_pylist() == values


def test_rows_of_parquet_and_json_lines_share_a_shard(bundle_path: Path, tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(f'{{"text": "long", "x": {number}}}\n' for number in range(20)))
    file = write(tmp_path / "in.parquet", x=pa.array(range(ROWS)))
    for ending in (".parquet", ".jsonl"):
        output = tmp_path / f"out{ending}"
        run_words(open_bundle(bundle_path), [lines, file, lines], output, columns=Columns(keep=("x",)))
        assert [row["x"] for row in read(output)] == [*range(20), *range(ROWS), *range(20)]


def test_a_job_that_was_stopped_continues_with_the_columns_of_its_rows(
    bundle_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "in.parquet", x=pa.array(range(ROWS)), y=repeated(STAY["structs"]))
    bundle, options = open_bundle(bundle_path), {"columns": Columns(keep=("x", "y"))}
    monkeypatch.setattr(WordPool, "shard_characters", 500)
    with pytest.raises(KeyboardInterrupt):
        run_words(bundle, [file], tmp_path / "out.parquet", on_progress=stop_at(150), **options)
    assert 0 < run_words(bundle, [file], tmp_path / "out.parquet", **options).resumed_rows < ROWS
    run_words(bundle, [file], tmp_path / "whole.parquet", **options)
    assert pa.parquet.read_table(tmp_path / "out.parquet").equals(pa.parquet.read_table(tmp_path / "whole.parquet"))


def test_a_shard_ends_with_the_row_whose_columns_fill_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_MAX_BYTES", 100)
    file = write(tmp_path / "in.parquet", rows=5, x=pa.array(["x" * size for size in (60, 40, 99, 0, 1)]))
    assert [len(shard.rows) for shard in split_into_shards(rows_in(file, "x"), characters=1000)] == [2, 3]
