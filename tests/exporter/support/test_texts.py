"""Texts to train or measure with, of files and folders."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from hdexport.support.texts import NamedText, read_texts
from hdruntime.errors import InputError


def test_files_of_a_folder_are_one_text_each(tmp_path):
    (tmp_path / "b.txt").write_text("two\nlines\n")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.md").write_bytes(b"\xef\xbb\xbfmarked")
    (tmp_path / "deep" / "c.rst.gz").write_bytes(gzip.compress(b"compressed"))
    (tmp_path / "rows.jsonl").write_text('{"text": "a row"}\n{"text": " "}\n{"text": "another"}\n')
    (tmp_path / ".hidden.txt").write_text("hidden")
    assert list(read_texts(tmp_path)) == [
        NamedText("b.txt", "two\nlines\n"),
        NamedText("deep/a.md", "marked"),
        NamedText("deep/c.rst.gz", "compressed"),
        NamedText("rows.jsonl:1", "a row"),
        NamedText("rows.jsonl:3", "another"),
    ]


def test_files_of_other_endings_are_named_and_not_read(tmp_path, caplog):
    (tmp_path / "a.txt").write_text("words")
    (tmp_path / "page.docx").write_bytes(b"PK")
    os.mkfifo(tmp_path / "pipe.log")
    assert list(read_texts(tmp_path)) == [NamedText("a.txt", "words")]
    assert f"2 files below {tmp_path} are not read: no texts have their endings" in caplog.text
    assert "page.docx" in caplog.text
    assert "pipe.log" in caplog.text


@pytest.mark.parametrize("ending", ["jsonl.gz", "tsv", "parquet"])
def test_rows_of_a_file_are_texts(tmp_path, ending):
    file = tmp_path / f"texts.{ending}"
    rows = [{"id": "one", "body": "first"}, {"id": "two", "body": "second"}]
    if ending == "parquet":
        pa.parquet.write_table(pa.Table.from_pylist(rows), file)
    elif ending == "jsonl.gz":
        file.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    else:
        file.write_text("".join("\t".join(cells) + "\n" for cells in (rows[0], *(row.values() for row in rows))))
    assert list(read_texts(file, column="body")) == [NamedText("one", "first"), NamedText("two", "second")]


def test_lines_of_a_text_file_are_texts_and_a_document_is_one(tmp_path):
    (tmp_path / "lines.txt").write_text("one\n\nthree\n")
    (tmp_path / "page.md").write_text("# Title\n\nText\n")
    assert list(read_texts(tmp_path / "lines.txt")) == [
        NamedText("lines.txt:1", "one"),
        NamedText("lines.txt:3", "three"),
    ]
    assert list(read_texts(tmp_path / "page.md")) == [NamedText("page.md", "# Title\n\nText\n")]


def test_rows_that_cannot_be_read_are_left_out_and_counted(tmp_path, caplog):
    file = tmp_path / "texts.jsonl"
    file.write_text('{"text": "good"}\n{"text": 7}\nnot json\n')
    assert list(read_texts(file)) == [NamedText("texts.jsonl:1", "good")]
    assert "2 rows of" in caplog.text
    assert "Column 'text' holds int" in caplog.text


def _write(file: Path, content: bytes) -> Path:
    file.write_bytes(content)
    return file


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (lambda path: path, "holds no texts: no .txt, .md"),
        (
            lambda path: _write(path / "a.csv", b"id,body\n1,x\n"),
            "has no column 'text'; its columns are id, body.\nName one of them with text_column.",
        ),
        (lambda path: _write(path / "a.md", b" \n"), "holds no text that is not blank"),
        (lambda path: _write(path / "a.md", b"caf\xe9"), "is not valid UTF-8: its byte 4"),
    ],
)
def test_unusable_sources_are_explained(tmp_path, source, message):
    with pytest.raises(InputError, match=message):
        list(read_texts(source(tmp_path)))
