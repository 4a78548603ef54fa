"""No command uses a bundle that is damaged; each damage and its words are in tests/runtime/bundle/test_reader.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from support.tiny_bundle import make_bundle


def test_a_changed_file_is_refused_by_every_command(refused: Callable[..., str], tmp_path: Path) -> None:
    bundle: Path = make_bundle(tmp_path / "bundle")
    data = bytearray((bundle / "model.onnx").read_bytes())
    data[len(data) // 2] ^= 1
    (bundle / "model.onnx").write_bytes(data)
    (tmp_path / "texts.txt").write_text("long documents")
    before = sorted(path.name for path in tmp_path.rglob("*"))
    for command, *arguments in (
        ("inspect",),
        ("inspect", "--json"),
        ("verify",),
        ("run", tmp_path / "texts.txt", "-o", tmp_path / "out.jsonl"),
        ("bench", "-o", tmp_path / "bench"),
    ):
        message = r"model\.onnx .* has changed: expected sha256 .*\nRebuild or copy the bundle again"
        assert refused(command, bundle, *arguments, message=message) == "", command
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
