"""Files of a job's folder are damaged at every stage: the job is refused by name, or writes the same bytes."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hdruntime.bundle.reader import Bundle
from hdruntime.errors import DamagedJobError, OutputExistsError
from hdruntime.jobs import VectorOptions, writers
from hdruntime.jobs import results as job_results
from hdruntime.jobs.progress import JobProgress
from hdruntime.jobs.results import KeptResults
from hdruntime.jobs.state_folder import StateFolder, state_folder_path
from hdruntime.text.embeddings import EmbeddingPrecision
from support.comparators import named_case
from support.grids import nightly_unless
from support.job_runs import content_of, left_in, random_texts, run_words, stop_at, write_rows

each_output = pytest.mark.parametrize(
    "name",
    # A file and a directory: until it is in place, an output of another format is a file as well.
    [
        nightly_unless(name in ("out.jsonl", "out"), name)
        for name in ("out.jsonl", "out.parquet", "out", "out.npy", "out.npz")
    ],
)

VECTORS = VectorOptions(output_dtype=EmbeddingPrecision.INT8)
"""With ranges, which are a file of their own."""


def flip(path: Path, share: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(share * (len(content) - 1))] ^= 1
    path.write_bytes(content)


def exchange(path: Path) -> None:
    """As a program that writes a file anew: another file of the same size."""
    size = path.stat().st_size
    path.unlink()
    path.write_bytes(b'{"id": 1}\n' * (size // 10) + b" " * (size % 10))


def put_a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped at the begin": lambda path: flip(path, 0),
    "flipped in the middle": lambda path: flip(path, 0.5),
    "flipped at the end": lambda path: flip(path, 1),
    "without the last byte": lambda path: os.truncate(path, path.stat().st_size - 1),
    "half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "appended": lambda path: path.write_bytes(path.read_bytes() + b'{"id": 1}\n'),
    "another file": exchange,
    "removed": lambda path: path.unlink(),
    "a directory": put_a_directory,
}


class Once:
    """Acts once, when a job of 34 rows has done 20 of them and is in a state."""

    def __init__(self, act: Callable[[], object], state: str) -> None:
        self._act, self._state, self.is_done = act, state, False

    def __call__(self, progress: JobProgress) -> None:
        if progress.state.value == self._state and progress.rows >= 20 and not self.is_done:
            self.is_done = True
            self._act()


def cases_in(folder: Path) -> list[tuple[str, str]]:
    """The file, and in the directory of an output the first file, with each damage."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.stat().st_size]
    return [(str(path.relative_to(folder)), damage) for path in files if path.name != "lock" for damage in DAMAGES]


@pytest.fixture
def job(bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., JobProgress]:
    """Runs the same job to an output of that name, which commits after every shard."""
    monkeypatch.setattr(job_results, "_COMMIT_SECONDS", 0)
    monkeypatch.setattr(job_results, "_COMMIT_SHARE", 0)
    monkeypatch.setattr(writers, "_GROUP_ROWS", 10)
    monkeypatch.setattr(writers, "_PART_ROWS", 10)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    inputs = write_rows(tmp_path / "in.jsonl", [*random_texts(18), None, *random_texts(15)])

    def run(name: str, **options: object) -> JobProgress:
        return run_words(bundle, [inputs], tmp_path / name, vectors=VECTORS, skip_failed=True, **options)  # type: ignore[arg-type]

    return run


@pytest.fixture
def outcome(job: Callable[..., JobProgress], tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Whether a job to an output is refused by name, or writes the bytes of an undisturbed one; then the output is gone
    and how to go on was tried.
    """

    @functools.cache
    def expected(name: str) -> object:
        job(f"whole-{name}")
        return content_of(tmp_path / f"whole-{name}")

    def refusal(name: str, **options: object) -> str:
        try:
            job(name, **options)
        except DamagedJobError as error:
            return str(error)
        return ""

    def outcome_of(name: str, **options: object) -> str:
        folder, found = state_folder_path(tmp_path / name), "equal"
        said = refusal(name, **options)
        if said:
            found = "refused"
            assert str(folder) in said
            assert "restart=True" in said.splitlines()[-1]
            assert "continues" not in said
            assert not (tmp_path / name).exists()
            job(name, restart=True)
        assert content_of(tmp_path / name) == expected(name)
        assert set(left_in(folder)) <= {"job.json", "lock", "manifest.json"}
        shutil.rmtree(tmp_path / name) if (tmp_path / name).is_dir() else (tmp_path / name).unlink()
        for ranges in tmp_path.glob("out*.ranges.npz"):
            ranges.unlink()
        shutil.rmtree(folder)
        return found

    yield outcome_of
    assert [name for name in left_in(tmp_path) if name.startswith((".out", "out"))] == []


HARMLESS = {"results: appended"}
"""Bytes after those that count are dropped."""


def stopped_while_running(job: Callable[..., JobProgress], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt):
        job(name, on_progress=stop_at(20))


def stopped_before_it_is_in_place(job: Callable[..., JobProgress], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(StateFolder, "move_out", stop)
        with pytest.raises(KeyboardInterrupt):
            job(name)


@pytest.mark.parametrize("stop", [stopped_while_running, stopped_before_it_is_in_place])
@each_output
def test_damage_between_a_kill_and_the_next_command_is_found(
    job: Callable[..., JobProgress],
    outcome: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    stop: Callable[..., None],
) -> None:
    stop(job, name, monkeypatch)
    folder, kept = state_folder_path(tmp_path / name), tmp_path / "kept"
    folder.rename(kept)
    found: dict[str, set[str]] = {}
    for file, damage in cases_in(kept):
        with named_case(f"{file} {damage}"):
            shutil.copytree(kept, folder)
            DAMAGES[damage](folder / file)
            found.setdefault(outcome(name), set()).add(f"{file.partition('/')[0]}: {damage}")
    files = ["results", "job.json", "manifest.json", "ranges.json"]
    zeros = {f"{file}: zeros" for file in files}
    # A job whose output was made, and which is nowhere now, starts over.
    harmless = HARMLESS | ({"results: removed"} if stop is stopped_before_it_is_in_place else set())
    assert found["refused"] >= zeros | {f"results: {damage}" for damage in DAMAGES} - harmless


@pytest.mark.parametrize("moment", ["running", "finishing"])
@each_output
def test_damage_while_a_job_runs_is_found(outcome: Callable[..., str], tmp_path: Path, name: str, moment: str) -> None:
    folder = state_folder_path(tmp_path / name)
    found: dict[str, set[str]] = {}
    for file in ("job.json", "manifest.json", "ranges.json", "results"):
        for damage, harm in DAMAGES.items():
            once = Once(functools.partial(harm, folder / file), moment)
            with named_case(f"{file} {damage}"):
                found.setdefault(outcome(name, on_progress=once), set()).add(f"{file}: {damage}")
                assert once.is_done
    # What is written next leaves a zero there, which the last byte of a record batch is.
    harmless = HARMLESS | ({"results: without the last byte"} if moment == "running" else set())
    assert found["refused"] >= {f"results: {damage}" for damage in DAMAGES} - harmless


@pytest.mark.parametrize("name", ["out.jsonl", "out"])
def test_an_output_that_was_moved_into_place_is_known_by_its_content(
    job: Callable[..., JobProgress],
    outcome: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """The folder is left, as by a kill, and another program has changed the output meanwhile."""
    output = tmp_path / name
    with monkeypatch.context() as patched:
        patched.setattr(KeptResults, "_write_ranges", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            job(name)
    file = next(output.iterdir()) if output.is_dir() else output
    times = file.stat()
    flip(file, 0.5)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert outcome(name, force=True) == "equal"


def test_a_directory_with_a_changed_file_is_not_taken_for_the_jobs_output(
    job: Callable[..., JobProgress], tmp_path: Path
) -> None:
    job("out")
    assert job("out").resumed_rows == 34
    flip(tmp_path / "out" / "part-00000.parquet", 0.5)
    with pytest.raises(OutputExistsError, match=r"out exists\.\nReplace it with force=True"):
        job("out")
