"""No command uses a bundle that is damaged, and each says what is wrong with it and what helps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hdruntime.constants import FORMAT_VERSION
from support.tiny_bundle import make_bundle
from support.tiny_models import change_json


def _changed_byte(bundle: Path) -> None:
    data = bytearray((bundle / "model.onnx").read_bytes())
    data[len(data) // 2] ^= 1
    (bundle / "model.onnx").write_bytes(data)


def _newer_format(bundle: Path) -> None:
    change_json(bundle / "manifest.json", format_version=FORMAT_VERSION + 1)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_changed_byte, r"model\.onnx .* has changed: expected sha256 .*\nRebuild or copy the bundle again"),
        (
            _newer_format,
            rf"format version {FORMAT_VERSION + 1}; .* reads {FORMAT_VERSION}(.|\n)*pip install -U hdexport",
        ),
        (
            lambda bundle: (bundle / "manifest.json").unlink(),
            r"There is no bundle at .*manifest\.json\.\nBuild one with: hdexport build",
        ),
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
