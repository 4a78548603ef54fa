"""Reading the rows of batch jobs from real files."""

from __future__ import annotations

import logging
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from hdruntime.errors import InputError
from hdruntime.rows import Columns, Row, find_inputs, integer_ids, read_rows

TEXT = Columns()


def rows_of(path: Path, columns: Columns = TEXT) -> list[Row]:
    return list(read_rows(find_inputs([path], columns=columns), columns=columns))


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def write_parquet(path: Path, **columns: object) -> Path:
    pa.parquet.write_table(pa.table(columns), path)
    return path


def test_json_lines_are_rows_numbered_from_zero(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", '{"text": "one"}\n\n{"text": ""}\r\n  \n{"other": 1, "text": "zwölf"}')
    assert rows_of(file) == [Row(id=0, text="one"), Row(id=1, text=""), Row(id=2, text="zwölf")]


def test_lines_of_plain_text_are_rows_and_blank_ones_are_empty_texts(tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", "one\n\n{two}\r\n three ")
    assert [row.text for row in rows_of(file)] == ["one", "", "{two}", " three "]


def test_a_line_separator_inside_a_text_does_not_cut_it(tmp_path: Path) -> None:
    # str.splitlines would cut at all of these.
    text = "a\u2028b\x0bc\x85d\re"
    assert [row.text for row in rows_of(write(tmp_path / "a.txt", text + "\n"))] == [text]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_byte_order_mark_is_not_part_of_the_first_row(tmp_path: Path, name: str) -> None:
    line = "x" if name == "a.txt" else '{"text": "x"}'
    assert rows_of(write(tmp_path / name, b"\xef\xbb\xbf" + line.encode()))[0].text == "x"


def test_parquet_columns_are_rows(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "a.parquet", key=["x", "y"], body=["one", ""], more=[1, 2])
    assert rows_of(file, Columns(text="body", id="key")) == [Row(id="x", text="one"), Row(id="y", text="")]


@pytest.mark.parametrize("rows", [255, 256, 257, 600])
def test_every_row_of_a_longer_parquet_file_comes_in_order(tmp_path: Path, rows: int) -> None:
    file = tmp_path / "a.parquet"
    pa.parquet.write_table(pa.table({"text": [str(i) for i in range(rows)]}), file, row_group_size=100)
    assert [row.text for row in rows_of(file)] == [str(i) for i in range(rows)]


@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())],
    ids=str,
)
def test_every_kind_of_string_column_is_read(tmp_path: Path, kind: pa.DataType) -> None:
    array = pa.array(["a", "b", "a"]).cast(kind)
    assert [row.text for row in rows_of(write_parquet(tmp_path / "a.parquet", text=array))] == ["a", "b", "a"]


def test_both_texts_of_a_pair_are_read(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", '{"q": "who?", "c": "Ada"}')
    assert rows_of(file, Columns(text="q", text_pair="c")) == [Row(id=0, text="who?", text_pair="Ada")]


def test_files_follow_each_other_and_numbering_goes_on(tmp_path: Path) -> None:
    write(tmp_path / "b.txt", "three")
    write(tmp_path / "a.jsonl", '{"text": "one"}\n{"text": "two"}')
    assert [(row.id, row.text) for row in rows_of(tmp_path)] == [(0, "one"), (1, "two"), (2, "three")]


def test_a_directory_gives_its_readable_files_and_names_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("b.TXT", "_SUCCESS", ".hidden.txt", "table.csv"):
        write(tmp_path / name, "x")
    (tmp_path / "sub.txt").mkdir()
    with caplog.at_level(logging.WARNING):
        assert find_inputs([tmp_path], columns=TEXT) == [tmp_path / "b.TXT"]
    assert "table.csv is left out" in caplog.text
    assert "_SUCCESS" not in caplog.text


BAD_LINES = {
    "not JSON": (b'{"text": ', "Line 2 is not valid JSON: "),
    "a list": (b'["a"]', "Line 2 holds a JSON list; an object with columns is needed."),
    "nested too deeply": (b"[" * 100_000, "Line 2 is not valid JSON: "),
    "a number too long": (b'{"text": ' + b"1" * 5000 + b"}", "Line 2 is not valid JSON: "),
    "no column": (b'{"txt": "a", "n": 1}', "The row has no column 'text'; it has 'txt', 'n'."),
    "no columns": (b"{}", "The row has no column 'text'; it has none."),
    "null": (b'{"text": null}', "Column 'text' is null; a string is needed."),
    "a number": (b'{"text": 3}', "Column 'text' holds int where a string is needed."),
    "not UTF-8": (b'{"text": "\xff"}', "Line 2 is not valid UTF-8: byte 11 of it, invalid start byte."),
    "half a surrogate pair": (
        b'{"text": "\\ud800"}',
        "The text in column 'text' holds half of a surrogate pair.",
    ),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_a_row_with_an_error_and_reading_goes_on(tmp_path: Path, name: str) -> None:
    line, error = BAD_LINES[name]
    file = write(tmp_path / "a.jsonl", b'{"text": "before"}\n' + line + b'\n{"text": "after"}\n')
    before, bad, after = rows_of(file)
    assert (before.text, after.text, after.id) == ("before", "after", 2)
    assert bad.error is not None
    assert bad.error.startswith(error)
    assert bad.id == 1


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ("null", "Column 'key' is null; a string or an integer is needed."),
        ("1.5", "Column 'key' holds float where a string or an integer is needed."),
        ("true", "Column 'key' holds bool where a string or an integer is needed."),
        ('"\\udfff"', "The id in column 'key' holds half of a surrogate pair."),
    ],
)
def test_a_row_without_a_proper_id_is_an_error(tmp_path: Path, value: str, error: str) -> None:
    file = write(tmp_path / "a.jsonl", f'{{"key": {value}, "text": "a"}}')
    assert rows_of(file, Columns(id="key")) == [Row(id=None, error=error)]


def test_text_that_is_not_utf8_is_one_bad_row(tmp_path: Path) -> None:
    rows = rows_of(write(tmp_path / "a.txt", b"one\n\xc3\nthree"))
    assert [row.text for row in rows] == ["one", "", "three"]
    assert rows[1].error == "Line 2 is not valid UTF-8: byte 1 of it, unexpected end of data."


def test_bad_cells_of_parquet_are_bad_rows(tmp_path: Path) -> None:
    # A Parquet file's strings are bytes that nobody checked.
    offsets = pa.array([0, 1, 2, 3], pa.int32()).buffers()[1]
    bad = pa.Array.from_buffers(pa.string(), 3, [None, offsets, pa.py_buffer(b"a\xffc")])
    rows = rows_of(write_parquet(tmp_path / "a.parquet", text=pa.chunked_array([bad, pa.array([None, "e"])])))
    assert [row.text for row in rows] == ["a", "", "c", "", "e"]
    assert rows[1].error == "Column 'text' is not valid UTF-8: byte 1 of it, invalid start byte."
    assert rows[3].error == "Column 'text' is null; a string is needed."


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet"])
def test_an_empty_file_is_refused_before_any_work(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=rf"{name} is empty.\nLeave it out"):
        find_inputs([write(tmp_path / name, b"")], columns=TEXT)


def test_a_file_of_blank_lines_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"a.jsonl holds no rows"):
        rows_of(write(tmp_path / "a.jsonl", "\n \n"))


def test_a_parquet_file_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"a.parquet holds no rows"):
        rows_of(write_parquet(tmp_path / "a.parquet", text=pa.array([], pa.string())))


@pytest.mark.parametrize("name", ["a.csv", "a", "a.jsonl.gz"])
def test_an_unknown_kind_of_file_is_refused_with_the_known_ones(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"Inputs end in .jsonl, .parquet, .txt\."):
        find_inputs([write(tmp_path / name, "x")], columns=TEXT)


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"There is no file or directory .*a.txt"):
        find_inputs([tmp_path / "a.txt"], columns=TEXT)
    with pytest.raises(InputError, match=r"The directory .* holds no file that ends in .jsonl, .parquet, .txt"):
        find_inputs([tmp_path], columns=TEXT)
    with pytest.raises(InputError, match=r"No input was given"):
        find_inputs([], columns=TEXT)


def test_a_file_that_is_no_parquet_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"a.parquet is not a Parquet file that can be read"):
        find_inputs([write(tmp_path / "a.parquet", "hello")], columns=TEXT)


def test_a_damaged_parquet_file_stops_the_reading(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    pa.parquet.write_table(pa.table({"text": [str(i) * 50 for i in range(1000)]}), file, compression="zstd")
    content = bytearray(file.read_bytes())
    content[10:200] = bytes(190)
    with pytest.raises(InputError, match=r"a.parquet cannot be read on"):
        rows_of(write(file, bytes(content)))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            Columns(text="body"),
            r"has no column 'body'.*; its columns are text, n.\nName one of them with --text-column",
        ),
        (
            Columns(text="n"),
            r"Column 'n' of .* holds int64, not strings.\nName another one with --text-column",
        ),
        (Columns(text_pair="n"), r"Name another one with --text-pair-column"),
        (Columns(id="key"), r"has no column 'key'.*\nName one of them with --id-column"),
    ],
)
def test_a_parquet_file_without_the_column_is_refused(tmp_path: Path, columns: Columns, message: str) -> None:
    file = write_parquet(tmp_path / "a.parquet", text=["a"], n=[1])
    with pytest.raises(InputError, match=message):
        find_inputs([file], columns=columns)


@pytest.mark.parametrize("columns", [Columns(text_pair="other"), Columns(id="other")])
def test_plain_text_has_no_columns(tmp_path: Path, columns: Columns) -> None:
    with pytest.raises(InputError, match=r"is plain text, so it has no column 'other'.\nUse .jsonl or .parquet"):
        find_inputs([write(tmp_path / "a.txt", "x")], columns=columns)


def test_ids_are_integers_only_where_that_is_certain(tmp_path: Path) -> None:
    numbers = write_parquet(tmp_path / "n.parquet", text=["a"], key=[1])
    large = write_parquet(tmp_path / "u.parquet", text=["a"], key=pa.array([1], pa.uint64()))
    words = write_parquet(tmp_path / "w.parquet", text=["a"], key=["k"])
    lines = write(tmp_path / "a.jsonl", '{"text": "a", "key": 1}')
    keyed = Columns(id="key")
    assert integer_ids([lines], columns=TEXT)
    assert integer_ids([numbers], columns=keyed)
    assert not any(integer_ids([numbers, other], columns=keyed) for other in (large, words, lines))
