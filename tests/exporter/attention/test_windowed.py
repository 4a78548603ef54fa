"""A model that was given windowed attention answers as Hugging Face does under a mask of every pair of tokens."""

from __future__ import annotations

import json
import shutil

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
from hdruntime.bundle.writer import seal
from support.attention_records import recorded
from support.comparators import assert_close, assert_same_directions, named_case
from support.format_1 import format_1_of
from support.grids import nightly_unless
from support.padded_batches import batches, cases
from support.tiny_models import COPIES, PAD_TOKEN_ID

ATOL = 2e-5
WINDOW = 16
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


def expected_states(bundle, input_ids: np.ndarray, attention_mask: np.ndarray, spec: str) -> np.ndarray:
    extra = {"position_ids": positions(input_ids, after_padding_row=bundle.manifest.positions.first_row > 0)}
    if bundle.manifest.model_type == "distilbert":
        extra = {}
    states = bundle.hugging_face(input_ids, pair_mask(attention_mask, spec), **extra)["last_hidden_state"]
    return states[attention_mask == 1]


def check_every_case(bundle, spec: str) -> None:
    for tokens, name, input_ids, attention_mask in cases(LENGTHS, sizes=(3,)):
        expected = expected_states(bundle, input_ids, attention_mask, spec)
        inputs = {spec.name: np.zeros_like(input_ids) for spec in bundle.manifest.inputs}
        inputs |= {"input_ids": input_ids, "attention_mask": attention_mask}
        for graph, run in (("portable", bundle.portable), ("session", bundle.session)):
            with named_case(graph, f"{tokens} tokens", name):
                assert_close(run(**inputs)["last_hidden_state"][attention_mask == 1], expected, atol=ATOL)


@pytest.mark.parametrize(
    "model_type",
    # ELECTRA's and ERNIE's layers are BERT's; RoBERTa has every other kind of window below, and ALBERT blocks, in
    # test_converted_blocks.py.
    [nightly_unless(name not in ("albert", "electra", "ernie", "roberta"), name) for name in WINDOWED_TYPES],
)
def test_both_graphs_answer_as_hugging_face_under_a_mask_of_pairs(tiny_bundles, model_type: str) -> None:
    check_every_case(tiny_bundles(model_type, attention=SPECS["default"]), SPECS["default"])


@pytest.mark.parametrize(
    "spec",
    # The others have no global token, several, or a dilation, as well.
    [
        nightly_unless(name not in ("no globals", "several globals", "dilated"), spec)
        for name, spec in SPECS.items()
        if name != "default"
    ],
)
def test_every_kind_of_window_is_what_was_asked_for(tiny_bundles, spec: str) -> None:
    check_every_case(tiny_bundles("roberta", attention=spec), spec)


@pytest.mark.parametrize("wrong", ["window:15", "window:17", "window:16,global:0", "window:16,global:2", "window:300"])
def test_the_comparison_sees_a_wrong_mask(tiny_bundles, wrong: str) -> None:
    bundle = tiny_bundles("bert", attention=SPECS["default"])
    _, input_ids, attention_mask = next(batches(211))
    got = bundle.session(input_ids=input_ids, attention_mask=attention_mask)["last_hidden_state"]
    difference = np.abs(got[attention_mask == 1] - expected_states(bundle, input_ids, attention_mask, wrong)).max()
    assert difference > 100 * ATOL


def test_a_window_wider_than_any_text_is_dense_attention(tiny_bundles) -> None:
    windowed, dense = (tiny_bundles("roberta", attention=spec) for spec in (SPECS["wider than any text"], None))
    for _, input_ids, attention_mask in batches(211):
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        pair = (bundle.session(**inputs)["last_hidden_state"] for bundle in (windowed, dense))
        assert_close(*(states[attention_mask == 1] for states in pair), atol=ATOL)


@pytest.mark.parametrize("model_type", ["bert", nightly_unless(False, "roberta")])
def test_half_precision_keeps_directions(tiny_bundles, model_type: str) -> None:
    bundle = tiny_bundles(model_type, precision="float16", attention=SPECS["several globals"])
    for tokens, name, input_ids, attention_mask in cases((1, 17, 33, 300), sizes=(3,)):
        inputs = {spec.name: np.zeros_like(input_ids) for spec in bundle.manifest.inputs}
        inputs |= {"input_ids": input_ids, "attention_mask": attention_mask}
        expected = expected_states(bundle, input_ids, attention_mask, SPECS["several globals"])
        for run in (bundle.portable, bundle.session):
            got = run(**inputs)["last_hidden_state"][attention_mask == 1]
            with named_case(f"{tokens} tokens", name):
                assert_same_directions(got, expected, cosine=0.999)


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


def test_a_bundle_from_before_windows_is_still_read(tiny_bundles, tmp_path) -> None:
    path = tmp_path / "bundle"
    shutil.copytree(tiny_bundles("bert").path, path)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest = format_1_of(manifest)
    for name in ("windows", "window", "global_attention"):
        del manifest[name]
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert open_bundle(path).manifest == tiny_bundles("bert").manifest


def test_verification_passes_a_right_window_and_fails_a_wrong_one(tiny_bundles, tmp_path) -> None:
    bundle = tiny_bundles("roberta", attention=SPECS["dilated by head"])
    path = tmp_path / "bundle"
    shutil.copytree(bundle.path, path)
    reference = reference_of(bundle.session._bundle, find_checkpoint(bundle.checkpoint))
    checks = verify_bundle(open_bundle(path), reference, grid=Grid.FULL).checks
    assert all(check.passed for check in checks)
    assert {16, 17, 18, 33} <= {check.case.tokens for check in checks}
    model = ir.load(path / "model.onnx")
    node = next(node for node in model.graph if node.op_type.startswith("SlidingWindowAttention"))
    node.attributes["right"] = ir.AttrInt64("right", 15)
    ir.save(model, path / "model.onnx")
    seal(path, bundle.manifest)
    for check in verify_bundle(open_bundle(path), reference, grid=Grid.FULL).checks:
        # The first two tokens see all; from the third on, a window of 15 hides the one 16 to the right.
        assert check.passed == (check.graph != "model.onnx" or max(check.case.lengths) <= 18), check.line()
