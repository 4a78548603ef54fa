"""What a job was given and cannot read is an error that names it, before the job starts."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from hdruntime.errors import InputError
from hdruntime.jobs.input_search import find_inputs
from hdruntime.jobs.rows import Columns
from support.comparators import named_case
from support.grids import nightly_unless
from support.job_runs import write_rows

ANOTHER_USER = 65534


class MountedFileSystem(LocalFileSystem):  # type: ignore[misc]
    """A file system that fsspec lists one directory after the other, as those of SFTP and HDFS."""

    protocol = "mounted"


@pytest.fixture(autouse=True, scope="module")
def mounted() -> None:
    fsspec.register_implementation("mounted", MountedFileSystem, clobber=True)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with two files in subfolders, which other users can read; those of pytest they cannot."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    for name in ("in/a/x.jsonl", "in/b/c/y.jsonl"):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        write_rows(path / name, [name])
    yield path
    for below in [path, *path.rglob("*")]:
        with contextlib.suppress(OSError):
            below.chmod(0o755)
    shutil.rmtree(path)


def names_of(name: str | Path) -> list[str]:
    return [file.source.path for file in find_inputs([name], columns=Columns())]


def found_by_another_user(name: str | Path) -> str:
    """What is found, or the error; root may read anything, so a child that is not root looks."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(ANOTHER_USER)
                os.setuid(ANOTHER_USER)
            said = " ".join(names_of(name))
        except InputError as error:
            said = str(error)
        except BaseException:
            said = traceback.format_exc()
        os.write(writing, said[-4000:].encode())
        os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


WAYS = ("{}/in", "{}/in/**/*.jsonl", "{}/in/**", "file://{}/in", "mounted://{}/in", "mounted://{}/in/**/*.jsonl")
"""Names of both files; a store's own listing is not tried."""

PATTERNS = ("{}/in/*/c/*.jsonl", "{}/in/*/c/y.jsonl", "mounted://{}/in/*/c/*.jsonl")
"""Names of one of the files."""


def test_all_ways_find_the_files_once(folder: Path) -> None:
    both = [f"{folder}/in/a/x.jsonl", f"{folder}/in/b/c/y.jsonl"]
    for way in (*WAYS, "mounted://{}/in/*"):
        with named_case(way):
            assert names_of(way.format(folder)) == both
            assert found_by_another_user(way.format(folder)) == " ".join(both)
    for pattern in PATTERNS:
        with named_case(pattern):
            assert names_of(pattern.format(folder)) == both[1:]


@pytest.mark.parametrize(
    ("unread", "mode"),
    [
        nightly_unless((unread, mode) in (("in", 0o000), ("in/b", 0o711), ("in/b/c", 0o744)), unread, mode)
        for unread in ("in", "in/b", "in/b/c")
        for mode in (0o000, 0o711, 0o744)
    ],
)
def test_a_folder_that_cannot_be_read_is_named(folder: Path, unread: str, mode: int) -> None:
    """Mode 711 has no list of names; 744 has one, and nothing in it can be opened."""
    (folder / unread).chmod(mode)
    for way in (*WAYS, *PATTERNS):
        if way in PATTERNS and mode == 0o711 and unread == "in/b":
            continue  # the name c is known, and so may be read
        with named_case(way):
            said = found_by_another_user(way.format(folder))
            assert re.search(rf"{folder}/{unread}\S* cannot be read: .*Permission denied", said), said


def test_a_file_that_cannot_be_read_is_named(folder: Path) -> None:
    (folder / "in/b/c/y.jsonl").chmod(0)
    for way in (*WAYS, *PATTERNS):
        with named_case(way):
            said = found_by_another_user(way.format(folder))
            assert re.search(rf"{folder}/in/b/c/y.jsonl cannot be read: .*Permission denied", said), said


def test_a_folder_that_goes_away_while_it_is_listed_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = MountedFileSystem.ls

    def listed_then_gone(store: MountedFileSystem, path: str, *arguments: Any, **options: Any) -> Any:
        found = listed(store, path, *arguments, **options)
        if path.endswith("/in"):
            shutil.rmtree(folder / "in" / "b")
        return found

    monkeypatch.setattr(MountedFileSystem, "ls", listed_then_gone)
    with pytest.raises(InputError, match=rf"{folder}/in/b cannot be read: No such file or directory"):
        names_of(f"mounted://{folder}/in")


LINKS = {
    "none.jsonl": "is a link to none.jsonl, which cannot be read: No such file or directory",
    "none": "is a link to none, which cannot be read: No such file or directory",
    "itself": "is a link to itself, which cannot be read: Too many levels of symbolic links",
}
"""Target of a link -> what the job says."""


@pytest.mark.parametrize("target", LINKS)
def test_a_link_that_leads_nowhere_is_named(folder: Path, target: str) -> None:
    link = folder / "in" / "b" / ("itself" if target == "itself" else "link.jsonl")
    link.symlink_to(target)
    for name in (link, folder / "in", f"{folder}/in/**", f"{folder}/in/*/{link.name[:2]}*", f"file://{folder}/in"):
        with named_case(name), pytest.raises(InputError, match=rf"{link} {LINKS[target]}.\nRemove the link, or put"):
            names_of(name)


def test_files_behind_links_are_read_and_no_file_is_read_twice(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_rows(folder / "elsewhere.jsonl", ["linked"])
    (folder / "more" / "deep").mkdir(parents=True)
    write_rows(folder / "more" / "deep" / "z.jsonl", ["linked, too"])
    for link, target in (
        ("in/file.jsonl", "../elsewhere.jsonl"),
        ("in/a/more", "../../more"),
        ("in/latest", "b"),
        ("in/b/back", "../../in"),
        ("more/deep/round", ".."),
    ):
        (folder / link).symlink_to(target)
    found = ["in/a/more/deep/z.jsonl", "in/a/x.jsonl", "in/b/c/y.jsonl", "in/file.jsonl"]
    assert names_of(folder / "in") == [f"{folder}/{name}" for name in found]
    for skipped in ("in/latest", "in/b/back", "in/a/more/deep/round"):
        assert f"{folder}/{skipped} is skipped: its files are inputs already by another path" in caplog.text


def test_a_link_to_a_folder_around_the_input_is_refused(folder: Path) -> None:
    (folder / "in" / "b" / "up").symlink_to(folder)
    with pytest.raises(
        InputError, match=rf"in/b/up is a link to {folder}, in which the input {folder}/in is\.\nRemove"
    ):
        names_of(folder / "in")


def test_a_special_file_among_files_is_refused_unless_it_would_be_skipped_anyway(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.mkfifo(folder / "in" / "control")
    assert len(names_of(folder / "in")) == 2
    assert f"{folder}/in/control is skipped: its format is unknown" in caplog.text
    os.mkfifo(folder / "in" / "b" / "rows.jsonl")
    for name in (folder / "in", f"{folder}/in/b/*", f"file://{folder}/in"):
        with pytest.raises(InputError, match=r"in/b/rows.jsonl is a named pipe; a job reads files.*\nWrite the rows"):
            names_of(name)


def test_rows_in_another_compression_are_refused_and_other_files_named(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("README.md", "in/LICENSE", "in/b/rows.jsonl.sha256", "in/b/_SUCCESS", "in/b/_rows.jsonl"):
        (folder / name).write_text("{}")
    (folder / "in" / ".cache").mkdir()
    with caplog.at_level(logging.INFO):
        for name in (folder / "in", f"mounted://{folder}/in"):
            caplog.clear()
            assert len(names_of(name)) == 2
            levels = {record.getMessage().split()[0].rpartition("/")[2]: record.levelname for record in caplog.records}
            assert levels == {
                "LICENSE": "WARNING",
                "rows.jsonl.sha256": "WARNING",
                "_rows.jsonl": "WARNING",
                "_SUCCESS": "INFO",
                ".cache": "INFO",
            }
    for name in ("in/b/rows.jsonl.bz2", "in/b/rows.parquet.gz"):
        (folder / name).write_text(json.dumps({"text": "a"}))
        with named_case(name), pytest.raises(InputError, match=rf"{name} holds rows in a compression .*\nDecompress"):
            names_of(folder / "in")
        (folder / name).unlink()
