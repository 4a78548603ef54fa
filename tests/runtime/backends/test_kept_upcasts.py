"""Half-precision weights are upcast in each run where float32 copies do not fit in memory."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np
import pytest

import hdruntime
from hdruntime.backends.onnxruntime import sessions
from hdruntime.bundle.manifest import FileRecord
from hdruntime.bundle.reader import Bundle, open_bundle


def with_stored(bundle: Bundle, *, bytes_per_weight: int) -> Bundle:
    """A bundle whose manifest says that a weight takes so many bytes."""
    record = FileRecord(sha256="0" * 64, size_bytes=bytes_per_weight * bundle.manifest.parameters)
    files = {**bundle.manifest.files, "model.onnx.data": record}
    return Bundle(bundle.path, dataclasses.replace(bundle.manifest, files=files))


def test_copies_that_do_not_fit_are_not_made(
    bundle_path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bundle = open_bundle(bundle_path)
    copies = 4 * bundle.manifest.parameters
    half, full = (with_stored(bundle, bytes_per_weight=size) for size in (2, 4))
    monkeypatch.setattr(sessions, "free_bytes", lambda: copies)
    with caplog.at_level(logging.WARNING):
        assert sessions.kept_upcasts(full) == []
        assert not caplog.records
        assert sessions.kept_upcasts(half) == ["ConstantFolding"]
    assert "upcasts them in each run" in caplog.text
    assert sessions.kept_upcasts(half, copies) == sessions.kept_upcasts(full, 1) == []
    assert sessions.kept_upcasts(half, copies - 1) == ["ConstantFolding"]
    for free in (None, 2 * copies):
        monkeypatch.setattr(sessions, "free_bytes", lambda free=free: free)
        assert sessions.kept_upcasts(half) == []


def test_outputs_without_copies_are_equal(tiny_bundles, monkeypatch: pytest.MonkeyPatch) -> None:
    half = tiny_bundles("bert", "feature-extraction", "bfloat16").path
    ids = np.arange(5, 45).reshape(2, 20)
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    with hdruntime.load(half, "onnxruntime", threads=1) as session:
        wanted = session(**feeds)
    monkeypatch.setattr("hdruntime.backends.onnxruntime.cpu.kept_upcasts", lambda *_: ["ConstantFolding"])
    with hdruntime.load(half, "onnxruntime", threads=1) as session:
        got = session(**feeds)
    assert {name: array.tobytes() for name, array in got.items()} == {
        name: array.tobytes() for name, array in wanted.items()
    }
