"""`hdexport quality`: its table, its file and its refusals; the measurement itself is in tests/exporter/quality."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.commands import Command, Refused


def scores_as_shown(shown: str, result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """LongTextMode -> its score of later sentences, which the table shows as well."""
    finding, *_ = shown.splitlines()
    assert finding.startswith("whole texts")
    assert "later sentences" in finding
    assert f"later ({result['queries']['later']})" in shown
    rows = {line.split()[0]: line.split() for line in shown.splitlines() if line.strip()}
    of_mode = {score["mode"]: score for score in result["scores"] if score["kind"] == "later"}
    assert set(of_mode) == {"truncated", "split", "whole"} <= set(rows)
    assert of_mode["truncated"]["difference"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    for mode, score in of_mode.items():
        mrr = score["mrr"]
        assert 0 <= mrr["low"] <= mrr["value"] <= mrr["high"] <= 1, mode
        assert f"{mrr['value']:.2f}" in rows[mode]
    return of_mode


def test_json_is_what_the_file_would_hold_and_several_bundles_are_named(
    hdexport: Command, bundle: Path, tmp_path: Path
) -> None:
    rows = [
        {
            "id": f"text-{text}",
            "body": " ".join(f"Row {text} has its own sentence {n} of eight words." for n in range(15)),
        }
        for text in range(6)
    ]
    texts = tmp_path / "rows.jsonl"
    texts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = hdexport("quality", bundle, "--texts", texts, "--text-column", "body", "--json", "--limit", 5)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["texts"] == result["long_texts"] == 5
    assert result["truncated_texts"] == {str(bundle): 5}
    assert {score["mode"] for score in result["scores"]} == {"truncated", "split", "whole"}
    file = tmp_path / "results.json"
    shown = hdexport("quality", bundle, "--texts", texts, "--text-column", "body", "--limit", 5, "-o", file).stdout
    assert json.loads(file.read_text()) | {"command": result["command"]} == result
    scores_as_shown(shown, result)
    assert "Only the first 5 texts were read; for more: --limit N" in shown
    assert f"{bundle} takes fewer tokens than 5 texts have: these texts were truncated." in shown
    assert {score["precision"] for score in result["scores"]} == {"float32"}
    int8 = hdexport("quality", bundle, "--texts", texts, "--text-column", "body", "--limit", 5, "--precision", "int8")
    assert "has no graph in int8" in int8.stderr


def test_what_cannot_be_measured_is_refused(refused: Refused, bundle: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("short\n" * 3)
    refused("quality", bundle, "--texts", texts, message="0 of 3 texts have more than 64 tokens")
    rows = tmp_path / "rows.csv"
    rows.write_text("text\nwords\n")
    refused("quality", bundle, "--texts", rows, "--text-column", "body", message="body")
    nowhere = tmp_path / "missing" / "out.json"
    refused("quality", bundle, "--texts", texts, "-o", nowhere, message="its directory does not exist")
    refused("quality", bundle, "--texts", texts, "-o", tmp_path, message="cannot be written: it is a directory")
