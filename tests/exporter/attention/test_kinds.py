"""The kinds of attention of a manifest: told apart by name, and records that are malformed are refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import onnx_ir as ir
import pytest

from hdexport.attention.kind import AttentionKind
from hdexport.attention.kinds import attention_of, kinds, lowering_of
from hdexport.lowering.lowering import Lowering
from hdplugins import ONNX_DOMAIN
from hdruntime.bundle.manifest import Manifest
from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import BundleCorruptError
from support.comparators import named_case
from support.kind_checks import assert_kinds_conform
from support.tiny_bundle import make_bundle

WINDOW = {"kind": "window", "layers": [3, 5], "converted": {"tokens": 3, "global_tokens": 1, "dilation": [1]}}
BLOCKS = {
    "kind": "blocks",
    "pattern": "bigbird",
    "block_size": 2,
    "mode": "hf_eval",
    "random_blocks": 1,
    "global_tokens": 0,
    "last_block": "padded",
    "dense_tokens": 14,
    "converted": True,
}


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return open_bundle(make_bundle(tmp_path_factory.mktemp("kinds") / "bundle")).manifest


def test_every_kind_conforms() -> None:
    assert_kinds_conform()
    assert [kind.name for kind in kinds()][:4] == ["dense", "window", "blocks", "lsh"]


MALFORMED = (
    ({**BLOCKS, "mode": "lists"}, r"manifest\.attention\[1\]\.mode should be hf_eval or table for bigbird, not li"),
    ({"kind": "window"}, r"manifest\.attention\[1\]\.layers is missing"),
    (
        {**WINDOW, "converted": {**WINDOW["converted"], "dilation": [1, 2, 3]}},
        r"manifest\.attention\[1\]\.converted\.dilation has 3 values for \d+ heads",
    ),
    (
        {"kind": "spiral"},
        r"attention of the kind 'spiral'; known here: dense, window, blocks.*\.\nInstall the package .*pip install",
    ),
)


def test_a_record_that_is_malformed_is_refused(manifest: Manifest) -> None:
    for attention, message in MALFORMED:
        both = ({"kind": "dense", "layers": 1}, attention)
        with named_case(attention), pytest.raises(BundleCorruptError, match=message):
            attention_of(dataclasses.replace(manifest, attention=both))


def test_a_kind_of_another_package_says_what_backends_get_in_the_place_of_its_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where no kind says so, the operator's bodies."""

    class Theirs(Lowering):
        operator = "FavorAttention"

    class TheirKind(AttentionKind):
        name = "theirs"
        lowerings = (Theirs(),)

    node = ir.node("FavorAttention_compat", [], domain=ONNX_DOMAIN)
    assert type(lowering_of(node)) is Lowering
    every_kind = (*kinds(), TheirKind())
    monkeypatch.setattr("hdexport.attention.kinds.kinds", lambda: every_kind)
    assert lowering_of(node) is TheirKind.lowerings[0]


def test_a_kind_of_another_package_that_cannot_be_loaded_is_left_out_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "broken-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[hdexport.attention]\nbroken = no_such_package:Kind\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    kinds.cache_clear()
    try:
        names = [
            "dense",
            "window",
            "blocks",
            "lsh",
            "favor",
            "clipped",
            "disentangled",
            "local_global",
            "relative",
            "traced",
        ]
        assert [kind.name for kind in kinds()] == names
    finally:
        monkeypatch.undo()
        kinds.cache_clear()
    assert "The kind of attention broken (no_such_package:Kind) cannot be loaded" in caplog.text
