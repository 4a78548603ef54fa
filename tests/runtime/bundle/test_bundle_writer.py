"""A bundle appears only when it is whole, and an old one stays until then."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hdexport.support.bundle_writer import BUNDLE_DIRECTORY, seal
from hdruntime.bundle import staging
from hdruntime.bundle.manifest import Manifest
from hdruntime.bundle.reader import open_bundle
from hdruntime.bundle.staging import staged_directory
from hdruntime.errors import (
    HdexportError,
    OutputExistsError,
)


def contents(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


@pytest.fixture
def manifest(bundle_path: Path) -> Manifest:
    return open_bundle(bundle_path).manifest


def fill(directory: Path, manifest: Manifest, text: str = "new") -> None:
    """A bundle of one file."""
    (directory / "weights").mkdir()
    (directory / "weights" / "a.bin").write_text(text)
    seal(directory, dataclasses.replace(manifest, graphs=(), tokenizer=None))


def failing_build(
    destination: Path,
    manifest: Manifest,
    error: BaseException | None = None,
    *,
    force: bool = False,
    before_the_end: Callable[[], object] = lambda: None,
) -> None:
    """A build that fills its bundle and then fails, or fails at the end."""
    with staged_directory(destination, BUNDLE_DIRECTORY, force=force) as directory:
        fill(directory, manifest)
        before_the_end()
        if error is not None:
            raise error


def refused_before_the_block(path: Path, error: type[Exception], message: str, *, force: bool = False) -> None:
    with pytest.raises(error, match=message), staged_directory(path, BUNDLE_DIRECTORY, force=force):
        pytest.fail("the block ran")


def names_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_a_staged_bundle_appears_when_it_is_whole(tmp_path: Path, manifest: Manifest) -> None:
    destination = tmp_path / "a" / "b"
    with staged_directory(destination, BUNDLE_DIRECTORY, force=False) as directory:
        assert directory.parent == destination.parent
        fill(directory, manifest)
        assert not destination.exists()
    assert set(open_bundle(destination).manifest.files) == {"weights/a.bin"}
    assert names_in(destination.parent) == {"b"}


def test_an_error_leaves_nothing_not_even_new_parents(tmp_path: Path, manifest: Manifest) -> None:
    before = names_in(tmp_path)
    with pytest.raises(KeyError):
        failing_build(tmp_path / "a" / "b", manifest, KeyError())
    assert names_in(tmp_path) == before


def test_an_interruption_leaves_the_old_bundle(bundle_path: Path, manifest: Manifest) -> None:
    before = contents(bundle_path)
    with pytest.raises(KeyboardInterrupt):
        failing_build(bundle_path, manifest, KeyboardInterrupt(), force=True)
    assert contents(bundle_path) == before
    assert names_in(bundle_path.parent) == {bundle_path.name}


def test_an_existing_bundle_needs_force_and_nothing_is_done_before(bundle_path: Path) -> None:
    before = contents(bundle_path)
    refused_before_the_block(bundle_path, OutputExistsError, "force=True")
    assert contents(bundle_path) == before


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two_renames"])
def test_force_replaces_a_bundle(
    bundle_path: Path, manifest: Manifest, exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:
        monkeypatch.setattr(staging, "_exchange", lambda one, other: False)
        with pytest.raises(FileNotFoundError):
            staging._replace_in_two_steps(bundle_path / "missing", bundle_path)
    with staged_directory(bundle_path, BUNDLE_DIRECTORY, force=True) as directory:
        fill(directory, manifest)
        assert "model.onnx" in contents(bundle_path)
    assert set(contents(bundle_path)) == {"manifest.json", "weights/a.bin"}
    assert names_in(bundle_path.parent) == {bundle_path.name}


def test_the_destination_is_never_missing_while_it_is_replaced(bundle_path: Path, manifest: Manifest) -> None:
    stop = threading.Event()
    missing = []

    def watch() -> None:
        while not stop.is_set():
            if not (bundle_path / "manifest.json").exists():
                missing.append(True)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(20):
        with staged_directory(bundle_path, BUNDLE_DIRECTORY, force=True) as directory:
            fill(directory, manifest)
    stop.set()
    watcher.join()
    if not staging._exchange(bundle_path, bundle_path):
        pytest.skip("no renameat2(RENAME_EXCHANGE) in this kernel or file system")
    assert not missing


@pytest.mark.parametrize("kind", ["file", "empty", "other", "foreign_manifest"])
def test_force_never_deletes_what_is_not_a_bundle(tmp_path: Path, kind: str) -> None:
    destination = tmp_path / "home"
    if kind == "file":
        destination.write_text("thesis")
    else:
        destination.mkdir()
    if kind == "other":
        (destination / "thesis.tex").write_text("thesis")
    if kind == "foreign_manifest":
        (destination / "manifest.json").write_text('{"name": "a browser extension", "manifest_version": 3}')
    before = contents(tmp_path)
    refused_before_the_block(destination, OutputExistsError, "is not a bundle of hdexport", force=True)
    assert contents(tmp_path) == before
    assert destination.exists()


def test_force_never_deletes_files_added_to_a_bundle(bundle_path: Path) -> None:
    (bundle_path / "results.jsonl").write_text("mine")
    message = r"not part of a bundle of hdexport \(results.jsonl\); force=True would delete them"
    refused_before_the_block(bundle_path, OutputExistsError, message, force=True)
    assert (bundle_path / "results.jsonl").read_text() == "mine"


@pytest.mark.parametrize("force", [False, True])
def test_what_appears_during_the_build_is_not_replaced(tmp_path: Path, manifest: Manifest, force: bool) -> None:
    destination = tmp_path / "new"

    def somebody_writes() -> None:
        destination.mkdir()
        (destination / "thesis.tex").write_text("thesis")

    with pytest.raises(OutputExistsError, match="exists"):
        failing_build(destination, manifest, force=force, before_the_end=somebody_writes)
    assert names_in(destination) == {"thesis.tex"}
    assert names_in(tmp_path) == {"bundle", "new"}


def test_a_file_in_the_place_of_a_parent_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused_before_the_block(
        tmp_path / "file" / "bundle", HdexportError, "it is a file.\nTo write elsewhere, choose another place"
    )


def test_a_link_at_the_destination_is_followed(bundle_path: Path, manifest: Manifest) -> None:
    link = bundle_path.parent / "latest"
    link.symlink_to(bundle_path)
    with staged_directory(link, BUNDLE_DIRECTORY, force=True) as directory:
        fill(directory, manifest)
    assert link.is_symlink()
    assert "weights/a.bin" in contents(bundle_path)


def test_a_full_quota_is_explained_as_a_full_disk_is(bundle_path: Path, manifest: Manifest) -> None:
    before = contents(bundle_path)
    error = OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "half.onnx")
    with pytest.raises(HdexportError, match=r"The disk is full: .*half.onnx.*\nFree some space"):
        failing_build(bundle_path, manifest, error, force=True)
    assert contents(bundle_path) == before
    assert names_in(bundle_path.parent) == {bundle_path.name}


def test_a_really_full_disk_leaves_nothing(tmp_path: Path, manifest: Manifest) -> None:
    """On a file system of 1 MB, in a mount namespace of our own."""
    mount = tmp_path / "small"
    mount.mkdir()
    code = f"""
        from pathlib import Path
        from hdexport.support.bundle_writer import BUNDLE_DIRECTORY
        from hdruntime.bundle.staging import staged_directory
        with staged_directory(Path({str(mount)!r}) / "bundle", BUNDLE_DIRECTORY, force=False) as directory:
            (directory / "model.onnx.data").write_bytes(bytes(2 << 20))
    """
    script = f'mount -t tmpfs -o size=1m tmpfs {mount} && "$0" -c "$1"; echo "left: $(ls -A {mount})"'
    result = subprocess.run(
        ["unshare", "--mount", "--map-root-user", "sh", "-c", script, sys.executable, textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    if "unshare" in result.stderr or "mount:" in result.stderr:
        pytest.skip(f"no mount namespaces here: {result.stderr.strip()}")
    assert "hdruntime.errors.HdexportError: The disk is full" in result.stderr
    assert result.stdout == "left: \n"


KILLED = """
import sys
from pathlib import Path
from hdruntime.bundle import staging
from hdruntime.bundle.reader import open_bundle
from hdruntime.bundle.staging import staged_directory
from hdexport.support.bundle_writer import BUNDLE_DIRECTORY, seal
destination, source, when = sys.argv[1:]
manifest = open_bundle(Path(source)).manifest

def wait():
    print("ready", flush=True)
    sys.stdin.read()

if when == "after_exchange":
    staging._sync_path = lambda path: wait() if path == Path(destination).parent else None
with staged_directory(Path(destination), BUNDLE_DIRECTORY, force=True) as directory:
    (directory / "model.onnx").write_text("new")
    if when == "in_the_block":
        wait()
    import dataclasses
    seal(directory, dataclasses.replace(manifest, graphs=(), tokenizer=None))
"""


@contextlib.contextmanager
def build_that_waits(destination: Path, source: Path, when: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(destination), str(source), when],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("existing", [False, True], ids=["new", "replacing"])
@pytest.mark.parametrize("when", ["in_the_block", "after_exchange"])
def test_a_killed_build_leaves_no_bundle_or_a_whole_one(
    new_bundle: Callable[..., Path], tmp_path: Path, existing: bool, when: str
) -> None:
    source = new_bundle("source")
    destination = new_bundle("out") if existing else tmp_path / "out"
    with build_that_waits(destination, source, when) as process:
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    if when == "in_the_block" and not existing:
        assert not destination.exists()
    else:
        is_new = (destination / "model.onnx").read_bytes() == b"new"
        assert is_new == (when == "after_exchange")
        open_bundle(destination)  # every file is there, and as listed

    leftovers = names_in(tmp_path) - {"source", "out"}
    assert all(name.startswith(f".out.partial-{process.pid}") for name in leftovers)
    with staged_directory(destination, BUNDLE_DIRECTORY, force=True) as directory:
        fill(directory, open_bundle(source).manifest)
    assert names_in(tmp_path) == {"source", "out"}


def test_the_directory_of_a_living_build_is_left_alone(bundle_path: Path, manifest: Manifest) -> None:
    destination = bundle_path.parent / "out"
    with build_that_waits(destination, bundle_path, "in_the_block") as process:
        with staged_directory(destination, BUNDLE_DIRECTORY, force=False) as directory:
            fill(directory, manifest)
        assert len([name for name in names_in(bundle_path.parent) if str(process.pid) in name]) == 1


def test_the_only_copy_of_an_old_bundle_is_never_taken_for_a_leftover(bundle_path: Path, manifest: Manifest) -> None:
    kept = bundle_path.with_name(".out.replaced-1-0")
    bundle_path.rename(kept)
    with pytest.raises(KeyError):
        failing_build(kept.with_name("out"), manifest, KeyError())
    open_bundle(kept)


def test_what_the_runtime_leaves_in_a_bundle_is_not_part_of_it(bundle_path: Path) -> None:
    (bundle_path / "engines").mkdir()
    (bundle_path / "engines" / "tensorrt_rtx-0123456789abcdef.runtime_cache").write_bytes(b"kernels of this machine")
    before = open_bundle(bundle_path).manifest
    assert seal(bundle_path, before).files == before.files
    with staged_directory(bundle_path, BUNDLE_DIRECTORY, force=True) as directory:
        shutil.copytree(bundle_path, directory, dirs_exist_ok=True)
        seal(directory, before)
