"""Inputs of every kind, from every place: formats, compressions, directories, patterns, URLs and the standard input."""

from __future__ import annotations

import csv
import gzip
import io
import json
import logging
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet
import pytest

from hdruntime.bundle.reader import Bundle
from hdruntime.errors import InputChangedError, InputError, MissingDependencyError
from hdruntime.errors import write as written
from hdruntime.jobs import plan_job
from hdruntime.jobs.input_files import RowFormat
from hdruntime.jobs.input_search import FIRST_ROWS, find_inputs, resolved_columns
from hdruntime.jobs.progress import JobProgress
from hdruntime.jobs.row_reader import read_rows
from hdruntime.jobs.rows import Columns, Row
from support.comparators import named_case
from support.job_runs import read, run_words, stop_at, write_rows

KEYED = Columns(id="key")
TEXTS = ["one", "", 'a "quoted", text', "zwölf", "two\nlines", "tab\there"]


def rows_of(*inputs: str | Path, columns: Columns = KEYED, input_format: RowFormat | None = None) -> list[Row]:
    files = find_inputs(inputs, columns=columns, input_format=input_format)
    return list(read_rows(files, columns=resolved_columns(columns, files)))


def content_of(ending: str, texts: list[str] = TEXTS) -> bytes:
    """A file of that format with the columns ``key`` and ``text``."""
    rows = [{"key": f"k{number}", "text": text} for number, text in enumerate(texts)]
    if ending == ".parquet":
        sink = io.BytesIO()
        pa.parquet.write_table(pa.Table.from_pylist(rows), sink)
        return sink.getvalue()
    if ending in (".csv", ".tsv"):
        table = io.StringIO()
        writer = csv.DictWriter(table, ["key", "text"], dialect="excel-tab" if ending == ".tsv" else "excel")
        writer.writeheader()
        writer.writerows(rows)
        return table.getvalue().encode()
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    # Two members, as where compressed files were concatenated.
    ".gz": lambda data: gzip.compress(data[:50]) + gzip.compress(data[50:]),
    ".zst": lambda data: bytes(pa.Codec("zstd").compress(data)),
}
ENDINGS = [".parquet"] + [
    f"{ending}{compression}" for ending in (".jsonl", ".ndjson", ".JSON", ".csv", ".tsv") for compression in COMPRESSORS
]


def write(path: Path, texts: list[str] = TEXTS) -> Path:
    ending, *compression = path.suffixes
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(COMPRESSORS["".join(compression)](content_of(ending.lower(), texts)))
    return path


def test_every_format_gives_the_same_rows_and_continues_after_any_of_them(tmp_path: Path) -> None:
    for ending in ENDINGS:
        with named_case(ending):
            files = find_inputs([write(tmp_path / f"a{ending}")], columns=KEYED)
            rows = list(read_rows(files, columns=KEYED))
            assert [(row.id, row.text) for row in rows] == [(f"k{number}", text) for number, text in enumerate(TEXTS)]
            for row in rows:
                assert list(read_rows(files, columns=KEYED, start=row.end)) == rows[row.end.row :]


@pytest.mark.parametrize(
    ("record", "error"),
    [
        (b"k,a,b\n", "Line 3 ends a record of 3 cells; the header has 2."),
        (b'k,"a\n\xff\nb"\n', "Line 4 is not valid UTF-8: its byte 1, invalid start byte."),
        (b"k," + b"x" * 300 + b"\n", "Line 3 has more than 100 bytes"),
        (
            b'k,"' + b"x" * 60 + b"\n" + b"x" * 60 + b'"\n',
            "Line 4 is not valid CSV: field larger than field limit (100)",
        ),
    ],
    ids=["cells", "UTF-8 in quotes", "long line", "long field"],
)
def test_a_bad_record_of_csv_is_a_row_with_an_error_and_reading_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: bytes, error: str
) -> None:
    for module in ("input_files", "row_reader"):
        monkeypatch.setattr(f"hdruntime.jobs.{module}.MAX_LINE_BYTES", 100)
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbfkey,text\n1,before\n" + record + b"\n2,after\n")
    before, bad, after = rows_of(tmp_path / "a.csv")
    assert (before.text, after.text, after.id) == ("before", "after", "2")
    assert str(bad.error).startswith(error)


OPEN_QUOTES = {
    "the last record": ('id,text\n1,a\n2,"b', 3, 3),
    "before other records": ('id,text\n1,"a\n2,b\n3,c\n', 2, 4),
    "after a cell of two lines": ('id,note,text\n1,"a\nb","c\n2,d,e\n', 3, 4),
    "doubled": ('id,text\n1,"a""\n2,b\n', 2, 3),
    "a lone one": ('id,text\n1,"\n', 2, 2),
    "line ends of Windows": ('id,text\r\n1,"a\r\n2,b\r\n', 2, 3),
    "not UTF-8": ('id,text\n1,"a\n2,\udcff\n', 2, 3),
}


def test_a_quotation_mark_that_is_never_closed_is_a_row_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "b.csv").write_text("id,text\n9,other\n")
    for name, (content, opening, last) in OPEN_QUOTES.items():
        with named_case(name):
            (tmp_path / "a.csv.gz").write_bytes(gzip.compress(content.encode(errors="surrogateescape")))
            *_, bad, other = rows_of(tmp_path / "a.csv.gz", tmp_path / "b.csv", columns=Columns())
            reason = f"Line {opening} opens a quotation mark that is never closed: it takes in all up to line {last},"
            assert str(bad.error).startswith(reason)
            assert (other.id, other.text, other.error) == ("9", "other", None)


def test_a_quotation_mark_that_the_header_opens_is_refused_before_any_work(tmp_path: Path) -> None:
    for content in ('id,"text\n1,a\n', 'id,"text\n1,"a"\n'):
        (tmp_path / "a.csv").write_text(content)
        with pytest.raises(InputError, match=r"The header of .*a\.csv cannot be read: .*line 1 opens|Line 1 opens"):
            find_inputs([tmp_path / "a.csv"], columns=Columns())


MISSING_COLUMNS = [
    (Columns(text="body"), "text_column"),
    (Columns(text_pair="body"), "text_pair_column"),
    (Columns(id="body"), "id_column"),
    (Columns(keep=("body",)), "keep_columns"),
]


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl.gz", "a.parquet"])
def test_a_missing_column_is_refused_with_a_list_of_columns(tmp_path: Path, name: str) -> None:
    for columns, option in MISSING_COLUMNS:
        with named_case(option):
            message = rf"{name} has no column 'body'; its columns are key, text\.\nName one of them with {option}"
            with pytest.raises(InputError, match=message):
                find_inputs([write(tmp_path / name)], columns=columns)


def test_a_json_array_is_refused_with_the_command_to_convert_it(tmp_path: Path) -> None:
    for encoding in ("utf-8", "utf-8-sig"):
        (tmp_path / "a.json").write_text(' [{"text": "one"},\n {"text": "two"}]', encoding)
        with pytest.raises(InputError, match=r"a.json holds one JSON array; .*\nConvert it: jq -c '\.\[\]'"):
            find_inputs([tmp_path / "a.json"], columns=Columns())


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_truncated_or_invalid_compressed_data_end_the_reading(tmp_path: Path, ending: str) -> None:
    file = tmp_path / f"a.txt{ending}"
    compressed = COMPRESSORS[ending]("".join(f"{number}\n" for number in range(10**5)).encode())
    file.write_bytes(compressed[: len(compressed) // 2])
    with pytest.raises(InputError, match=rf"a.txt{ending} cannot be read: .*[Tt]runcated"):
        rows_of(file, columns=Columns())
    file.write_bytes(b"no such data")
    with pytest.raises(InputError, match=rf"a.txt{ending} cannot be read"):
        rows_of(file, columns=Columns())


def test_the_format_can_be_given(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    write(tmp_path / "a.csv").rename(tmp_path / "in" / "a.export")
    assert [row.text for row in rows_of(tmp_path / "in", input_format=RowFormat.CSV)] == TEXTS


def test_directories_are_read_with_all_below_them_in_order(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("b/c/x.jsonl", "a.jsonl.gz", "b/.hidden/x.jsonl", "b/_temporary/0/x.jsonl", "b.csv"):
        write(tmp_path / "in" / name, [name])
    for name in ("notes.md", "_SUCCESS", "empty.jsonl/_SUCCESS"):
        (tmp_path / "in" / "b" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "in" / "b" / name).touch()
    with caplog.at_level(logging.WARNING):
        assert [row.text for row in rows_of(tmp_path / "in")] == ["a.jsonl.gz", "b/c/x.jsonl", "b.csv"]
    assert "notes.md is skipped" in caplog.text
    assert "_SUCCESS" not in caplog.text


def test_a_pattern_stands_for_its_matches(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl", "sub/c.jsonl"):
        write(tmp_path / name, [name])
    for pattern, found in (
        ("?.jsonl", ["a.jsonl", "b.jsonl"]),
        ("**/*.jsonl", ["a.jsonl", "b.jsonl", "sub/c.jsonl"]),
        ("[b-s]*", ["b.jsonl", "sub/c.jsonl"]),
    ):
        with named_case(pattern):
            assert [row.text for row in rows_of(f"{tmp_path}/{pattern}")] == found
    write(tmp_path / "[a].jsonl", ["the name of a file takes precedence"])
    assert [row.text for row in rows_of(f"{tmp_path}/[a].jsonl")] == ["the name of a file takes precedence"]
    with pytest.raises(InputError, match="There is no file or directory"):
        rows_of(f"{tmp_path}/*.parquet")


@pytest.mark.parametrize("ending", [".parquet", ".jsonl.gz"])
def test_partitions_are_columns(tmp_path: Path, ending: str) -> None:
    for number, where in enumerate(("lang=en/year=2024", "lang=d%20e/year=2025")):
        write(tmp_path / where / f"a{ending}", [f"text {number}"])
    columns = Columns(id="year", keep=("lang", "key"))
    rows = rows_of(tmp_path, columns=columns)
    assert [(row.id, row.text, row.kept["lang"]) for row in rows] == [(2025, "text 1", "d e"), (2024, "text 0", "en")]
    if ending != ".parquet":  # else it stays a column
        assert {row.kept["key"] for row in rows} == {"k0"}
    assert [row.text for row in rows_of(f"{tmp_path}/lang=en", columns=Columns(text="lang"))] == ["en"]


@pytest.fixture
def memory() -> Iterator[Callable[[str, bytes], str]]:
    """Put a file into fsspec's store in memory: (name, content) -> URL."""
    store = fsspec.filesystem("memory")
    store.store.clear()

    def put(name: str, content: bytes) -> str:
        store.pipe(f"/{name}", content)
        return f"memory://{name}"

    yield put
    store.store.clear()


@pytest.mark.parametrize("ending", [".parquet", ".jsonl.zst"])
def test_a_url_is_read_like_a_file(memory: Callable[[str, bytes], str], tmp_path: Path, ending: str) -> None:
    content = write(tmp_path / f"a{ending}").read_bytes()
    url = memory(f"bucket/lang=en/a{ending}", content)
    memory("bucket/_SUCCESS", b"")
    for name in (url, "memory://bucket", f"memory://bucket/*/*{ending}"):
        assert [(row.id, row.text) for row in rows_of(name)] == [(f"k{n}", text) for n, text in enumerate(TEXTS)]
    assert rows_of(url, columns=Columns(keep=("lang",)))[0].kept == {"lang": "en"}
    with pytest.raises(InputError, match="There is no file or directory memory://none"):
        rows_of("memory://none")


def test_a_job_over_a_url_continues_and_detects_a_change(
    bundle: Bundle, memory: Callable[[str, bytes], str], tmp_path: Path
) -> None:
    texts = [f"{number:03}" for number in range(50)]
    inputs = [memory("in/a.jsonl", content_of(".jsonl", texts))]
    output = tmp_path / "out.jsonl"
    run_words(bundle, inputs, tmp_path / "whole.jsonl")
    with pytest.raises(KeyboardInterrupt):
        run_words(bundle, inputs, output, on_progress=stop_at(20))
    assert run_words(bundle, inputs, output).resumed_rows == 20
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    output.unlink()

    def change(progress: JobProgress) -> None:
        if progress.rows == 20:
            memory("in/a.jsonl", content_of(".jsonl", [text[::-1] for text in texts]))

    with pytest.raises(InputChangedError, match=r"a\.jsonl has changed: it was written to, though its size"):
        run_words(bundle, inputs, output, on_progress=change)
    with pytest.raises(InputError, match=r"has an unfinished job.*its input memory:///in/a\.jsonl has changed since"):
        plan_job(bundle, inputs, output)


def test_a_protocol_whose_package_is_missing_is_answered_with_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fsspec.register_implementation("nostore", "nostorefs.FileSystem", errtxt="Install nostorefs", clobber=True)
    message = "nostore://bucket/a.jsonl needs the package 'nostorefs', .*\nInstall it with: pip install nostorefs"
    with pytest.raises(MissingDependencyError, match=message):
        rows_of("nostore://bucket/a.jsonl")
    with pytest.raises(InputError, match="nothing://a is not understood: Protocol not known: nothing"):
        rows_of("nothing://a")


@pytest.fixture
def standard_input(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """Set what the standard input holds."""
    return lambda content: monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def test_a_job_of_the_standard_input_continues_when_the_same_comes_again(
    bundle: Bundle, standard_input: Callable[[bytes], None], tmp_path: Path
) -> None:
    rows = write_rows(tmp_path / "in.jsonl", [f"{number:03}" for number in range(50)]).read_bytes()
    output = tmp_path / "out.jsonl"
    run_words(bundle, [tmp_path / "in.jsonl"], tmp_path / "whole.jsonl")
    standard_input(rows)
    with pytest.raises(KeyboardInterrupt):
        run_words(bundle, ["-"], output, on_progress=stop_at(20))
    standard_input(rows.replace(b"049", b"940"))
    with pytest.raises(InputError, match="its input - has changed since: it was written to, though its size is"):
        run_words(bundle, ["-"], output)
    standard_input(rows)
    assert run_words(bundle, ["-"], output).resumed_rows == 20
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


@pytest.mark.parametrize("kind", [RowFormat.TEXT, RowFormat.CSV, RowFormat.PARQUET])
def test_the_standard_input_may_be_of_any_format(
    standard_input: Callable[[bytes], None], bundle: Bundle, tmp_path: Path, kind: RowFormat
) -> None:
    texts = ["long", "read"]
    standard_input(b"long\nread\n" if kind is RowFormat.TEXT else content_of(f".{kind.value}", texts))
    run_words(bundle, ["-"], tmp_path / "out.jsonl", input_format=kind)
    assert [row["tokens"] for row in read(tmp_path / "out.jsonl")] == [1, 1]


def test_a_standard_input_that_has_no_rows_or_comes_twice_is_refused(
    standard_input: Callable[[bytes], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    standard_input(b"")
    with pytest.raises(InputError, match="No input holds a row: -"):
        rows_of("-")
    with pytest.raises(InputError, match=r"The input - could not be copied to .*/gone: No such file or directory"):
        find_inputs(["-"], columns=KEYED, spool=tmp_path / "gone")
    with monkeypatch.context() as read_only:
        read_only.setattr(tempfile, "tempdir", None)
        read_only.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "gone")])
        with pytest.raises(InputError, match=r"No usable temporary directory(.|\n)*name another directory in TMPDIR"):
            find_inputs(["-"], columns=KEYED)
    with pytest.raises(InputError, match="The input - is named twice"):
        rows_of("-", "-")
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(InputError, match="The input - is closed, or a terminal"):
        rows_of("-")


def test_the_column_id_is_the_rows_id_and_every_input_needs_it(tmp_path: Path) -> None:
    first = tmp_path / "a.jsonl"
    first.write_text('{"id": 7, "text": "one"}\n{"text": "two"}\n')
    assert [row.id for row in rows_of(first, columns=Columns())] == [7, None]
    assert [row.id for row in rows_of(first, columns=Columns(id=""))] == [0, 1]
    (tmp_path / "b.txt").write_text("two")
    for second in (tmp_path / "b.txt", write(tmp_path / "b.csv", ["two"]), write(tmp_path / "b.parquet", ["two"])):
        advice = r"with id_column, or number all rows: id_column=''\."
        with pytest.raises(InputError, match=rf"{second.name} has no column 'id'; .*\n.*{advice}"):
            rows_of(first, second, columns=Columns())
        assert [row.id for row in rows_of(first, second, columns=Columns(id=""))] == [0, 1, 2]


def test_an_id_that_comes_after_the_first_rows_is_an_error_of_its_row(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"text": "one"}\n' * FIRST_ROWS + '{"id": "x", "text": "two"}\n{"text": "three"}'
    )
    *_, before, late, after = rows_of(tmp_path / "a.jsonl", columns=Columns())
    assert (before.error, after.error, after.id) == (None, None, FIRST_ROWS + 1)
    assert written(late.error or "").startswith(
        "The row has the column 'id', which none of the first rows has.\nGive every row"
    )
    *_, numbered, _ = rows_of(tmp_path / "a.jsonl", columns=Columns(id=""))
    assert (numbered.error, numbered.text) == (None, "two")


def test_two_columns_of_one_name_are_refused_where_they_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,text,id\n1,one,2\n")
    for columns, option in ((Columns(), "id_column"), (Columns(id="", keep=None), "keep_columns")):
        with pytest.raises(InputError, match=rf"has 2 columns 'id'; .*\nRename one, or name another with {option}"):
            rows_of(tmp_path / "a.csv", columns=columns)
    assert [row.text for row in rows_of(tmp_path / "a.csv", columns=Columns(id=""))] == ["one"]


def test_files_without_rows_change_nothing(tmp_path: Path) -> None:
    write(tmp_path / "part=1" / "a.parquet")
    columns = Columns(id="part", keep=None)
    before = find_inputs([tmp_path], columns=columns)
    empty = {"a.csv": b"", "b.csv": b"other\n", "c.jsonl": b"\n \n", "d.jsonl.gz": gzip.compress(b""), "e.txt": b""}
    (tmp_path / "part=one").mkdir()
    for name, content in {**empty, "f.parquet": b"", "g.tsv.zst": b"", "h.jsonl": b"\xef\xbb\xbf"}.items():
        (tmp_path / "part=one" / name).write_bytes(content)
    pa.parquet.write_table(pa.table({"text": pa.array([], pa.int8()), "new": pa.nulls(0)}), tmp_path / "0.parquet")
    found = find_inputs([tmp_path], columns=columns)
    assert [file for file in found if file.rows != 0] == before
    assert len(found) == 10
    assert resolved_columns(columns, found) == resolved_columns(columns, before)


def test_files_without_rows_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "a.csv")
    for name in "bcdef":
        (tmp_path / f"{name}.csv").write_text("key,text\n")
    with caplog.at_level(logging.WARNING):
        rows_of(tmp_path)
    named = ", ".join(str(tmp_path / f"{name}.csv") for name in "bcd")
    assert caplog.messages == [f"5 of 6 inputs hold no rows: {named}, and 2 others"]
