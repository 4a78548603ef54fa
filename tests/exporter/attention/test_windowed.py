"""A model that was given windowed attention answers as Hugging Face does under a mask of every pair of tokens."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import pytest

from hdexport.attention.window.record import Window, WindowAttention
from hdexport.checkpoint import find_checkpoint
from hdexport.verify import Grid, verify_bundle
from hdexport.verify.pytorch_reference import reference_of
from hdruntime.bundle.reader import open_bundle
from support.answers import ATOL, assert_answers, distance, inputs_of
from support.attention_records import recorded
from support.grids import nightly_unless
from support.padded_batches import batches, cases
from support.tampered_bundles import tampered
from support.windowed import WINDOWED_TYPES, expected_of, pair_mask

# Around the window and its span, the checkpoint's 64 positions, a prime, the longest.
LENGTHS = (1, 15, 16, 17, 18, 32, 33, 65, 211, 300)

SPECS = {
    "default": "window:16",
    "no globals": "window:16,global:0",
    "several globals": "window:16,global:5",
    "more globals than some texts have tokens": "window:16,global:40",
    "dilated": "window:16,dilation:2",
    "dilated by head": "window:16,global:2,dilation:1/1/2/3",
    "one token": "window:1,global:0",
    "nothing after": "window:16,right:0,global:0",
    "more after, dilated, a global": "window:5,right:16,dilation:1/1/2/3",
    "wider than any text": "window:1000",
}


def check(bundle, spec: str, lengths: tuple[int, ...] = LENGTHS, **options: Any) -> None:
    for tokens, name, input_ids, attention_mask in cases(lengths, sizes=(3,)):
        feeds = inputs_of(bundle, input_ids, attention_mask)
        assert_answers(
            bundle,
            feeds,
            expected_of(bundle, feeds, pair_mask(attention_mask, spec)),
            case=(f"{tokens} tokens", name),
            **options,
        )


@pytest.mark.parametrize(
    "model_type",
    # ELECTRA's and ERNIE's layers are BERT's; RoBERTa has every other kind of window below, and ALBERT blocks, in
    # test_converted_blocks.py.
    [nightly_unless(name not in ("albert", "electra", "ernie", "roberta"), name) for name in WINDOWED_TYPES],
)
def test_both_graphs_answer_as_hugging_face_under_a_mask_of_pairs(tiny_bundles, model_type: str) -> None:
    check(tiny_bundles(model_type, attention=SPECS["default"]), SPECS["default"])


@pytest.mark.parametrize(
    "spec",
    # The others have no global token, several, or a dilation, as well.
    [
        nightly_unless(name not in ("no globals", "several globals", "dilated", "more after, dilated, a global"), spec)
        for name, spec in SPECS.items()
        if name != "default"
    ],
)
def test_every_kind_of_window_is_as_requested(tiny_bundles, spec: str) -> None:
    check(tiny_bundles("roberta", attention=spec), spec)


@pytest.mark.parametrize("wrong", ["window:15", "window:17", "window:16,global:0", "window:16,global:2", "window:300"])
def test_the_comparison_sees_a_wrong_mask(tiny_bundles, wrong: str) -> None:
    bundle = tiny_bundles("bert", attention=SPECS["default"])
    _, *batch = next(batches(211))
    feeds = inputs_of(bundle, *batch)
    states = (
        answer["last_hidden_state"]
        for answer in (bundle.session(**feeds), expected_of(bundle, feeds, pair_mask(batch[1], wrong)))
    )
    assert distance(*states) > 100 * ATOL


def test_a_window_wider_than_any_text_is_dense_attention(tiny_bundles) -> None:
    windowed, dense = (tiny_bundles("roberta", attention=spec) for spec in (SPECS["wider than any text"], None))
    for name, *batch in batches(211):
        feeds = inputs_of(dense, *batch)
        assert_answers(windowed, feeds, dense.session(**feeds), graphs=["session"], case=(name,))


@pytest.mark.parametrize("model_type", ["bert", nightly_unless(False, "roberta")])
def test_half_precision_keeps_directions(tiny_bundles, model_type: str) -> None:
    spec = SPECS["several globals"]
    bundle = tiny_bundles(model_type, precision="float16", attention=spec)
    check(bundle, spec, (1, 17, 33, 300), cosine=0.999)


def test_no_two_tokens_meet_outside_our_operator(tiny_bundles) -> None:
    """The one product of queries and keys left in the graph is that of the global rows."""
    bundle = tiny_bundles("roberta", attention=SPECS["more globals than some texts have tokens"])
    assert bundle.manifest.operators == {"hdexport::SlidingWindowAttention": 2}
    softmaxes = [node for node in bundle.graph.graph if node.op_type == "Softmax"]
    assert [node.outputs[0].shape[2] for node in softmaxes] == [40, 40]
    without = tiny_bundles("roberta", attention=SPECS["one token"])
    assert "Softmax" not in {node.op_type for node in without.graph.graph}


def test_the_manifest_says_what_became_of_the_attention(tiny_bundles) -> None:
    bundle = tiny_bundles("roberta", attention=SPECS["dilated by head"])
    manifest = bundle.manifest
    converted = Window(tokens=16, global_tokens=2, dilation=(1, 1, 2, 3))
    assert recorded(manifest, "window") == WindowAttention(layers=(16, 16), converted=converted)
    assert recorded(manifest, "dense") is None
    assert open_bundle(bundle.path).manifest == manifest


def test_verification_passes_a_right_window_and_fails_a_wrong_one(tiny_bundles, tmp_path) -> None:
    def narrow(model: ir.Model) -> None:
        node = next(node for node in model.graph if node.op_type.startswith("SlidingWindowAttention"))
        node.attributes["right"] = ir.AttrInt64("right", 15)

    bundle = tiny_bundles("roberta", attention=SPECS["dilated by head"])
    reference = reference_of(open_bundle(bundle.path), find_checkpoint(bundle.checkpoint))
    checks = verify_bundle(open_bundle(bundle.path), reference, grid=Grid.FULL).checks
    assert all(check.passed for check in checks)
    assert {16, 17, 18, 33} <= {check.case.tokens for check in checks}
    wrong = open_bundle(tampered(bundle, tmp_path / "bundle", narrow, "model.onnx"))
    for check in verify_bundle(wrong, reference, grid=Grid.FULL).checks:
        # The first two tokens see all; from the third on, a window of 15 hides the one 16 to the right.
        assert check.passed == (check.graph != "model.onnx" or max(check.case.lengths) <= 18), check.line()
