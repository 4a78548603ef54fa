"""A model that was given windowed attention answers as Hugging Face does under a mask of every pair of tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from hdexport.attention.kinds import attention_from_spec
from hdexport.attention.window.record import Window, WindowAttention
from hdexport.checkpoint import find_checkpoint
from hdexport.families import SUPPORTED_MODEL_TYPES, family_of
from hdexport.verify import Grid, verify_bundle
from hdexport.verify.pytorch_reference import reference_of
from hdruntime.bundle.reader import open_bundle
from support.answers import ATOL, assert_answers, distance, inputs_of
from support.attention_records import recorded
from support.grids import nightly_unless
from support.padded_batches import batches, cases
from support.tampered_bundles import tampered
from support.tiny_models import COPIES, PAD_TOKEN_ID

WINDOWED_TYPES = [
    name for name in SUPPORTED_MODEL_TYPES if family_of(name).why_not_converted is None and name not in COPIES
]

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
    "wider than any text": "window:1000",
}


def pair_mask(attention_mask: np.ndarray, spec: str, *, heads: int = 4) -> np.ndarray:
    """[batch, heads, tokens, tokens], True where the third axis sees the fourth: the definition, pair by pair."""
    window = attention_from_spec(spec)["window"].window
    steps = window.dilation * (heads // len(window.dilation))
    tokens = attention_mask.shape[1]
    offset = np.arange(tokens)[None, :] - np.arange(tokens)[:, None]
    seen = np.zeros((len(attention_mask), heads, tokens, tokens), bool)
    for row, real in enumerate(attention_mask):
        first = np.flatnonzero(real)[: window.global_tokens]
        for head, step in enumerate(steps):
            seen[row, head] = (np.abs(offset) <= window.tokens * step) & (offset % step == 0)
            seen[row, head][:, first] = True
            seen[row, head][first, :] = True
        seen[row] &= real.astype(bool)
    return seen


def positions(input_ids: np.ndarray, *, after_padding_row: bool) -> np.ndarray:
    """What Hugging Face would number the tokens by if it had been given a [batch, tokens] mask."""
    real = input_ids != PAD_TOKEN_ID
    counted = np.cumsum(real, axis=1) * real + PAD_TOKEN_ID
    return counted if after_padding_row else np.arange(input_ids.shape[1])[None]


def expected_of(bundle, feeds: dict[str, np.ndarray], spec: str) -> dict[str, np.ndarray]:
    """Hugging Face's answer under a mask of all pairs."""
    others = {name: values for name, values in feeds.items() if name not in ("input_ids", "attention_mask")}
    if bundle.manifest.model_type != "distilbert":
        after_padding_row = bundle.manifest.positions.first_row > 0
        others["position_ids"] = positions(feeds["input_ids"], after_padding_row=after_padding_row)
    return bundle.hugging_face(feeds["input_ids"], pair_mask(feeds["attention_mask"], spec), **others)


def check(bundle, spec: str, lengths: tuple[int, ...] = LENGTHS, **options: Any) -> None:
    for tokens, name, input_ids, attention_mask in cases(lengths, sizes=(3,)):
        feeds = inputs_of(bundle, input_ids, attention_mask)
        assert_answers(bundle, feeds, expected_of(bundle, feeds, spec), case=(f"{tokens} tokens", name), **options)


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
        nightly_unless(name not in ("no globals", "several globals", "dilated"), spec)
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
    states = (answer["last_hidden_state"] for answer in (bundle.session(**feeds), expected_of(bundle, feeds, wrong)))
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
