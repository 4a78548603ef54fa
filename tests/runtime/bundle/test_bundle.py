"""A bundle is opened only when it is whole, and appears only when it is."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
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

import hdruntime
from hdruntime.bundle import digests, reader, staging, writer
from hdruntime.bundle.manifest import Manifest
from hdruntime.bundle.reader import open_bundle
from hdruntime.bundle.writer import seal, staged_bundle, write_manifest
from hdruntime.constants import FORMAT_VERSION
from hdruntime.errors import (
    BundleCorruptError,
    BundleNotFoundError,
    BundleVersionError,
    HdexportError,
    OutputExistsError,
)


def edit_manifest(path: Path, change: Callable[[dict], None]) -> None:
    data = json.loads((path / "manifest.json").read_text())
    change(data)
    (path / "manifest.json").write_text(json.dumps(data))


def contents(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


# Opening


def test_a_sealed_bundle_opens_and_lists_every_file_but_its_manifest(bundle_path: Path) -> None:
    bundle = open_bundle(bundle_path)
    assert set(bundle.manifest.files) == {"model.onnx", "model.onnx.data", "tokenizer.json", "config.json"}
    assert bundle.file("model.onnx") == bundle_path / "model.onnx"
    assert bundle.manifest.positions.alpha == 0.4
    assert bundle.manifest.outputs[0].shape == ("batch", "tokens", 4)


def test_a_manifest_reads_back_as_it_was_written(bundle_path: Path) -> None:
    manifest = open_bundle(bundle_path).manifest
    assert seal(bundle_path, manifest) == manifest
    assert open_bundle(bundle_path).manifest == manifest


def test_unlisted_files_are_ignored(bundle_path: Path) -> None:
    (bundle_path / "notes.txt").write_text("mine")
    assert "notes.txt" not in open_bundle(bundle_path).manifest.files


@pytest.mark.parametrize("make", [lambda path: None, Path.mkdir, Path.touch], ids=["nothing", "empty", "file"])
def test_a_path_without_a_bundle_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "bundle"
    make(path)
    with pytest.raises(BundleNotFoundError, match=r"There is no bundle at .*\n.*hdexport build"):
        open_bundle(path)


@pytest.mark.parametrize("file", ["model.onnx", "model.onnx.data", "tokenizer.json", "config.json"])
def test_a_changed_byte_is_refused(bundle_path: Path, file: str) -> None:
    data = bytearray((bundle_path / file).read_bytes())
    data[len(data) // 2] ^= 1
    (bundle_path / file).write_bytes(data)
    expected = open_bundle(bundle_path, check_files=False).manifest.files[file].sha256
    with pytest.raises(BundleCorruptError, match=rf"{file} .* has changed: expected sha256 {expected}, found") as e:
        open_bundle(bundle_path)
    assert "Rebuild or copy the bundle again" in str(e.value)


def test_files_are_hashed_side_by_side(bundle_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the first two waits for the other."""
    both = threading.Barrier(2, timeout=10)
    sha256 = digests.sha256_of_file

    def hash_together(path: Path) -> str:
        if path.name in ("tokenizer.json", "model.onnx"):
            both.wait()
        return sha256(path)

    monkeypatch.setattr(reader, "sha256_of_file", hash_together)
    monkeypatch.setattr(writer, "sha256_of_file", hash_together)
    opened = open_bundle(bundle_path)
    assert seal(bundle_path, opened.manifest) == opened.manifest


@pytest.mark.parametrize("file", ["model.onnx", "tokenizer.json"])
def test_no_backend_sees_a_bundle_before_all_of_it_is_checked(
    bundle_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)  # Importing it raises.
    with pytest.raises(ImportError):
        hdruntime.load(bundle_path, "onnxruntime")
    (bundle_path / file).write_bytes((bundle_path / file).read_bytes().swapcase())
    with pytest.raises(BundleCorruptError, match=f"{file} .* has changed"):
        hdruntime.load(bundle_path, "onnxruntime")


def replace_by_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("check_files", [True, False])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: os.truncate(path, 10), r"model.onnx.data .* expected \d+ bytes, found 10 bytes"),
        (Path.unlink, "lacks its file model.onnx.data"),
        (replace_by_a_pipe, "lacks its file model.onnx.data"),
    ],
    ids=["cut short", "missing", "a named pipe, which is not waited for"],
)
def test_a_damaged_file_is_refused(
    bundle_path: Path, damage: Callable[[Path], object], message: str, check_files: bool
) -> None:
    damage(bundle_path / "model.onnx.data")
    with pytest.raises(BundleCorruptError, match=message):
        open_bundle(bundle_path, check_files=check_files)


@pytest.mark.parametrize("relative", ["../outside", "/etc/hostname", "a/../../outside", "a\\..\\b", "", ".", "x\0y"])
def test_a_path_that_leaves_the_bundle_is_refused(bundle_path: Path, relative: str) -> None:
    (bundle_path.parent / "outside").write_text("secret")
    record = {"sha256": "0" * 64, "size_bytes": 6}
    edit_manifest(bundle_path, lambda data: data["files"].update({relative: record}))
    with pytest.raises(BundleCorruptError, match=r"outside the bundle|lacks its file"):
        open_bundle(bundle_path)


def test_a_link_that_leaves_the_bundle_is_refused(bundle_path: Path) -> None:
    outside = bundle_path.parent / "outside"
    (bundle_path / "config.json").rename(outside)
    (bundle_path / "config.json").symlink_to(outside)
    with pytest.raises(
        BundleCorruptError, match=r"'config.json', which is outside the bundle: it is a link.*\n.*cp -rL"
    ):
        open_bundle(bundle_path)


def test_a_linked_bundle_opens(bundle_path: Path) -> None:
    link = bundle_path.parent / "latest"
    link.symlink_to(bundle_path)
    assert open_bundle(link).manifest == open_bundle(bundle_path).manifest


def test_a_newer_format_is_refused_even_with_other_keys(bundle_path: Path) -> None:
    newer = FORMAT_VERSION + 1
    (bundle_path / "manifest.json").write_text(json.dumps({"format_version": newer, "graph": 5}))
    with pytest.raises(BundleVersionError, match=rf"format version {newer}; .* up to {FORMAT_VERSION}") as e:
        open_bundle(bundle_path)
    assert "pip install -U hdexport" in str(e.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\xff", "[" * 100_000, '{"format_version": "1"}'])
def test_a_malformed_manifest_is_refused(bundle_path: Path, text: str) -> None:
    (bundle_path / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(BundleCorruptError, match="manifest"):
        open_bundle(bundle_path)


FIRST_FORMAT = [field.name for field in dataclasses.fields(Manifest) if field.default is dataclasses.MISSING]
"""The keys that every manifest has; those that came later have a default."""


@pytest.mark.parametrize("key", FIRST_FORMAT)
def test_a_missing_key_is_named(bundle_path: Path, key: str) -> None:
    edit_manifest(bundle_path, lambda data: data.pop(key))
    with pytest.raises(BundleCorruptError, match=rf"manifest\.{key} is missing\.\nRebuild or copy"):
        open_bundle(bundle_path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("max_len", "16", r'manifest.max_len should be `int`, not "16"'),
        ("max_len", True, "manifest.max_len should be `int`, not true"),
        ("max_len", 0, "manifest.max_len should be `int` >= 1, not 0"),
        ("vocab_size", 1.5, "manifest.vocab_size should be `int`, not 1.5"),
        ("format_version", 0, "manifest.format_version should be `int` >= 1, not 0"),
        ("name", None, "manifest.name should be `str`, not null"),
        ("labels", "a", 'manifest.labels should be `array`, not "a"'),
        ("labels", [1], r"manifest.labels\[0\] should be `str`, not 1"),
        ("outputs", [{"name": "x"}], r"manifest.outputs\[0\].dtype is missing"),
        ("operators", {"Attention": "1"}, r"manifest.operators\['Attention'\] should be `int`, not \"1\""),
        ("attention", {"Attention": 1}, r"manifest.attention should be `array`, not "),
        ("tokenizer", 5, "manifest.tokenizer should be `object | null`, not 5"),
        ("files", [], "manifest.files should be `object`, not \\[\\]"),
    ],
)
def test_a_wrongly_typed_key_is_named(bundle_path: Path, key: str, value: object, message: str) -> None:
    edit_manifest(bundle_path, lambda data: data.update({key: value}))
    with pytest.raises(BundleCorruptError, match=message):
        open_bundle(bundle_path)


def test_a_graph_without_a_checksum_is_refused(bundle_path: Path) -> None:
    edit_manifest(bundle_path, lambda data: data["files"].pop("model.onnx"))
    with pytest.raises(BundleCorruptError, match=r"names 'model.onnx' but has no checksum"):
        open_bundle(bundle_path)


def test_an_unknown_key_of_the_same_format_is_ignored(bundle_path: Path) -> None:
    edit_manifest(bundle_path, lambda data: data.update(later_addition=1))
    assert open_bundle(bundle_path).manifest.name == "tiny"


def test_only_listed_files_can_be_asked_for(bundle_path: Path) -> None:
    with pytest.raises(BundleCorruptError, match=r"lists no file '../outside'"):
        open_bundle(bundle_path).file("../outside")


def test_the_manifest_is_replaced_whole_and_hashes_nothing(bundle_path: Path) -> None:
    manifest = open_bundle(bundle_path).manifest
    (bundle_path / "config.json").write_text("changed")
    write_manifest(bundle_path, dataclasses.replace(manifest, verification={"passed": True}))
    with pytest.raises(ValueError, match="JSON compliant"):
        write_manifest(bundle_path, dataclasses.replace(manifest, verification={"error": float("nan")}))
    assert json.loads((bundle_path / "manifest.json").read_text())["verification"] == {"passed": True}
    assert not list(bundle_path.glob(".manifest*"))
    with pytest.raises(BundleCorruptError, match=r"config.json"):
        open_bundle(bundle_path)


def test_a_manifest_is_utf_8_whatever_names_are(bundle_path: Path) -> None:
    """Python keeps bytes that the locale cannot decode, as those of a path, as lone surrogates."""
    names = {"bücher": "bücher", "bücher".encode().decode("ascii", "surrogateescape"): "bücher", "a\ud800": "a\ufffd"}
    manifest = open_bundle(bundle_path).manifest
    for name, read in names.items():
        seal(bundle_path, dataclasses.replace(manifest, name=name))
        assert open_bundle(bundle_path).manifest.name == read


# Writing


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
    with staged_bundle(destination, force=force) as directory:
        fill(directory, manifest)
        before_the_end()
        if error is not None:
            raise error


def refused_before_the_block(path: Path, error: type[Exception], message: str, *, force: bool = False) -> None:
    with pytest.raises(error, match=message), staged_bundle(path, force=force):
        pytest.fail("the block ran")


def names_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_a_staged_bundle_appears_when_it_is_whole(tmp_path: Path, manifest: Manifest) -> None:
    destination = tmp_path / "a" / "b"
    with staged_bundle(destination, force=False) as directory:
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


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_an_error_leaves_the_old_bundle(bundle_path: Path, manifest: Manifest, error: type[BaseException]) -> None:
    before = contents(bundle_path)
    with pytest.raises(error):
        failing_build(bundle_path, manifest, error(), force=True)
    assert contents(bundle_path) == before
    assert names_in(bundle_path.parent) == {bundle_path.name}


def test_an_existing_bundle_needs_force_and_nothing_is_done_before(bundle_path: Path) -> None:
    before = contents(bundle_path)
    refused_before_the_block(bundle_path, OutputExistsError, "--force")
    assert contents(bundle_path) == before


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two_renames"])
def test_force_replaces_a_bundle(
    bundle_path: Path, manifest: Manifest, exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:
        monkeypatch.setattr(staging, "_exchange", lambda one, other: False)
    with staged_bundle(bundle_path, force=True) as directory:
        fill(directory, manifest)
        assert "model.onnx" in contents(bundle_path)
    assert set(contents(bundle_path)) == {"manifest.json", "weights/a.bin"}
    assert names_in(bundle_path.parent) == {bundle_path.name}


def test_this_kernel_exchanges_directories(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    if not staging._exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("no renameat2(RENAME_EXCHANGE) in this kernel or file system")
    assert names_in(tmp_path / "a") == {"b"}


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
        with staged_bundle(bundle_path, force=True) as directory:
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
    message = r"not part of a bundle of hdexport \(results.jsonl\); --force would delete them"
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
    refused_before_the_block(tmp_path / "file" / "bundle", HdexportError, "choose another place")


def test_a_link_at_the_destination_is_followed(bundle_path: Path, manifest: Manifest) -> None:
    link = bundle_path.parent / "latest"
    link.symlink_to(bundle_path)
    with staged_bundle(link, force=True) as directory:
        fill(directory, manifest)
    assert link.is_symlink()
    assert "weights/a.bin" in contents(bundle_path)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_explained(bundle_path: Path, manifest: Manifest, code: int) -> None:
    before = contents(bundle_path)
    error = OSError(code, os.strerror(code), "half.onnx")
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
        from hdruntime.bundle.writer import staged_bundle
        with staged_bundle(Path({str(mount)!r}) / "bundle", force=False) as directory:
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
from hdruntime.bundle.writer import seal, staged_bundle
destination, source, when = sys.argv[1:]
manifest = open_bundle(Path(source)).manifest

def wait():
    print("ready", flush=True)
    sys.stdin.read()

if when == "after_exchange":
    staging._sync_path = lambda path: wait() if path == Path(destination).parent else None
with staged_bundle(Path(destination), force=True) as directory:
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
    with staged_bundle(destination, force=True) as directory:
        fill(directory, open_bundle(source).manifest)
    assert names_in(tmp_path) == {"source", "out"}


def test_the_directory_of_a_living_build_is_left_alone(bundle_path: Path, manifest: Manifest) -> None:
    destination = bundle_path.parent / "out"
    with build_that_waits(destination, bundle_path, "in_the_block") as process:
        with staged_bundle(destination, force=False) as directory:
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
    with staged_bundle(bundle_path, force=True) as directory:
        shutil.copytree(bundle_path, directory, dirs_exist_ok=True)
        seal(directory, before)


WITHOUT_LOCKS = """
import sys
sys.modules["fcntl"] = None  # importing it raises
import hdruntime
with hdruntime.load(sys.argv[1], backend="onnxruntime") as session:
    print(session(input_ids=[[2, 4, 3]])["last_hidden_state"].shape)
"""


def test_a_bundle_is_read_and_run_where_files_have_no_locks(bundle_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_LOCKS, bundle_path], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("(1, 3, 4)\n", "")
