"""Finds the inputs of a job, checks them before any work, and reads their columns."""

from __future__ import annotations

import codecs
import contextlib
import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

import pyarrow as pa

from hdruntime.errors import InputError, Setting, joined
from hdruntime.jobs.arriving import ArrivingInput
from hdruntime.jobs.arrow_columns import INFERRED_TYPE
from hdruntime.jobs.input_files import InputFile, RowFormat, arrow_batches, format_of, opened_parquet
from hdruntime.jobs.row_reader import csv_records, is_encodable, read_values
from hdruntime.jobs.rows import ID, Columns, Position
from hdruntime.jobs.saved_datasets import without_notes
from hdruntime.jobs.sources import LocalFile, Source, find_sources, read_errors_explained

logger = logging.getLogger(__name__)

FIRST_ROWS = 100
"""Rows of a JSON Lines file that define its columns."""

_SUFFIXES = ".jsonl, .ndjson, .json, .csv, .tsv, .txt (each also with .gz or .zst), .parquet or .arrow"

_MAX_NAMES = 3
"""Names of files without rows in a message."""

_KEEP = Setting("keep_columns")
_ROW_ID = Setting("id_column")
_INPUT_IDS = Setting("input_ids_column")
_SPANS = Setting("late_chunking")
"""The setting that names the column of chunks."""

_APART = (pa.types.is_floating, pa.types.is_decimal, pa.types.is_string, pa.types.is_uint64)
"""Types whose common type with others would change values: large integers and decimals as floats, texts as bytes."""

_OTHER_VALUES: dict[Setting, tuple[str | Setting, ...]] = {
    _SPANS: (", or set it to tokens:256 or sentences",),
    _ROW_ID: (", or number all rows: ", Setting("id_column", "")),
}
"""Setting -> its value besides a column."""


def find_inputs(
    names: Sequence[str | Path],
    *,
    columns: Columns,
    input_format: RowFormat | None = None,
    spool: Path | None = None,
    wait_seconds: float | None = None,
) -> list[InputFile]:
    """The files to read, in order: the named files, files below directories, and matches of patterns.

    Checks everything that is known without reading all rows: the files exist, can be opened, and have the columns. A
    file without rows has `rows` 0 and no columns, even if its schema names some; it needs none.

    Args:
        names: paths, URLs, patterns, and ``-`` for the standard input.
        input_format: format of all files; None: by the suffixes of their names, for the standard input JSON Lines.
        spool: directory for a copy of the standard input; None for the default of temporary files.
        wait_seconds: how long a row of the standard input may wait for others before it is run, if the standard input
            is to be read while it stays open; None: it is copied to its end first.
    """
    if not names:
        raise InputError("No input was given. Name at least one file or directory.")
    if list(map(str, names)).count("-") > 1:
        raise InputError("The input - is named twice, but the standard input can be read only once.")
    sources: list[Source] = []
    for name in names:
        if str(name) == "-" and wait_seconds is not None:
            sources.append(ArrivingInput(wait_seconds=wait_seconds))
            continue
        of_name = find_sources(name, known=lambda path: bool(input_format or format_of(path)), spool=spool)
        if not of_name:
            raise InputError(f"{name} holds no file that ends in {_SUFFIXES}.")
        sources += of_name
    sources = without_notes(sources)
    files = _with_partitions([_found_file(source, columns, input_format) for source in sources])
    _require_rows(files, inputs=names)
    resolved = replace(columns, id=_id_column(columns, files))
    for file in files:
        if file.rows != 0:
            _check_columns(file, resolved)
    return files


def resolved_columns(columns: Columns, files: Sequence[InputFile]) -> Columns:
    """The columns with names of the id, if an input has one, and of kept columns; an `id` that is None numbers rows."""
    row_id = _id_column(columns, files)
    of_files = dict.fromkeys(name for file in files for name in file.columns)
    keep = tuple(name for name in dict.fromkeys(of_files if columns.keep is None else columns.keep) if name != row_id)
    return replace(columns, id=row_id, keep=keep, keeps_all=columns.keep is None)


def _id_column(columns: Columns, files: Sequence[InputFile]) -> str | None:
    return ID if columns.id is None and any(ID in file.columns for file in files) else columns.id


def fields_of_columns(names: Sequence[str], files: Sequence[InputFile]) -> list[pa.Field]:
    """Columns of the inputs as columns of the output.

    A field whose type the inputs do not define has the metadata `INFERRED_TYPE`.
    """
    return [_field(name, [file.types.get(name) for file in files if name in file.columns]) for name in names]


def _field(name: str, kinds: Sequence[pa.DataType | None]) -> pa.Field:
    plain = [kind.value_type if pa.types.is_dictionary(kind) else kind for kind in kinds if kind is not None]
    of_values = [kind for kind in plain if not pa.types.is_null(kind)]
    if len(plain) == len(kinds) and not any(len(set(map(is_one, of_values))) > 1 for is_one in _APART):
        with contextlib.suppress(pa.ArrowException):  # types without a common type
            schemas = [pa.schema([(name, kind)]) for kind in plain]
            field = pa.unify_schemas(schemas, promote_options="permissive").field(0)
            # Record batches are kept one by one, without dictionaries.
            if "dictionary" not in str(field.type):
                return field
    return pa.field(name, pa.string(), metadata=INFERRED_TYPE)


def _with_partitions(files: Sequence[InputFile]) -> list[InputFile]:
    """The files with the columns of their directories; files without rows do not count."""
    partitions = iter(_partitions([file.source.path for file in files if file.rows != 0]))
    return [_with_partition(file, *next(partitions)) if file.rows != 0 else file for file in files]


def _with_partition(file: InputFile, partitions: Mapping[str, object], types: Mapping[str, pa.DataType]) -> InputFile:
    # A column of the file itself takes precedence.
    own = {name: value for name, value in partitions.items() if name not in file.columns}
    return replace(file, columns=(*file.columns, *own), types={**types, **file.types}, partitions=own)


def _require_rows(files: Sequence[InputFile], *, inputs: Sequence[str | Path]) -> None:
    # A saved dataset without rows has no data file.
    empty = [file.name for file in files if file.rows == 0] if files else list(map(str, inputs))
    others = f", and {len(empty) - _MAX_NAMES} others" if len(empty) > _MAX_NAMES else ""
    names = ", ".join(empty[:_MAX_NAMES]) + others
    if len(empty) == len(files) or not files:
        raise InputError(f"No input holds a row: {names}.", hint="Check what wrote them, or name other inputs.")
    if empty:
        logger.warning("%d of %d inputs hold no rows: %s", len(empty), len(files), names)


def _partitions(paths: Sequence[str]) -> list[tuple[dict[str, object], dict[str, pa.DataType]]]:
    """The values and types of partition columns of each path, from directories such as ``lang=en``."""
    if not any("=" in path for path in paths):
        return [({}, {})] * len(paths)
    import pyarrow.dataset as ds  # takes longer to import than all the rest of pyarrow

    options = ds.FileSystemFactoryOptions(partitioning=ds.HivePartitioning.discover(), partition_base_dir="")
    factory = ds.FileSystemDatasetFactory(pa.fs.LocalFileSystem(), list(paths), ds.ParquetFileFormat(), options)
    schema = factory.inspect(fragments=0)
    partitioning = ds.partitioning(schema, flavor="hive")
    partitions = []
    for path in paths:
        values = ds.get_partition_keys(partitioning.parse(path))
        partitions.append((values, {name: schema.field(name).type for name in values}))
    return partitions


def _found_file(source: Source, columns: Columns, input_format: RowFormat | None) -> InputFile:
    """The file with its own columns; without any if it has no rows."""
    kind = input_format or (RowFormat.JSONL if source.path == "-" else format_of(source.path))
    if kind is None:
        suffix = PurePath(source.path).suffix or "nothing"
        raise InputError(
            f"{source.name} has no known format: its name ends in {suffix!r}.",
            hint=(f"Inputs end in {_SUFFIXES}; or set ", Setting("input_format"), "."),
        )
    if isinstance(source, ArrivingInput):
        source.wait_for_rows(lambda: _has_row(source, kind, columns), lines=FIRST_ROWS)
    with read_errors_explained(source.name):
        source.opened().close()
        version = source.version()
    empty = InputFile(source=source, format=kind, version=version, rows=0, partitions={}, types={})
    if version.size_bytes == 0:
        return empty
    file = _FIND_COLUMNS[kind](replace(empty, rows=None), columns)
    has_rows = file.rows or (file.rows is None and any(True for _ in read_values(file, columns, Position())))
    return file if has_rows else empty


def _has_row(source: Source, kind: RowFormat, columns: Columns) -> bool:
    """Whether a row can be read of what has come so far."""
    file = InputFile(source=source, format=kind, version=source.version(), partitions={}, types={})
    return any(True for _ in read_values(_FIND_COLUMNS[kind](file, columns), columns, Position()))


def _check_columns(file: InputFile, columns: Columns) -> None:
    content = {columns.input_ids: _INPUT_IDS, columns.text_pair: Setting("text_pair_column")}
    settings = {
        **dict.fromkeys(file.columns if columns.keep is None else columns.keep, _KEEP),
        **({columns.id: _ROW_ID} if columns.id else {}),
        **({columns.spans: _SPANS} if columns.spans else {}),
        **{name: content.get(name, Setting("text_column")) for name in columns.content},
    }
    for name, setting in settings.items():
        count = file.columns.count(name)
        if count != 1 and (file.columns or file.format is not RowFormat.JSONL):
            others = _OTHER_VALUES.get(setting, ())
            raise InputError(
                f"{file.name} has {count or 'no'} column{'s' if count else ''} {name!r}; "
                f"its columns are {', '.join(file.columns)}.",
                hint=("Rename one, or name another" if count else "Name one of them", " with ", setting, *others, "."),
            )
        kind = file.types.get(name)
        # A column of nulls has its own type; its rows fail one by one.
        if kind is None or pa.types.is_null(kind) or _fits(kind, setting):
            continue
        wanted = {_INPUT_IDS: "lists of integers", _SPANS: "lists of [start, end]"}.get(setting, "strings")
        raise InputError(
            f"Column {name!r} of {file.name} holds {kind}, not {wanted}.",
            hint=("Name another column with ", setting, "."),
        )


def _fits(kind: pa.DataType, setting: Setting) -> bool:
    if setting in (_KEEP, _ROW_ID):
        return True
    if setting in (_INPUT_IDS, _SPANS):
        for _ in range(1 if setting == _INPUT_IDS else 2):
            if not any(test(kind) for test in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)):
                return False
            kind = kind.value_type
        return bool(pa.types.is_integer(kind))
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(test(kind) for test in tests)


def _parquet_columns(file: InputFile, columns: Columns) -> InputFile:
    try:
        with read_errors_explained(file.name), opened_parquet(file.source) as opened:
            rows, schema = opened.metadata.num_rows, opened.schema_arrow
    except pa.ArrowException as error:
        raise InputError(f"{file.name} is not a readable Parquet file: {error}.") from error
    return replace(file, rows=rows, columns=tuple(schema.names), types={field.name: field.type for field in schema})


def _arrow_columns(file: InputFile, columns: Columns) -> InputFile:
    rows = None
    try:
        with read_errors_explained(file.name), _mapped(file.source) as stream:
            schema, batches = arrow_batches(stream)
            if file.source.is_local:
                rows = sum(map(len, batches))
    except pa.ArrowException as error:
        raise InputError(f"{file.name} is not a readable Arrow file: {error}.") from error
    return replace(file, rows=rows, columns=tuple(schema.names), types={field.name: field.type for field in schema})


def _mapped(source: Source) -> Any:
    """The file, mapped into memory where it is on this machine: its rows are counted without reading their values.

    Rows are read without a map, which would end the process where another program shortens the file.
    """
    return pa.memory_map(str(source.file)) if isinstance(source, LocalFile) else source.opened()


def _csv_columns(file: InputFile, columns: Columns) -> InputFile:
    names, error, _ = next(csv_records(file, Position()), ([], None, None))
    if error is not None:
        raise InputError(*joined(f"The header of {file.name} cannot be read: ", error))
    return replace(file, columns=tuple(names), types=dict.fromkeys(names, pa.string()))


def _text_columns(file: InputFile, columns: Columns) -> InputFile:
    return replace(file, columns=(columns.text,), types={columns.text: pa.string()})


def _json_columns(file: InputFile, columns: Columns) -> InputFile:
    with file.opened() as stream:
        begin = stream.read(100).lstrip(codecs.BOM_UTF8 + b" \t\r\n")
        if begin[:1] == b"[" and ".json" in PurePath(file.source.path.lower()).suffixes:
            raise InputError(
                f"{file.name} holds one JSON array; a job reads one JSON object per line.",
                hint="Convert it: jq -c '.[]' FILE.json > FILE.jsonl",
            )
    first = [values for values, *_ in itertools.islice(read_values(file, columns, Position()), FIRST_ROWS)]
    rows = [values for values in first if isinstance(values, dict)]
    # No output takes a name with half of a surrogate pair.
    names = dict.fromkeys(name for values in rows for name in values if is_encodable(name))
    return replace(file, columns=tuple(names))


_FIND_COLUMNS = {
    RowFormat.PARQUET: _parquet_columns,
    RowFormat.ARROW: _arrow_columns,
    RowFormat.CSV: _csv_columns,
    RowFormat.TSV: _csv_columns,
    RowFormat.TEXT: _text_columns,
    RowFormat.JSONL: _json_columns,
}
