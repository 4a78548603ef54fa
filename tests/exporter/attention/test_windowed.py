"""A model that was given windowed attention answers as Hugging Face does under a mask of every pair of tokens.

Every run tries what is traced of each family and mixture, and the graphs of two; the other graphs are nightly.
"""

from __future__ import annotations

from typing import Any

import pytest

from hdexport.attention.window import Window, WindowAttention
from hdexport.verify import Grid
from hdruntime.bundle.reader import open_bundle
from support.answers import ATOL, assert_answers, distance, inputs_of
from support.attention_records import recorded
from support.grids import nightly_unless
from support.padded_batches import batches, cases
from support.verified import verified
from support.windowed import WINDOWED_TYPES, expected_of, pair_mask

# Around the window and its span, the checkpoint's 64 positions, a prime, the longest.
LENGTHS = (1, 15, 16, 17, 18, 32, 33, 65, 211, 300)
FEW_LENGTHS = (1, 17, 33, 65)

ONE_GLOBAL, SEVERAL_GLOBALS = "window:16", "window:16,global:5"
MORE_GLOBALS_THAN_SOME_TOKENS = "window:16,global:40"
NO_GLOBALS_DILATED = "window:16,global:0,dilation:2"
MORE_AFTER_DILATED_BY_HEAD = "window:5,right:16,dilation:1/1/2/3"
MIXTURES = (
    ONE_GLOBAL,
    MORE_GLOBALS_THAN_SOME_TOKENS,
    NO_GLOBALS_DILATED,
    "window:16,global:0",
    SEVERAL_GLOBALS,
    "window:16,dilation:2",
    "window:16,global:2,dilation:1/1/2/3",
    "window:1,global:0",
    "window:16,right:0,global:0",
    "window:1000",
)


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
    ("model_type", "spec"),
    [*((name, ONE_GLOBAL) for name in WINDOWED_TYPES), *(("roberta", spec) for spec in MIXTURES[1:])],
)
def test_what_is_traced_answers_as_hugging_face_under_a_mask_of_pairs(
    traced_models, model_type: str, spec: str
) -> None:
    check(traced_models(model_type, attention=spec), spec, FEW_LENGTHS)


@pytest.mark.parametrize("model_type", [nightly_unless(name == "bert", name) for name in WINDOWED_TYPES])
def test_both_graphs_answer_as_hugging_face_under_a_mask_of_pairs(tiny_bundles, model_type: str) -> None:
    check(tiny_bundles(model_type, attention=ONE_GLOBAL), ONE_GLOBAL)


@pytest.mark.parametrize("spec", [MORE_AFTER_DILATED_BY_HEAD, *(nightly_unless(False, spec) for spec in MIXTURES)])
def test_every_kind_of_window_is_as_requested(tiny_bundles, spec: str) -> None:
    check(tiny_bundles("roberta", attention=spec), spec)


def test_the_comparison_sees_a_wrong_mask(tiny_bundles) -> None:
    bundle = tiny_bundles("bert", attention=ONE_GLOBAL)
    _, *batch = next(batches(211))
    feeds = inputs_of(bundle, *batch)
    got = bundle.session(**feeds)["last_hidden_state"]
    for wrong in ("window:17", "window:16,global:2"):
        expected = expected_of(bundle, feeds, pair_mask(batch[1], wrong))["last_hidden_state"]
        assert distance(got, expected) > 100 * ATOL, wrong


@pytest.mark.nightly
def test_half_precision_keeps_directions(tiny_bundles) -> None:
    bundle = tiny_bundles("bert", precision="float16", attention=SEVERAL_GLOBALS)
    check(bundle, SEVERAL_GLOBALS, (1, 17, 33, 300), cosine=0.999)


def test_no_two_tokens_meet_outside_our_operator(tiny_bundles) -> None:
    """The one product of queries and keys left in the graph is that of the global rows: one of each head."""
    bundle = tiny_bundles("bert", attention=ONE_GLOBAL)
    assert bundle.manifest.operators == {"hdexport::SlidingWindowAttention": 2}
    softmaxes = [node for node in bundle.graph.graph if node.op_type == "Softmax"]
    assert [node.outputs[0].shape[2] for node in softmaxes] == 2 * [bundle.manifest.num_heads]


def test_the_manifest_says_what_became_of_the_attention(tiny_bundles) -> None:
    bundle = tiny_bundles("roberta", attention=MORE_AFTER_DILATED_BY_HEAD)
    manifest = bundle.manifest
    converted = Window(tokens=5, global_tokens=1, dilation=(1, 1, 2, 3), right=16)
    assert recorded(manifest, "window") == WindowAttention(layers=(5, 5), converted=converted)
    assert recorded(manifest, "dense") is None
    assert open_bundle(bundle.path).manifest == manifest


def test_verification_passes_a_right_window_around_its_edges(tiny_bundles) -> None:
    """A wrong one fails in tests/exporter/verify/test_wrong_graphs.py."""
    bundle = tiny_bundles("roberta", attention=MORE_AFTER_DILATED_BY_HEAD)
    checks = verified(bundle, grid=Grid.FULL).checks
    assert all(check.passed for check in checks)
    assert {16, 17, 18} <= {check.case.tokens for check in checks}
