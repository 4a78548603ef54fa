"""A loaded bundle depends on none of its files, and loads from links, caches and copies in other processes."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hdruntime
from hdruntime import MultiVectorEncoder, SentenceEncoder
from hdruntime.errors import BackendUnavailableError, BundleCorruptError
from support.comparators import named_case

TEXTS = ["long documents", "read", ""]

Change = Callable[[Path, Path], None]
"""What happens to a link to a bundle, and the bundle, while it is loaded."""


def switch(link: Path, bundle: Path) -> None:
    other = bundle.parent / "other"
    shutil.copytree(bundle, other)
    (other / "tokenizer.json").write_text("{}")
    link.unlink()
    link.symlink_to(other)


def remove(link: Path, bundle: Path) -> None:
    link.unlink()
    shutil.rmtree(bundle)


def leave(link: Path, bundle: Path) -> None:
    os.chdir("/")


def answers_of(path: Any, change: Change | None, link: Path, bundle: Path, backend: str) -> list[np.ndarray]:
    """Vectors of one encoder and one session, loaded before a change; of short texts and of cut ones."""
    with SentenceEncoder(path, backend=backend) as encoder, hdruntime.load(path, backend) as session:
        if change is not None:
            change(link, bundle)
        encoder.max_seq_length = 3
        cut = encoder.encode(TEXTS)
        return [cut, session.embed(TEXTS), session.embed(TEXTS[:1]), session.embed(["long " * 90], overflow="truncate")]


@pytest.mark.parametrize("change", [switch, remove, leave])
def test_what_becomes_of_the_files_changes_no_answer(
    new_bundle: Callable[..., Path], tmp_path: Path, change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, link = new_bundle(external_data=True), tmp_path / "current"
    link.symlink_to(bundle)
    monkeypatch.chdir(tmp_path)
    expected = answers_of(bundle, None, link, bundle, "onnxruntime")
    found = answers_of("current", change, link, bundle, "onnxruntime")
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_openvinos_graph_for_padding_is_read_when_the_bundle_is_loaded(tiny_bundles: Any, tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    bundle = tmp_path / "bundle"
    shutil.copytree(tiny_bundles("bert", openvino=True).path, bundle)
    with hdruntime.load(bundle, "openvino") as session:
        expected = session.embed(["w7", "w7 w8 w9 w10"])
    with hdruntime.load(bundle, "openvino") as session:
        shutil.rmtree(bundle)
        # A single token runs in the graph for padding, which no batch has run so far.
        ids = np.array([[7]])
        assert session(input_ids=ids)["last_hidden_state"].shape[:2] == (1, 1)
        np.testing.assert_array_equal(session.embed(["w7", "w7 w8 w9 w10"]), expected)


def snapshot_of(bundle: Path, cache: Path) -> Path:
    """The bundle as the Hugging Face Hub's cache holds it: links to blobs."""
    blobs, snapshot = cache / "blobs", cache / "snapshots" / "0123abc" / "in a folder"
    blobs.mkdir(parents=True)
    for number, file in enumerate(sorted(path for path in bundle.rglob("*") if path.is_file())):
        shutil.copy(file, blobs / f"blob{number}")
        link = snapshot / file.relative_to(bundle)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blobs / f"blob{number}", link.parent))
    return snapshot


def test_a_snapshot_in_the_cache_of_the_hub_loads(new_bundle: Callable[..., Path], tmp_path: Path) -> None:
    bundle = new_bundle(external_data=True)
    snapshot = snapshot_of(bundle, tmp_path / "models--organisation--name")
    with hdruntime.load(bundle) as one, hdruntime.load(snapshot) as other:
        np.testing.assert_array_equal(one.embed(TEXTS), other.embed(TEXTS))


def test_a_link_out_of_the_cache_is_refused(new_bundle: Callable[..., Path], tmp_path: Path) -> None:
    snapshot = snapshot_of(new_bundle(), tmp_path / "models--organisation--name")
    outside = tmp_path / "tokenizer.json"
    shutil.move((snapshot / "tokenizer.json").resolve(), outside)
    (snapshot / "tokenizer.json").unlink()
    (snapshot / "tokenizer.json").symlink_to(outside)
    with pytest.raises(BundleCorruptError, match="outside the bundle"):
        hdruntime.load(snapshot)


def test_an_encoder_is_pickled_by_where_its_bundle_lies(bundle_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(bundle_path.parent)
    with SentenceEncoder(bundle_path.name, pooling="max", truncate_dim=2) as encoder:
        encoder.max_seq_length = 3
        encoder.prompts = {"query": "read "}
        os.chdir("/")
        content = pickle.dumps(encoder)
        with pickle.loads(content) as other:
            np.testing.assert_array_equal(other.encode_query(TEXTS), encoder.encode_query(TEXTS))
    assert len(content) < (bundle_path / "tokenizer.json").stat().st_size + 2000
    assert issubclass(MultiVectorEncoder, hdruntime.bundle_model.BundleModel), "which has what pickles all encoders"


DEVICES = [
    ({"device": "cpu"}, None),
    ({"device": "cpu", "backend": "tensorrt"}, "The backend tensorrt does not run on the device cpu"),
    ({"device": "cuda", "backend": "onnxruntime"}, "The backend onnxruntime does not run on the device cuda"),
]


def test_the_names_of_pytorchs_devices_choose_where_a_bundle_runs(bundle_path: Path) -> None:
    for options, message in DEVICES:
        with named_case(options):
            if message is None:
                with SentenceEncoder(bundle_path, **options) as encoder:
                    assert encoder.encode(TEXTS, device="cpu").shape == (3, 4)
                continue
            with pytest.raises(BackendUnavailableError, match=message):
                SentenceEncoder(bundle_path, **options)


@pytest.mark.skipif(bool(hdruntime.gpu.driver.gpus()), reason="there is an NVIDIA GPU here")
def test_a_gpu_that_is_asked_for_and_missing_is_no_cpu(bundle_path: Path) -> None:
    with pytest.raises(BackendUnavailableError, match=r"cannot run on the device cuda. .*\n.*Leave out the device"):
        SentenceEncoder(bundle_path, device="cuda")
