"""Arrow files, and folders that `Dataset.save_to_disk` and `DatasetDict.save_to_disk` write."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from hdexport.support.texts import read_texts
from hdruntime.bundle.reader import Bundle
from hdruntime.errors import InputError
from hdruntime.jobs.input_search import find_inputs, resolved_columns
from hdruntime.jobs.row_reader import checksum_before, read_rows
from hdruntime.jobs.rows import Columns, Row
from support.comparators import named_case
from support.job_runs import random_texts, read, run_words, stop_at

TEXTS = ["one", "", "zwölf", "two\nlines", "five"]


def write_arrow(path: Path, texts: Sequence[str], *, of_file: bool = False, rows: int = 2, codec: Any = None) -> Path:
    table = pa.table({"id": [f"r{number}" for number in range(len(texts))], "text": texts, "label": [0] * len(texts)})
    opened: Callable[..., Any] = pa.ipc.new_file if of_file else pa.ipc.new_stream
    path.parent.mkdir(parents=True, exist_ok=True)
    options = pa.ipc.IpcWriteOptions(compression=codec)
    with pa.OSFile(str(path), "wb") as file, opened(file, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


def save_to_disk(folder: Path, *shards: Sequence[str], **state: object) -> Path:
    """Write what datasets 5.2.0 writes."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"data-{number:05}-of-{len(shards):05}.arrow" for number in range(len(shards))]
    for name, texts in zip(names, shards, strict=True):
        write_arrow(folder / name, texts)
    info = {"citation": "", "description": "", "features": {"text": {"dtype": "string", "_type": "Value"}}}
    (folder / "dataset_info.json").write_text(json.dumps(info, indent=2))
    notes = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "c3", "_format_columns": None}
    (folder / "state.json").write_text(json.dumps(notes | state, indent=2))
    return folder


def texts_in(*inputs: str | Path) -> list[str]:
    files = find_inputs(inputs, columns=Columns())
    return [row.text for row in read_rows(files, columns=resolved_columns(Columns(), files))]


def test_both_arrow_formats_give_the_same_rows_and_continue_after_any_of_them(tmp_path: Path) -> None:
    for of_file, rows, codec in itertools.product((False, True), (1, 2, 9), (None, "zstd")):
        with named_case(of_file, rows, codec):
            path = write_arrow(tmp_path / "a.arrow", TEXTS, of_file=of_file, rows=rows, codec=codec)
            columns = Columns(id="id", keep=("label",))
            files = find_inputs([path], columns=columns)
            assert (files[0].rows, files[0].columns) == (len(TEXTS), ("id", "text", "label"))
            every = list(read_rows(files, columns=columns))
            assert [(row.id, row.text) for row in every] == [(f"r{number}", text) for number, text in enumerate(TEXTS)]
            for row in every:
                rest: list[Row] = list(read_rows(files, columns=columns, start=row.end))
                assert [each.text for each in rest] == TEXTS[row.end.row :]
                assert checksum_before(files[0], columns, row.end.offset) == row.end.checksum


def test_a_record_batch_of_many_rows_is_read_in_parts(tmp_path: Path) -> None:
    texts = [str(number) for number in range(700)]
    assert texts_in(write_arrow(tmp_path / "a.feather", texts, rows=700)) == texts


def test_a_saved_dataset_is_read_in_the_order_of_its_state_and_without_its_notes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_to_disk(tmp_path / "saved", TEXTS[:3], TEXTS[3:])
    names = [{"filename": name} for name in ("data-00001-of-00002.arrow", "data-00000-of-00002.arrow")]
    turned = save_to_disk(tmp_path / "turned", TEXTS[:3], TEXTS[3:], _data_files=names)
    write_arrow(folder / "cache-0231c9bb33d1817f.arrow", ["of a map"])
    with caplog.at_level(logging.WARNING):
        assert texts_in(folder) == TEXTS
    assert caplog.messages == [
        f"{folder}/cache-0231c9bb33d1817f.arrow is skipped: the saved dataset in its folder does not list it"
    ]
    assert texts_in(turned) == TEXTS[3:] + TEXTS[:3]
    for inputs in ([f"{folder}/*"], sorted(folder.iterdir()), [f"file://{folder}"]):
        assert texts_in(*inputs) == TEXTS
    (tmp_path / "other.jsonl").write_text('{"id": 1, "text": "beside"}\n')
    assert texts_in(tmp_path) == ["beside", *TEXTS, *TEXTS[3:], *TEXTS[:3]]
    assert [text.text for text in read_texts(folder)] == [text for text in TEXTS if text]


def test_the_splits_of_a_dataset_dict_follow_each_other_in_its_order(tmp_path: Path) -> None:
    for split, texts in (("train", TEXTS[:2]), ("test", TEXTS[2:4]), ("stale", TEXTS[4:])):
        save_to_disk(tmp_path / "saved" / split, texts)
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert texts_in(tmp_path / "saved") == TEXTS[:4]
    assert texts_in(tmp_path / "saved" / "test") == TEXTS[2:4]
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "gone"]}')
    with pytest.raises(InputError, match="belongs to a DatasetDict, whose split 'gone' is missing"):
        texts_in(tmp_path / "saved")


def test_what_a_saved_dataset_needs_and_a_job_does_not_read_is_refused_with_a_remedy(tmp_path: Path) -> None:
    chosen = save_to_disk(tmp_path / "chosen", TEXTS, _indices_files=[{"filename": "indices.arrow"}])
    with pytest.raises(
        InputError, match=r"state.json chooses .* a file of indices.*\nSave it .*ds\.flatten_indices\(\)"
    ):
        texts_in(chosen)
    (save_to_disk(tmp_path / "short", TEXTS[:2], TEXTS[2:]) / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(InputError, match=r"state.json lists the file data-00001-of-00002.arrow, which is not among"):
        texts_in(tmp_path / "short")
    with pytest.raises(InputError, match=r"No input holds a row: .*/empty\.\nCheck what wrote them"):
        texts_in(save_to_disk(tmp_path / "empty"))
    (tmp_path / "bad.arrow").write_text("no Arrow file")
    with pytest.raises(InputError, match=r"bad\.arrow is not a readable Arrow file: "):
        texts_in(tmp_path / "bad.arrow")


def test_rows_in_a_file_that_is_only_named_like_a_note_are_rows(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"text": "Ohio"}\n{"text": "Utah"}\n')
    (tmp_path / "dataset_info.json").write_text('{"text": "Iowa"}\n')
    assert texts_in(tmp_path) == ["Iowa", "Ohio", "Utah"]


def test_a_job_over_a_saved_dataset_continues(bundle: Bundle, tmp_path: Path) -> None:
    texts = random_texts(45)
    folder = save_to_disk(tmp_path / "saved", texts[:20], texts[20:])
    run_words(bundle, [folder], tmp_path / "whole.jsonl")
    with pytest.raises(KeyboardInterrupt):
        run_words(bundle, [folder], tmp_path / "out.jsonl", on_progress=stop_at(30))
    done = run_words(bundle, [folder], tmp_path / "out.jsonl")
    assert (done.resumed_rows, done.rows_total, done.bytes_read) == (30, 45, done.bytes_total)
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert [row["id"] for row in read(tmp_path / "out.jsonl")] == [f"r{n}" for n in (*range(20), *range(25))]
