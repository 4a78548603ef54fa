"""Texts to train or to measure with: rows of a file, or the documents of a folder."""

from __future__ import annotations

import codecs
import glob
import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path, PurePath
from typing import NamedTuple

from hdruntime.errors import InputError, Setting, write
from hdruntime.folders import files_below, require_readable
from hdruntime.jobs.input_files import MAX_LINE_BYTES, InputFile, RowFormat, format_of
from hdruntime.jobs.input_search import find_inputs
from hdruntime.jobs.kept_columns import kept_value
from hdruntime.jobs.row_reader import read_rows
from hdruntime.jobs.rows import ID, Columns
from hdruntime.jobs.saved_datasets import without_notes
from hdruntime.jobs.sources import LocalFile, read_errors_explained

logger = logging.getLogger(__name__)

_DEFAULT_COLUMN = "text"
_DOCUMENTS = (".txt", ".md", ".rst")
"""Endings of files of a folder that are one text each."""

_COMPRESSIONS = (".gz", ".zst")

_MOST_NAMES = 3
"""Names of files that are not read in a warning."""


class NamedText(NamedTuple):
    """A text and its name: its path below the folder, or its row's id, or the file and the row's number."""

    name: str
    text: str


def read_texts(source: Path, *, column: str | None = None, parameter: str = "texts") -> Iterator[NamedText]:
    """The texts of a file or of all files below a folder, in order, without blank ones. Rows that cannot be read are
    left out, and one warning per file counts them.

    Args:
        source: a .jsonl, .csv, .tsv, .parquet, .arrow or .txt file (one text per line), compressed ones included; or a
            folder of such files, in which each .txt, .md and .rst file is one text.
        column: the column that holds the texts; None for ``text``.
        parameter: name of the parameter that names the source, for messages.
    """
    source = Path(source)
    columns = Columns(text=column or _DEFAULT_COLUMN, id="")
    is_blank = True
    for text in _texts_of_folder(source, columns, parameter) if source.is_dir() else _texts_of_file(source, columns):
        if text.text.strip():
            is_blank = False
            yield text
    if is_blank:
        raise InputError(
            f"{source} holds no text that is not blank.",
            hint=("Name another file or folder with ", Setting(parameter), "."),
        )


def _texts_of_folder(folder: Path, columns: Columns, parameter: str) -> Iterator[NamedText]:
    known, unknown = files_below(folder, is_known=lambda path: _is_document(str(path)) or bool(format_of(str(path))))
    if unknown:
        shown = ", ".join(map(str, unknown[:_MOST_NAMES])) + (", ..." if len(unknown) > _MOST_NAMES else "")
        logger.warning("%d files below %s are not read: no texts have their endings: %s", len(unknown), folder, shown)
    sources = list(map(LocalFile, known))
    if not sources:
        raise InputError(
            f"{folder} holds no texts: no .txt, .md, .rst, .jsonl, .csv, .tsv, .parquet or .arrow file.",
            hint=("Name another folder, or a file, with ", Setting(parameter), "."),
        )
    for source in without_notes(sources):
        assert isinstance(source, LocalFile)
        if _is_document(source.path):
            yield NamedText(source.file.relative_to(folder).as_posix(), _document(source))
        else:
            yield from _rows(source.file, columns)


def _texts_of_file(file: Path, columns: Columns) -> Iterator[NamedText]:
    # Files of a pattern are a job's inputs.
    if os.path.lexists(file) or not glob.glob(str(file), recursive=True):
        require_readable(file)
    # Lines of a .txt file are rows, as in jobs.
    if _is_document(str(file)) and format_of(str(file)) is None:
        yield NamedText(file.name, _document(LocalFile(file)))
    else:
        yield from _rows(file, columns)


def _rows(file: Path, columns: Columns) -> Iterator[NamedText]:
    files = _found(file, columns)
    left_out: list[str] = []
    for row in read_rows(files, columns=replace(columns, keep=(ID,))):
        if row.error is not None:
            left_out.append(write(row.error, str))
            continue
        own = kept_value(row.kept, ID)
        yield NamedText(f"{file.name}:{row.end.row}" if own is None else str(own), row.text)
    if left_out:
        logger.warning("%d rows of %s are left out; the first: %s", len(left_out), file, left_out[0])


def _found(file: Path, columns: Columns) -> list[InputFile]:
    if file.exists() and format_of(str(file)) is None:
        raise InputError(
            f"{file} has no known format: its name ends in {file.suffix!r}.",
            hint="Texts are in .jsonl, .csv, .tsv, .parquet, .arrow and .txt files, and each .md and .rst file is one.",
        )
    return find_inputs([file], columns=columns)


def _document(source: LocalFile) -> str:
    with read_errors_explained(source.name):
        version = source.version()
        file = InputFile(source=source, format=RowFormat.TEXT, version=version, types={}, partitions={})
        with file.opened() as stream:
            content = stream.read(MAX_LINE_BYTES + 1)
    if len(content) > MAX_LINE_BYTES:
        raise InputError(
            f"{source.name} has more than {MAX_LINE_BYTES} bytes, the maximum length of a text.",
            hint="Split it into several files.",
        )
    try:
        return content.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        raise InputError(
            f"{source.name} is not valid UTF-8: its byte {error.start + 1}, {error.reason}.",
            hint="Convert it (iconv -f latin1 -t utf8), or move it away.",
        ) from error


def _is_document(path: str) -> bool:
    name = PurePath(path.lower())
    suffix = PurePath(name.stem).suffix if name.suffix in _COMPRESSIONS else name.suffix
    return suffix in _DOCUMENTS
