"""What sorts by hashes is computed in float32 by OpenVINO: half precision rounds the counts of the sort."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from hdruntime.backends.bundle_runner import needs_float32
from hdruntime.backends.openvino.devices import OpenVinoDevice, chosen_precision
from hdruntime.backends.precision import Precision
from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import BackendUnavailableError
from support.tiny_bundle import make_bundle


def test_a_bundle_of_hashed_attention_is_computed_in_float32(tmp_path: Path) -> None:
    device = OpenVinoDevice(name="GPU.1", model="a device", capabilities=("FP32", "FP16", "BF16"))
    made = open_bundle(make_bundle(tmp_path / "bundle")).manifest
    manifest, hashed = (
        dataclasses.replace(made, dtype="bfloat16", operators={f"hdexport::{name}": 2 for name in operators})
        for operators in (["DenseAttention"], ["LSHAttention", "ChunkAttention"])
    )
    assert (needs_float32(manifest), needs_float32(hashed)) == (False, True)
    assert chosen_precision(device, Precision.AUTO, hashed) is Precision.FLOAT32
    assert chosen_precision(device, Precision.BFLOAT16, manifest) is Precision.BFLOAT16
    with pytest.raises(BackendUnavailableError, match="sorts tokens by hashes, whose counts bfloat16 rounds"):
        chosen_precision(device, Precision.BFLOAT16, hashed)
