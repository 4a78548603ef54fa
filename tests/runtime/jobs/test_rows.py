"""Reading the rows of batch jobs from real files."""

from __future__ import annotations

import io
import json
import os
import zlib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from hdruntime.errors import InputError
from hdruntime.errors import write as written
from hdruntime.jobs import input_files
from hdruntime.jobs.input_search import find_inputs
from hdruntime.jobs.row_reader import read_rows
from hdruntime.jobs.rows import Columns, Position, Row
from support.comparators import named_case

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
    assert [(row.id, row.text) for row in rows_of(file)] == [(0, "one"), (1, ""), (2, "zwölf")]


def test_lines_of_plain_text_are_rows_and_blank_ones_are_empty_texts(tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", "one\n\n{two}\r\n three ")
    assert [row.text for row in rows_of(file)] == ["one", "", "{two}", " three "]


def test_a_line_separator_inside_a_text_does_not_cut_it(tmp_path: Path) -> None:
    # str.splitlines would cut at all of these.
    text = "a\u2028b\x0bc\x85d\re"
    assert [row.text for row in rows_of(write(tmp_path / "a.txt", text + "\n"))] == [text]


def test_every_row_of_a_longer_parquet_file_comes_in_order(tmp_path: Path) -> None:
    for rows in [255, 256, 257, 600]:
        with named_case(rows):
            file = tmp_path / "a.parquet"
            pa.parquet.write_table(pa.table({"text": [str(i) for i in range(rows)]}), file, row_group_size=100)
            assert [row.text for row in rows_of(file)] == [str(i) for i in range(rows)]


def test_every_kind_of_string_column_is_read(tmp_path: Path) -> None:
    for kind in [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]:
        with named_case(kind):
            array = pa.array(["a", "b", "a"]).cast(kind)
            assert [row.text for row in rows_of(write_parquet(tmp_path / "a.parquet", text=array))] == ["a", "b", "a"]


def test_files_follow_each_other_and_numbering_goes_on(tmp_path: Path) -> None:
    write(tmp_path / "b.txt", "three")
    write(tmp_path / "a.jsonl", '{"text": "one"}\n{"text": "two"}')
    assert [(row.id, row.text) for row in rows_of(tmp_path)] == [(0, "one"), (1, "two"), (2, "three")]


BAD_LINES = {
    "not JSON": (b'{"text": ', "Line 2 is not valid JSON: "),
    "a list": (b'["a"]', "Line 2 holds a JSON list; an object with columns is required."),
    "nested too deeply": (b"[" * 100_000, "Line 2 is not valid JSON: "),
    "a number too long": (b'{"text": ' + b"1" * 5000 + b"}", "Line 2 is not valid JSON: "),
    "no column": (b'{"txt": "a", "n": 1}', "The row has no column 'text'; it has 'txt', 'n'."),
    "null": (b'{"text": null}', "Column 'text' is null; a string is required."),
    "a number": (b'{"text": 3}', "Column 'text' holds int; a string is required."),
    "not UTF-8": (b'{"text": "\xff"}', "Line 2 is not valid UTF-8: its byte 11, invalid start byte."),
    "half a surrogate pair": (
        b'{"text": "\\ud800"}',
        "The text in column 'text' holds half of a surrogate pair.",
    ),
}


def test_a_bad_line_is_a_row_with_an_error_and_reading_continues(tmp_path: Path) -> None:
    for name in BAD_LINES:
        with named_case(name):
            line, error = BAD_LINES[name]
            file = write(tmp_path / "a.jsonl", b'{"text": "before"}\n' + line + b'\n{"text": "after"}\n')
            before, bad, after = rows_of(file)
            assert (before.text, after.text, after.id) == ("before", "after", 2)
            assert bad.error is not None
            assert bad.error.startswith(error)
            assert bad.id == 1


def test_a_row_without_a_proper_id_is_an_error(tmp_path: Path) -> None:
    advice = "Give every row an id, or number all rows: id_column=''"
    for value, error in (
        ("null", "Column 'key' is null; an id is required."),
        ("-Infinity", "Column 'key' is -inf; an id is required."),
        ('["\\udfff"]', "Column 'key' holds half of a surrogate pair."),
    ):
        file = write(tmp_path / "a.jsonl", f'{{"key": {value}, "text": "a"}}')
        with named_case(value):
            (row,) = rows_of(file, Columns(id="key"))
            assert (row.id, written(row.error or "")) == (None, f"{error}\n{advice}")


def test_bad_cells_of_parquet_are_bad_rows(tmp_path: Path) -> None:
    # Parquet writers do not check strings.
    offsets = pa.array([0, 1, 2, 3], pa.int32()).buffers()[1]
    bad = pa.Array.from_buffers(pa.string(), 3, [None, offsets, pa.py_buffer(b"a\xffc")])
    rows = rows_of(write_parquet(tmp_path / "a.parquet", text=pa.chunked_array([bad, pa.array([None, "e"])])))
    assert [row.text for row in rows] == ["a", "", "c", "", "e"]
    assert rows[1].error == "Column 'text' is not valid UTF-8: its byte 1, invalid start byte."
    assert rows[3].error == "Column 'text' is null; a string is required."


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        *((name, b"x", "Inputs end in .jsonl, .*input_format") for name in ("a.xlsx", "a", "a.parquet.gz")),
        *((name, None, rf"{name} is a named pipe; a job reads files, ") for name in ("a.txt", "a.parquet")),
        ("a.parquet", b"hello", "a.parquet is not a readable Parquet file"),
    ],
)
def test_an_unsuitable_file_is_refused_before_any_work(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    os.mkfifo(tmp_path / name) if content is None else (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        find_inputs([tmp_path / name], columns=TEXT)


def test_inputs_without_any_row_are_refused_before_any_work(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", text=pa.array([], pa.string()))
    for name, content in {"b.csv": "id,text\n", "c.jsonl": "\n \n", "d.txt": "", "e.tsv": "\n"}.items():
        write(tmp_path / name, content)
    for file in sorted(tmp_path.iterdir()):
        with pytest.raises(InputError, match=rf"No input holds a row: .*{file.name}\.\nCheck what wrote them, or name"):
            find_inputs([file], columns=TEXT)
    with pytest.raises(InputError, match=r"No input holds a row: .*a\.parquet, .*b\.csv, .*c\.jsonl, and 2 others\.\n"):
        find_inputs([tmp_path], columns=TEXT)


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"There is no file or directory .*a.txt"):
        find_inputs([tmp_path / "a.txt"], columns=TEXT)
    with pytest.raises(InputError, match=r" holds no file that ends in .jsonl, .*\.parquet"):
        find_inputs([tmp_path], columns=TEXT)
    with pytest.raises(InputError, match=r"No input was given"):
        find_inputs([], columns=TEXT)


@pytest.mark.parametrize(
    ("target", "message"),
    [("/dev/zero", "is a device; a job reads files"), ("/proc/kmsg", "(No input holds a row|cannot be read)")],
)
def test_an_endless_file_is_refused_also_through_a_link(tmp_path: Path, target: str, message: str) -> None:
    if not Path(target).exists():
        pytest.skip(f"there is no {target} here")
    (tmp_path / "a.jsonl").symlink_to(target)
    with pytest.raises(InputError, match=message):
        find_inputs([tmp_path / "a.jsonl"], columns=TEXT)


def test_a_pipe_that_takes_a_files_place_is_not_waited_for(tmp_path: Path) -> None:
    files = find_inputs([write(tmp_path / "a.txt", "x")], columns=TEXT)
    (tmp_path / "a.txt").unlink()
    os.mkfifo(tmp_path / "a.txt")
    with pytest.raises(InputError, match="is a named pipe"):
        list(read_rows(files, columns=TEXT))


def test_a_damaged_parquet_file_stops_the_reading(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    pa.parquet.write_table(pa.table({"text": [str(i) * 50 for i in range(1000)]}), file, compression="zstd")
    content = bytearray(file.read_bytes())
    content[10:200] = bytes(190)
    with pytest.raises(InputError, match=r"a.parquet cannot be read to its end"):
        rows_of(write(file, bytes(content)))


@pytest.mark.parametrize(
    ("values", "columns", "message"),
    [
        ([1], Columns(text="x"), "int64, not strings.\nName another column with text_column"),
        ([[1.5]], Columns(input_ids="x"), "list<.*double>, not lists of integers"),
    ],
)
def test_a_parquet_column_of_another_type_is_refused(
    tmp_path: Path, values: list[object], columns: Columns, message: str
) -> None:
    file = write_parquet(tmp_path / "a.parquet", text=["a"], x=values)
    with pytest.raises(InputError, match=f"Column 'x' of .* holds {message}"):
        find_inputs([file], columns=columns)


LINES = (
    b'\xef\xbb\xbf{"text": "a"}\n\n{"text": "zw\xc3\xb6lf"}\r\n{"text": "\xff"}\n\n\n{"text": 1}\n{"text": "z"}\n \n'
)


@pytest.mark.parametrize("group_rows", [1, 100, 1000])
def test_reading_continues_after_any_row_with_what_comes_next(tmp_path: Path, group_rows: int) -> None:
    write(tmp_path / "a.jsonl", LINES)
    table = pa.table({"text": [str(number) for number in range(600)]})
    pa.parquet.write_table(table, tmp_path / "b.parquet", row_group_size=group_rows)
    write(tmp_path / "c.txt", b"\xef\xbb\xbfone\n\n\xc3\nlast")
    files = find_inputs([tmp_path], columns=TEXT)
    rows = list(read_rows(files, columns=TEXT))
    assert [row.end.row for row in rows] == list(range(1, 5 + 600 + 4 + 1))
    for number in [*range(8), 103, 104, 105, 255 + 5, 256 + 5, 400, *range(602, 609)]:
        assert list(read_rows(files, columns=TEXT, start=rows[number].end)) == rows[number + 1 :]


ENDS = {
    "a.jsonl": (LINES, [1, 3, 4, 7, 8]),
    "a.txt": (b"\xef\xbb\xbfone\r\n\n\xc3\nlast", [1, 2, 3, 4]),
    "a.csv": (b'\xef\xbb\xbftext\r\n"one\r\n\r\ntwo"\r\n\r\nthree\n"last', [4, 6, 7]),
}
"""Name -> a file, and the lines with which its rows end."""


def test_a_row_ends_where_its_last_line_does_however_much_is_read_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for block_bytes in (1, 16, input_files._BLOCK_BYTES):
        monkeypatch.setattr(input_files, "_BLOCK_BYTES", block_bytes)
        for name, (content, last_lines) in ENDS.items():
            with named_case(block_bytes, name):
                before = [b"".join(io.BytesIO(content).readlines()[:line]) for line in last_lines]
                assert [row.end for row in rows_of(write(tmp_path / name, content))] == [
                    Position(offset=len(part), line=line, row=row, checksum=zlib.crc32(part))
                    for row, (line, part) in enumerate(zip(last_lines, before, strict=True), start=1)
                ]


def test_values_of_json_are_those_that_python_reads(tmp_path: Path) -> None:
    values = [
        "-0",
        "-0.0",
        "1e400",
        "NaN",
        f"{2**64}",
        f"-{'9' * 40}",
        "9007199254740993.0",
        "5e-324",
        '{"a": 1, "a": 2}',
    ]
    lines = [f'{{"text": "a", "value": {value}, "text": "b"}}' for value in values]
    rows = rows_of(write(tmp_path / "a.jsonl", "\n".join(lines)), Columns(keep=("value",)))
    # NaN is not equal to itself.
    assert repr([row.kept["value"] for row in rows]) == repr(list(map(json.loads, values)))
    assert {row.text for row in rows} == {"b"}


def test_no_row_group_is_read_that_was_read_before(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    pa.parquet.write_table(pa.table({"text": [str(i) * 50 for i in range(200)]}), file, row_group_size=100)
    files = find_inputs([file], columns=TEXT)
    rows = list(read_rows(files, columns=TEXT))
    content = bytearray(file.read_bytes())
    content[10:200] = bytes(190)
    file.write_bytes(content)
    with pytest.raises(InputError, match="cannot be read to its end"):
        list(read_rows(files, columns=TEXT))
    assert list(read_rows(files, columns=TEXT, start=rows[99].end)) == rows[100:]


@pytest.mark.parametrize(
    ("name", "shown", "extra"),
    [("a.jsonl", '{"text": "after"}', extra) for extra in (0, 1)]
    + [("a.txt", "after", extra) for extra in (0, 3 * 2**20)],
)
def test_a_line_beyond_the_limit_is_a_bad_row_and_one_below_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, shown: str, extra: int
) -> None:
    monkeypatch.setattr(input_files, "MAX_LINE_BYTES", 1000)
    before, after = ('{"text": "', '"}') if name == "a.jsonl" else ("", "")
    text = "x" * (1000 - len(before + after) + extra)
    file = write(tmp_path / name, f"{before}{text}{after}\n{shown}")
    first, second = rows_of(file)
    # The line's end is not counted where it makes the difference.
    if extra <= 0:
        assert first.text == text
    else:
        assert (
            first.error
            == "Line 1 has more than 1000 bytes, the maximum length of a line.\nSplit its text into several rows."
        )
    assert (second.text, second.id, second.end.offset) == ("after", 1, file.stat().st_size)


def test_a_text_of_nothing_but_control_characters_is_a_bad_row_and_any_other_a_good_one(tmp_path: Path) -> None:
    bad = ["\x00", " \x01\x1b \n\x7f", "\u200b\u200e", "\x85\x9f", "\t\x00\t"]
    good = ["", " ", "\n\t\r\n", "\x00a", "\x00.", "\u200bא", "\U0001f600"]
    rows = rows_of(write(tmp_path / "a.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in bad + good)))
    assert [row.error for row in rows[:5]] == ["The text in column 'text' holds only control characters."] * 5
    assert [(row.text, row.error) for row in rows[5:]] == [(text, None) for text in good]


@pytest.mark.pinned  # pyarrow 25 reads no missing list of a fixed size
@pytest.mark.parametrize("kind", [pa.large_list(pa.int64()), pa.list_(pa.uint16(), 2), pa.null()], ids=str)
def test_lists_of_integers_are_read_as_ids(tmp_path: Path, kind: pa.DataType) -> None:
    columns = Columns(input_ids="ids")
    values = [None, None] if kind == pa.null() else [[1, 2], None]
    file = write_parquet(tmp_path / "a.parquet", ids=pa.array(values, kind))
    first, second = rows_of(file, columns)
    assert first.input_ids == values[0]
    assert second.error == "Column 'ids' is null; a list of integers is required."
