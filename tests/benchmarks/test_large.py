"""The benchmark of large embedders, with one tiny layer."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.cpu import large


@pytest.mark.nightly
def test_a_build_and_each_session_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openvino")
    output = tmp_path / "found.jsonl"
    arguments = ["large", "--layers", "1", "--lengths", "16", "--only", "build-no-verify", "session"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--folder", str(tmp_path), "--output", str(output)])
    large.main()
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row.get("backend") for row in rows] == [None, *(backend for backend, _ in large.SESSIONS)]
    for row in rows:
        assert row["growth_bytes"] > 10**8
        assert row["checkpoint_bytes"] > 3 * 10**8
    assert all(row["run_s"]["16"]["median"] > 0 for row in rows[1:])


def test_sessions_without_a_bundle_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "checkpoint").mkdir()
    monkeypatch.setattr(sys, "argv", ["large", "--only", "session", "--folder", str(tmp_path)])
    with pytest.raises(SystemExit):
        large.main()
    assert "build it first" in capsys.readouterr().err
