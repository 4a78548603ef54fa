"""Outputs at URLs: whole or not there, continued after a store that fails, and nothing left on this machine."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import fsspec
import pyarrow.dataset
import pyarrow.parquet
import pytest

from hdruntime.errors import DamagedJobError, HdexportError, InputError, OutputExistsError
from hdruntime.jobs import VectorOptions, writers
from hdruntime.jobs.uploads import UPLOAD_MANIFEST
from hdruntime.tasks import text_inference
from hdruntime.text.embeddings import EmbeddingPrecision
from support.job_runs import random_texts, run, stop_at, write_rows


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where outputs are written first."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(text_inference, "_WINDOW_TEXTS", 4)
    monkeypatch.setattr(writers, "_GROUP_ROWS", 4)
    monkeypatch.setattr(writers, "_PART_ROWS", 4)
    return tmp_path / "state" / "hdexport" / "uploads"


@pytest.fixture
def memory() -> Any:
    filesystem = fsspec.filesystem("memory")
    yield filesystem
    filesystem.store.clear()
    filesystem.pseudo_dirs[:] = [""]


def names(filesystem: Any, key: str) -> list[str]:
    return sorted(Path(found).name for found in filesystem.find(key))


def test_an_output_at_a_url_is_that_of_a_file(bundle_path: Path, tmp_path: Path, state: Path, memory: Any) -> None:
    inputs = write_rows(tmp_path / "in.jsonl", random_texts(10))
    run(bundle_path, inputs, tmp_path / "here.parquet")
    with pytest.raises(KeyboardInterrupt):
        run(bundle_path, inputs, "memory://bucket/out.parquet", on_progress=stop_at(4))
    assert names(memory, "/bucket") == []
    done = run(bundle_path, inputs, "memory://bucket/out.parquet")
    assert (done.rows, done.resumed_rows) == (10, 4)
    assert memory.cat_file("/bucket/out.parquet") == (tmp_path / "here.parquet").read_bytes()
    # A URL of this machine is a path.
    run(bundle_path, inputs, f"file://{tmp_path}/out.jsonl")
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 10
    assert list(state.iterdir()) == []


def test_the_ranges_of_an_output_without_metadata_are_uploaded_with_it(
    bundle_path: Path, tmp_path: Path, state: Path, memory: Any
) -> None:
    inputs = write_rows(tmp_path / "in.jsonl", random_texts(10))
    vectors = VectorOptions(output_dtype=EmbeddingPrecision.INT8)
    run(bundle_path, inputs, tmp_path / "here.jsonl", vectors=vectors)
    run(bundle_path, inputs, "memory://bucket/out.jsonl", vectors=vectors)
    assert names(memory, "/bucket") == ["out.jsonl", "out.jsonl.ranges.npz"]
    here = (tmp_path / "here.jsonl.ranges.npz").read_bytes()
    assert memory.cat_file("/bucket/out.jsonl.ranges.npz") == here
    assert list(state.iterdir()) == []


def test_a_directory_is_uploaded_file_by_file_and_its_manifest_last(
    bundle_path: Path, tmp_path: Path, state: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = write_rows(tmp_path / "in.jsonl", random_texts(10))
    put, sent = type(memory).put_file, []

    def failing(self: Any, here: str, key: str, **options: Any) -> None:
        if len(sent) == 2:
            raise ConnectionError("the store is gone")
        sent.append(Path(key).name)
        put(self, here, key, **options)

    with monkeypatch.context() as patch:
        patch.setattr(type(memory), "put_file", failing)
        with pytest.raises(HdexportError, match=r"memory://bucket/out cannot be written: ConnectionError: the store"):
            run(bundle_path, inputs, "memory://bucket/out/")
    assert names(memory, "/bucket/out") == ["part-00000.parquet", "part-00001.parquet"]
    sent.clear()

    def counting(self: Any, here: str, key: str, **options: Any) -> None:
        sent.append(Path(key).name)
        put(self, here, key, **options)

    monkeypatch.setattr(type(memory), "put_file", counting)
    done = run(bundle_path, inputs, "memory://bucket/out/")
    assert (done.rows, done.resumed_rows, sent) == (10, 10, ["part-00002.parquet"])
    sizes = json.loads(memory.cat_file(f"/bucket/out/{UPLOAD_MANIFEST}"))["files"]
    assert sizes == {
        Path(key).name: memory.size(key) for key in memory.find("/bucket/out") if UPLOAD_MANIFEST not in key
    }
    assert pyarrow.dataset.dataset("/bucket/out", filesystem=memory, format="parquet").count_rows() == 10
    assert list(state.iterdir()) == []
    # Another output takes its place if it may, and leaves none of the old files.
    fewer = write_rows(tmp_path / "fewer.jsonl", random_texts(3))
    with pytest.raises(OutputExistsError, match=r"memory://bucket/out exists\.\nReplace it with force=True"):
        run(bundle_path, fewer, "memory://bucket/out")
    run(bundle_path, fewer, "memory://bucket/out", force=True)
    assert names(memory, "/bucket/out") == [UPLOAD_MANIFEST, "part-00000.parquet"]


def test_an_unfinished_job_of_another_input_is_refused_and_one_that_was_not_uploaded_is_forgotten(
    bundle_path: Path, tmp_path: Path, state: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, others = (write_rows(tmp_path / f"{count}.jsonl", random_texts(count)) for count in (10, 3))
    url = "memory://bucket/out.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run(bundle_path, inputs, url, on_progress=stop_at(4))
    with pytest.raises(InputError, match=r"has an unfinished job with 4 rows"):
        run(bundle_path, others, url)
    with monkeypatch.context() as patch:
        patch.setattr(type(memory), "put_file", lambda *_, **__: 1 / 0)
        with pytest.raises(HdexportError, match=r"ZeroDivisionError.*\nThe rows are kept in .*: the same command"):
            run(bundle_path, inputs, url)
    run(bundle_path, others, url)
    assert len(memory.cat_file("/bucket/out.jsonl").splitlines()) == 3
    assert list(state.iterdir()) == []


def test_what_is_no_place_is_refused(bundle_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = write_rows(tmp_path / "in.jsonl", ["long"])
    with pytest.raises(InputError, match=r"nothing://a/out\.jsonl is not understood: Protocol not known"):
        run(bundle_path, inputs, "nothing://a/out.jsonl")
    with pytest.raises(InputError, match=r"Outputs end in"):
        run(bundle_path, inputs, "memory://bucket/out.csv")
    for url in ("https://example.org/out.jsonl", "memory://"):
        with pytest.raises(InputError, match=r"No output can be written to"):
            run(bundle_path, inputs, url)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with pytest.raises(HdexportError, match=r"cannot be made: .*\nSet XDG_STATE_HOME"):
        run(bundle_path, inputs, "memory://bucket/out.jsonl")


@pytest.mark.parametrize("url", ["memory://bucket/texts", "memory://bucket/texts/notes", "memory://bucket/a.jsonl"])
def test_files_that_no_job_wrote_are_neither_replaced_nor_removed(
    bundle_path: Path, tmp_path: Path, memory: Any, url: str
) -> None:
    theirs = {"/bucket/texts/notes/a.txt": b"long", "/bucket/texts/b.txt": b"read", "/bucket/a.jsonl": b'{"text": "a"}'}
    memory.pipe(theirs)
    inputs = write_rows(tmp_path / "in.jsonl", ["long"])
    for force in (False, True)[: 1 if url.endswith(".jsonl") else 2]:
        with pytest.raises(OutputExistsError, match=r"is a directory that holds|exists"):
            run(bundle_path, inputs, url, force=force)
    with pytest.raises(InputError, match=r"is an input as well as the output"):
        run(bundle_path, url, url, force=True)
    assert {key: memory.cat_file(key) for key in memory.find("/bucket")} == theirs


def test_an_output_is_uploaded_by_one_process(bundle_path: Path, tmp_path: Path, memory: Any, monkeypatch: Any) -> None:
    inputs, others = (write_rows(tmp_path / f"{count}.jsonl", random_texts(count)) for count in (10, 3))
    put, refused = type(memory).put_file, []

    def other_job(*arguments: Any, **options: Any) -> None:
        with pytest.raises(OutputExistsError, match="Another job is writing") as found:
            run(bundle_path, others, "memory://bucket/out")
        refused.append(found)
        put(*arguments, **options)

    monkeypatch.setattr(type(memory), "put_file", other_job)
    run(bundle_path, inputs, "memory://bucket/out")
    assert len(refused) == 3
    assert pyarrow.dataset.dataset("/bucket/out", filesystem=memory, format="parquet").count_rows() == 10


def test_notes_of_an_output_that_is_gone_skip_no_file(
    bundle_path: Path, tmp_path: Path, state: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a kill between two removals."""
    inputs, url = write_rows(tmp_path / "in.jsonl", random_texts(10)), "memory://bucket/out"
    with monkeypatch.context() as patch:
        patch.setattr(type(memory), "pipe_file", lambda *_, **__: 1 / 0)
        with pytest.raises(HdexportError, match="ZeroDivisionError"):
            run(bundle_path, inputs, url)
    (folder,) = state.iterdir()
    for part in (folder / "out").iterdir():
        part.unlink()
    (folder / "out").rmdir()
    for key in memory.find("/bucket/out"):
        memory.rm_file(key)
    run(bundle_path, inputs, url)
    assert names(memory, "/bucket/out") == [UPLOAD_MANIFEST, *(f"part-0000{part}.parquet" for part in range(3))]


@pytest.mark.parametrize("name", ["out.jsonl", "out"])
def test_an_output_that_changed_before_its_upload_is_refused(
    bundle_path: Path, tmp_path: Path, state: Path, memory: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    inputs, url = write_rows(tmp_path / "in.jsonl", random_texts(10)), f"memory://bucket/{name}"
    with monkeypatch.context() as patch:
        patch.setattr(type(memory), "put_file", lambda *_, **__: 1 / 0)
        with pytest.raises(HdexportError, match="ZeroDivisionError"):
            run(bundle_path, inputs, url)
    (file,) = state.rglob("out.jsonl" if "." in name else "part-00001.parquet")
    content, times = bytearray(file.read_bytes()), file.stat()
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(DamagedJobError, match=rf"{name}, which is to be uploaded to {url}, has changed .*\nStart over"):
        run(bundle_path, inputs, url)
    assert names(memory, "/bucket") == []
    assert run(bundle_path, inputs, url, restart=True).resumed_rows == 0
    assert list(state.iterdir()) == []
