"""The benchmark of weights by size: its cases build what they are named after."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.cpu import weights_dtype


@pytest.mark.nightly
def test_cases_differ_in_the_dtype_of_their_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    pytest.importorskip("openvino")
    output = tmp_path / "found.jsonl"
    arguments = ["weights_dtype", "--shapes", "sample", "--cases", "kept", "float32", "int8"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--folder", str(tmp_path), "--output", str(output)])
    weights_dtype.main()
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    sizes = {row["case"]: row["bundle_bytes"] for row in rows if row["session"] is None}
    assert sizes["kept"] < 0.6 * sizes["float32"]
    manifests = {case: json.loads((tmp_path / f"sample-{case}" / "manifest.json").read_text()) for case in sizes}
    assert manifests["kept"]["int8"] is None
    assert manifests["int8"]["int8"]["texts"] is None, "not calibrated"
    assert [row["session"] for row in rows if row["case"] == "kept"] == [
        None, "onnxruntime float32", "openvino float32", "openvino bfloat16",
    ]  # fmt: skip
    # Not the peak of this process, which started the sessions.
    assert all(row["peak_bytes"] < 400e6 for row in rows if row["session"] is not None)
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(table) == 1 + 7
    assert table[1].startswith("| sample | kept | onnxruntime float32 | ")
