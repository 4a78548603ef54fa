"""Other users and programs at a job's folder: it is refused, and removed files are detected."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hdruntime.bundle.reader import Bundle
from hdruntime.errors import HdexportError, InputError
from hdruntime.jobs import JobOptions, plan_job
from hdruntime.jobs import results as job_results
from hdruntime.jobs.output import LocalOutput
from hdruntime.jobs.progress import JobProgress
from support.job_runs import left_in, run_words, stop_at, write_rows

FILES = ("lock", "job.json", "manifest.json", "ranges.json", "results", "output")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "in.jsonl", ["long"] * 50)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the folder of out.jsonl is when there is one."""
    return tmp_path / ".out.jsonl.job"


def at_rows(rows: int, act: Callable[[], object]) -> Callable[[JobProgress], None]:
    def on_progress(progress: JobProgress) -> None:
        if progress.rows == rows and progress.state.value == "running":
            act()

    return on_progress


def stopped_job(bundle: Bundle, rows: Path, output: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_words(bundle, [rows], output, on_progress=stop_at(20))


@pytest.fixture
def theirs(tmp_path: Path) -> Iterator[Path]:
    """Another folder with files of the same names, which stay."""
    path = tmp_path / "theirs"
    path.mkdir()
    for name in FILES:
        (path / name).write_text("precious")
    yield path
    assert {file.name: file.read_text() for file in path.iterdir()} == dict.fromkeys(FILES, "precious")


@pytest.mark.parametrize("restart", [False, True])
def test_a_link_in_the_place_of_the_folder_is_refused(
    bundle: Bundle, rows: Path, tmp_path: Path, folder: Path, theirs: Path, restart: bool
) -> None:
    folder.symlink_to(theirs)
    with pytest.raises(HdexportError, match=rf"{folder} is a link, not a folder\. .*\nRemove it, or change output"):
        run_words(bundle, [rows], tmp_path / "out.jsonl", restart=restart)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's folder")
def test_another_users_folder_is_refused(bundle: Bundle, rows: Path, tmp_path: Path, folder: Path) -> None:
    folder.mkdir()
    os.chown(folder, 1234, 1234)
    with pytest.raises(HdexportError, match=rf"{folder} is a folder of another user \(number 1234\)\. .*\nRemove it"):
        run_words(bundle, [rows], tmp_path / "out.jsonl")
    assert left_in(folder) == []
    # Where all files are one user's, as on some disks that are mounted, that user's folder is as good as the output.
    os.chown(tmp_path, 1234, 1234)
    assert run_words(bundle, [rows], tmp_path / "out.jsonl").rows == 50


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def move(path: Path) -> None:
    path.rename(path.parents[1 if path.name in FILES else 0] / "moved")


def exchange(path: Path) -> None:
    """Put a copy into its place, as a careless backup does."""
    copy = path.with_name("copy")
    shutil.copytree(path, copy) if path.is_dir() else shutil.copy(path, copy)
    move(path)
    copy.rename(path)


REMOVED = {
    "": r"\.out\.jsonl\.job, where the job keeps its rows, was removed or replaced while it ran",
    "results": r"job is damaged: results is missing or has changed",
    "lock": r"job/lock was removed while the job ran: another job may be writing there",
}
"""What is removed of the folder -> what the job says."""


@pytest.mark.parametrize(
    ("name", "change", "commits"),
    [
        ("", remove, "last"),
        ("", exchange, "every"),
        ("results", remove, "every"),
        ("results", move, "last"),
    ],
)
def test_a_removal_while_a_job_runs_is_detected(
    bundle: Bundle,
    rows: Path,
    tmp_path: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    change: Callable[[Path], None],
    commits: str,
) -> None:
    monkeypatch.setattr(job_results, "_COMMIT_SECONDS", 0 if commits == "every" else 10**6)
    monkeypatch.setattr(job_results, "_COMMIT_SHARE", 0)
    output = tmp_path / "out.jsonl"
    with pytest.raises(
        HdexportError,
        match=r"\.job is damaged: results( is|, which holds \d+ rows, is) missing or has changed\.\nStart over",
    ):
        run_words(bundle, [rows], output, on_progress=at_rows(20, lambda: change(folder / name)))
    assert not output.exists()
    # What is said to be kept is there.
    results = folder / "results"
    kept = LocalOutput(output).kept_rows()
    assert kept == 0 or len(results.read_text().splitlines()) >= kept
    assert run_words(bundle, [rows], output, restart=True).rows == 50
    assert len(output.read_text().splitlines()) == 50


def test_a_folder_that_is_removed_in_the_middle_of_a_commit_is_detected(
    bundle: Bundle, rows: Path, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = os.fsync

    def remove_then_sync(descriptor: int) -> None:
        # The first is of job.json, the second of results.
        if (folder / "results").exists():
            remove(folder)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", remove_then_sync)
    with pytest.raises(HdexportError, match="No such file or directory"):
        run_words(bundle, [rows], tmp_path / "out.jsonl")
    assert left_in(tmp_path) == ["bundle", "in.jsonl"]


def test_results_removed_before_the_output_is_made_are_detected(
    bundle: Bundle, rows: Path, tmp_path: Path, folder: Path
) -> None:
    def at_the_end(progress: JobProgress) -> None:
        if progress.state.value == "finishing":
            (folder / "results").unlink()

    with pytest.raises(HdexportError, match=r"results, which holds \d+ rows, is missing"):
        run_words(bundle, [rows], tmp_path / "out.jsonl", on_progress=at_the_end)
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("kind", "target", "force"),
    [("a named pipe", None, True), ("a socket", None, False), ("a device", "/dev/null", True)],
)
def test_an_output_that_is_not_a_file_is_refused_and_stays(
    bundle: Bundle, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, target: str, force: bool
) -> None:
    output = tmp_path / "out.jsonl"
    monkeypatch.chdir(tmp_path)  # a socket's path may not be long
    if target:
        output.symlink_to(target)
    else:
        os.mkfifo(output) if "pipe" in kind else socket.socket(socket.AF_UNIX).bind(output.name)
    mode = output.stat().st_mode
    for name in filter(None, (output, target)):
        with pytest.raises(InputError, match=rf"{name} is {kind}; an output is a file, .*\nGive output a name"):
            plan_job(bundle, [rows], name, options=JobOptions(force=force))
    assert output.stat().st_mode == mode
    assert not list(Path("/dev").glob(".*.job"))
