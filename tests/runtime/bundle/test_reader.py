"""A bundle is opened only when it is whole."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import hdruntime
from hdexport.support import bundle_writer
from hdexport.support.bundle_writer import seal, write_manifest
from hdruntime.bundle import reader
from hdruntime.bundle.manifest import Manifest
from hdruntime.bundle.manifest_json import manifest_from_json
from hdruntime.bundle.reader import open_bundle
from hdruntime.bundle.verification import GraphVerification, Status, VerificationRecord
from hdruntime.constants import FORMAT_VERSION
from hdruntime.errors import (
    BundleCorruptError,
    BundleError,
    BundleNotFoundError,
    BundleVersionError,
)
from support.commands import run_here
from support.comparators import named_case
from support.every_key import write_manifest_values


def edit_manifest(path: Path, change: Callable[[dict], None]) -> None:
    data = json.loads((path / "manifest.json").read_text())
    change(data)
    write_manifest_values(path, data)


@contextlib.contextmanager
def edited(bundle: Path, edit: Callable[[dict[str, Any]], object]) -> Iterator[None]:
    """With another manifest; with its own again when the block ends."""
    own = (bundle / "manifest.json").read_bytes()
    edit_manifest(bundle, edit)
    try:
        yield
    finally:
        (bundle / "manifest.json").write_bytes(own)


def test_a_sealed_bundle_opens_and_lists_every_file_but_its_manifest(bundle_path: Path) -> None:
    (bundle_path / "notes.txt").write_text("added later")
    bundle = open_bundle(bundle_path)
    assert set(bundle.manifest.files) == {"model.onnx", "model.onnx.data", "tokenizer.json", "config.json"}
    assert bundle.file("model.onnx") == bundle_path / "model.onnx"
    assert bundle.manifest.positions.alpha == 0.4
    assert bundle.manifest.outputs[0].shape == ("batch", "tokens", 4)


@pytest.mark.parametrize("make", [lambda path: None, Path.mkdir, Path.touch], ids=["nothing", "empty", "file"])
def test_a_path_without_a_bundle_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "bundle"
    make(path)
    with pytest.raises(BundleNotFoundError, match=r"There is no bundle at .*\n.*hdexport build"):
        open_bundle(path)


@pytest.mark.parametrize("file", ["model.onnx.data", "config.json"])
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
    sha256 = reader.sha256_of_file

    def hash_together(path: Path) -> str:
        if path.name in ("tokenizer.json", "model.onnx"):
            both.wait()
        return sha256(path)

    monkeypatch.setattr(reader, "_READ_BYTES", 100)  # these files are large then
    monkeypatch.setattr(reader, "sha256_of_file", hash_together)
    monkeypatch.setattr(bundle_writer, "sha256_of_file", hash_together)
    opened = open_bundle(bundle_path)
    assert seal(bundle_path, opened.manifest) == opened.manifest


def test_no_backend_sees_a_bundle_before_all_of_it_is_checked(
    bundle_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)  # Importing it raises.
    with pytest.raises(ImportError):
        hdruntime.load(bundle_path, "onnxruntime")
    file = bundle_path / "tokenizer.json"
    file.write_bytes(file.read_bytes().swapcase())
    with pytest.raises(BundleCorruptError, match=r"tokenizer\.json .* has changed"):
        hdruntime.load(bundle_path, "onnxruntime")


def replace_by_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: os.truncate(path, 10), r"model.onnx.data .* expected \d+ bytes, found 10 bytes"),
        (Path.unlink, "lacks its file model.onnx.data"),
        (replace_by_a_pipe, "lacks its file model.onnx.data"),
    ],
    ids=["cut short", "missing", "a named pipe, which is not waited for"],
)
def test_a_damaged_file_is_refused(bundle_path: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(bundle_path / "model.onnx.data")
    for check_files in (True, False):
        with pytest.raises(BundleCorruptError, match=message):
            open_bundle(bundle_path, check_files=check_files)


def test_a_path_that_leaves_the_bundle_is_refused(bundle_path: Path) -> None:
    (bundle_path.parent / "outside").write_text("secret")
    record = {"sha256": "0" * 64, "size_bytes": 6}
    for relative in ("../outside", "/etc/hostname", "a/../../outside", "a\\..\\b", "", ".", "x\0y"):
        with (
            named_case(relative),
            edited(bundle_path, lambda data, path=relative: data["files"].update({path: record})),
            pytest.raises(BundleCorruptError, match=r"outside the bundle|lacks its file"),
        ):
            open_bundle(bundle_path)


def test_a_link_that_leaves_the_bundle_is_refused(bundle_path: Path) -> None:
    outside = bundle_path.parent / "outside"
    (bundle_path / "config.json").rename(outside)
    (bundle_path / "config.json").symlink_to(outside)
    with pytest.raises(
        BundleCorruptError, match=r"'config.json', which is outside the bundle: it is a link.*\n.*cp -rL"
    ):
        open_bundle(bundle_path)


def test_a_newer_format_is_refused_even_with_other_keys(bundle_path: Path) -> None:
    newer = FORMAT_VERSION + 1
    (bundle_path / "manifest.json").write_text(json.dumps({"format_version": newer, "graph": 5}))
    with pytest.raises(BundleVersionError, match=rf"format version {newer}; .* reads {FORMAT_VERSION}") as e:
        open_bundle(bundle_path)
    assert "pip install -U hdexport" in str(e.value)


def test_the_format_of_development_versions_is_refused_with_the_way_out(bundle_path: Path) -> None:
    for older in range(1, FORMAT_VERSION):
        (bundle_path / "manifest.json").write_text(json.dumps({"format_version": older, "windows": []}))
        message = rf"format version {older}, .* reads {FORMAT_VERSION}\.\n.*hdexport build"
        with named_case(older), pytest.raises(BundleVersionError, match=message):
            open_bundle(bundle_path)


def test_a_malformed_manifest_is_refused(bundle_path: Path) -> None:
    for text in ("", "[]", "\xff", "[" * 100_000, '{"format_version": "1"}'):
        (bundle_path / "manifest.json").write_bytes(text.encode("latin-1"))
        with named_case(text[:20]), pytest.raises(BundleCorruptError, match="manifest"):
            open_bundle(bundle_path)


FIRST_FORMAT = [field.name for field in dataclasses.fields(Manifest) if field.default is dataclasses.MISSING]
"""The keys that every manifest has; those that came later have a default."""


def test_a_missing_key_is_named(bundle_path: Path) -> None:
    for key in FIRST_FORMAT:
        with (
            named_case(key),
            edited(bundle_path, lambda data, key=key: data.pop(key)),
            pytest.raises(BundleCorruptError, match=rf"manifest\.{key} is missing\.\nRebuild or copy"),
        ):
            open_bundle(bundle_path)


WRONG_TYPES: list[tuple[str, object, str]] = [
    ("max_len", True, "manifest.max_len should be `int`, not true"),
    ("max_len", 0, "manifest.max_len should be `int` >= 1, not 0"),
    ("labels", [1], r"manifest.labels\[0\] should be `str`, not 1"),
    ("outputs", [{"name": "x"}], r"manifest.outputs\[0\].dtype is missing"),
    ("operators", {"Attention": "1"}, r"manifest.operators\['Attention'\] should be `int`, not \"1\""),
    ("tokenizer", 5, "manifest.tokenizer should be `object | null`, not 5"),
]


def test_a_wrongly_typed_key_is_named(bundle_path: Path) -> None:
    for key, value, message in WRONG_TYPES:
        with (
            named_case(message),
            edited(bundle_path, lambda data, key=key, value=value: data.update({key: value})),
            pytest.raises(BundleCorruptError, match=message),
        ):
            open_bundle(bundle_path)


def test_a_graph_without_a_checksum_is_refused(bundle_path: Path) -> None:
    edit_manifest(bundle_path, lambda data: data["files"].pop("model.onnx"))
    with pytest.raises(BundleCorruptError, match=r"names 'model.onnx' but has no checksum"):
        open_bundle(bundle_path)


UNKNOWN_KEYS: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda data: data.update(later_addition=1), r"manifest\.later_addition is unknown"),
    (lambda data: data["inputs"][1].update({"de fault": 1}), r"manifest\.inputs\[1\]\['de fault'\] is unknown"),
    (lambda data: data["files"]["config.json"].update(sha=""), r"files\['config\.json'\]\.sha is unknown"),
]


def test_an_unknown_key_is_named(bundle_path: Path) -> None:
    for edit, message in UNKNOWN_KEYS:
        with (
            named_case(message),
            edited(bundle_path, edit),
            pytest.raises(BundleCorruptError, match=message),
        ):
            open_bundle(bundle_path)


def test_a_manifest_with_a_flipped_bit_is_refused(bundle_path: Path) -> None:
    content = (bundle_path / "manifest.json").read_bytes()
    for place in range(len(content)):
        flipped = bytearray(content)
        flipped[place] ^= 1 << (place * 5 % 8)
        with named_case(bytes(flipped[max(place - 20, 0) : place + 20])), pytest.raises(BundleError):
            manifest_from_json(bytes(flipped))


def test_a_manifest_that_was_edited_by_hand_is_refused_until_its_checksum_is_written(bundle_path: Path) -> None:
    file = bundle_path / "manifest.json"
    file.write_text(file.read_text().replace('"tiny"', '"edited"'))
    with pytest.raises(BundleCorruptError, match=r"manifest_sha256 is .* or was edited by hand \(hdexport inspect BUN"):
        open_bundle(bundle_path)
    assert run_here("inspect", bundle_path).returncode == 1
    assert run_here("inspect", bundle_path, "--fix-checksum").returncode == 0
    assert open_bundle(bundle_path).manifest.name == "edited"
    before = file.read_text().replace('"max_len"', '"max_length"')
    file.write_text(before)
    refused = run_here("inspect", bundle_path, "--fix-checksum")
    assert (refused.returncode, "max_len is missing" in refused.stderr) == (1, True)
    assert file.read_text() == before


def test_the_checksum_is_of_the_canonical_form(bundle_path: Path) -> None:
    values = json.loads((bundle_path / "manifest.json").read_text())
    written = values.pop("manifest_sha256")
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"))
    assert written == hashlib.sha256(canonical.encode()).hexdigest()


def test_a_manifest_that_is_no_regular_file_or_too_large_is_refused(bundle_path: Path) -> None:
    file = bundle_path / "manifest.json"
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(BundleCorruptError, match=r"manifest\.json is not a regular file"):
        open_bundle(bundle_path)
    file.unlink()
    file.symlink_to("/dev/zero")
    with pytest.raises(BundleCorruptError, match=r"manifest\.json is not a regular file"):
        open_bundle(bundle_path)
    file.unlink()
    with open(file, "wb") as sparse:
        sparse.truncate(2**34)
    with pytest.raises(BundleCorruptError, match="has more than 16777216 bytes, which no manifest has"):
        open_bundle(bundle_path)


def test_a_bundle_that_names_no_source_of_its_tokenizer_has_the_librarys_ids(bundle_path: Path) -> None:
    edit_manifest(bundle_path, lambda manifest: manifest["tokenizer"].pop("source"))
    tokenizer = open_bundle(bundle_path).manifest.tokenizer
    assert tokenizer is not None
    assert tokenizer.source == "library"


def test_the_manifest_is_replaced_whole_and_hashes_nothing(bundle_path: Path) -> None:
    manifest = open_bundle(bundle_path).manifest
    (bundle_path / "config.json").write_text("changed")
    write_manifest(bundle_path, dataclasses.replace(manifest, verification=VerificationRecord(passed=True)))
    wrong = VerificationRecord(graphs={"a": GraphVerification(status=Status.FAIL, max_abs_error=float("nan"))})
    with pytest.raises(ValueError, match="JSON compliant"):
        write_manifest(bundle_path, dataclasses.replace(manifest, verification=wrong))
    assert json.loads((bundle_path / "manifest.json").read_text())["verification"]["passed"] is True
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
