"""The attention types of a manifest: told apart by name, and records that are malformed are refused."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir
import pytest

from hdexport.attention.attention_type import AttentionType
from hdexport.attention.registry import attention_of, attention_types, lowering_of
from hdexport.lowering.lowering import Lowering
from hdplugins import ONNX_DOMAIN
from hdruntime.bundle.manifest import Manifest
from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import BundleCorruptError
from support.attention_type_checks import assert_attention_types_conform
from support.comparators import named_case
from support.tiny_bundle import make_bundle

WINDOW = {"type": "window", "layers": [3, 5], "converted": {"tokens": 3, "global_tokens": 1, "dilation": [1]}}
BLOCKS = {
    "type": "blocks",
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
    return open_bundle(make_bundle(tmp_path_factory.mktemp("attention_types") / "bundle")).manifest


def test_every_attention_type_conforms() -> None:
    assert_attention_types_conform()
    assert [type_.name for type_ in attention_types()] == [
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


MALFORMED = (
    ({**BLOCKS, "mode": "lists"}, r"manifest\.attention\[1\]\.mode should be hf_eval or table for bigbird, not li"),
    ({"type": "window"}, r"manifest\.attention\[1\]\.layers is missing"),
    (
        {**WINDOW, "converted": {**WINDOW["converted"], "dilation": [1, 2, 3]}},
        r"manifest\.attention\[1\]\.converted\.dilation has 3 values for \d+ heads",
    ),
    (
        {"type": "spiral"},
        r"attention type 'spiral'; known here: dense, window, blocks.*\.\nInstall a newer hdexport: pip install",
    ),
)


def test_a_record_that_is_malformed_is_refused(manifest: Manifest) -> None:
    for attention, message in MALFORMED:
        both = ({"type": "dense", "layers": 1}, attention)
        with named_case(attention), pytest.raises(BundleCorruptError, match=message):
            attention_of(dataclasses.replace(manifest, attention=both))


def test_an_attention_type_has_the_lowerings_of_its_operators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By default the operator's function bodies."""

    class Theirs(Lowering):
        operator = "FavorAttention"

    class TheirType(AttentionType):
        name = "theirs"
        lowerings = (Theirs(),)

    node = ir.node("FavorAttention_compat", [], domain=ONNX_DOMAIN)
    assert type(lowering_of(node)) is Lowering
    every_type = (*attention_types(), TheirType())
    monkeypatch.setattr("hdexport.attention.registry.attention_types", lambda: every_type)
    assert lowering_of(node) is TheirType.lowerings[0]
