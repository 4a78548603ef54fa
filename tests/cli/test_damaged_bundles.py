"""No command uses a bundle that is damaged, and each says what is wrong with it and what helps."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hdruntime.constants import FORMAT_VERSION
from support.tiny_bundle import make_bundle


def _changed_byte(bundle: Path) -> None:
    data = bytearray((bundle / "model.onnx").read_bytes())
    data[len(data) // 2] ^= 1
    (bundle / "model.onnx").write_bytes(data)


def _missing_file(bundle: Path) -> None:
    (bundle / "tokenizer.json").unlink()


def _cut_short(bundle: Path) -> None:
    os.truncate(bundle / "model.onnx", 100)


def _edit_manifest(bundle: Path, change: Callable[[dict], object]) -> None:
    data = json.loads((bundle / "manifest.json").read_text())
    change(data)
    (bundle / "manifest.json").write_text(json.dumps(data))


def _path_outside(bundle: Path) -> None:
    record = {"sha256": "0" * 64, "size_bytes": 1}
    _edit_manifest(bundle, lambda data: data["files"].update({"../outside": record}))


def _newer_format(bundle: Path) -> None:
    _edit_manifest(bundle, lambda data: data.update(format_version=FORMAT_VERSION + 1))


def _no_manifest(bundle: Path) -> None:
    (bundle / "manifest.json").unlink()


def _half_a_manifest(bundle: Path) -> None:
    os.truncate(bundle / "manifest.json", 100)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_changed_byte, r"model\.onnx .* has changed: expected sha256 .*\nRebuild or copy the bundle again"),
        (_cut_short, r"model\.onnx .* has changed: expected \d+ bytes, found 100 bytes\.\nRebuild or copy"),
        (_missing_file, r"lacks its file tokenizer\.json\.\nRebuild or copy the bundle again"),
        (_path_outside, r"lists '\.\./outside', which is outside the bundle\.\n.* do not use this bundle"),
        (
            _newer_format,
            rf"format version {FORMAT_VERSION + 1}; .* up to {FORMAT_VERSION}(.|\n)*pip install -U hdexport",
        ),
        (_no_manifest, r"There is no bundle at .*manifest\.json\.\nBuild one with: hdexport build"),
        (_half_a_manifest, r"manifest\.json: .*"),
    ],
)
def test_it_is_refused_by_every_command(
    refused: Callable[..., str], tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    bundle: Path = make_bundle(tmp_path / "bundle")
    damage(bundle)
    (tmp_path / "texts.txt").write_text("long documents")
    before = sorted(path.name for path in tmp_path.rglob("*"))
    assert refused("inspect", bundle, message=message) == ""
    assert refused("inspect", bundle, "--json", message=message) == ""
    assert refused("verify", bundle, message=message) == ""
    assert refused("run", bundle, tmp_path / "texts.txt", "-o", tmp_path / "out.jsonl", message=message) == ""
    assert refused("bench", bundle, "-o", tmp_path / "bench", message=message) == ""
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
