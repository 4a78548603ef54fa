"""The sparse operators: definitions, and ONNX bodies against the definitions, at lengths around every edge."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hdplugins import OPERATORS
from hdplugins.attention.dense.reference import dense_attention
from hdplugins.attention.operator import BodyVariant
from support.attention_graphs import chain_of
from support.attention_layers import GLOBALS, PADDINGS, Description, SparseLayer, token_kinds
from support.comparators import assert_as_accurate, assert_close, named_case
from support.described_operators import DESCRIPTIONS
from support.function_bodies import growths_bytes, new_session, operators_of, planned_bytes, run
from support.grids import nightly_unless
from support.operators.blocks import Blocks
from support.operators.window import Window

BLOCKS, LSH, WINDOWS = (
    DESCRIPTIONS[name] for name in ("BlockSparseAttention", "LSHAttention", "SlidingWindowAttention")
)

each_variant = pytest.mark.parametrize("variant", BodyVariant, ids=lambda variant: variant.value)
each_operator = pytest.mark.parametrize("described", DESCRIPTIONS.values(), ids=DESCRIPTIONS)


def feeds_of(layer: SparseLayer, kinds: np.ndarray) -> dict[str, np.ndarray]:
    """States such that the softmax is far from uniform, and the mask."""
    generator = np.random.default_rng(kinds.shape[1])
    (batch, tokens), names = kinds.shape, layer.operator.state_names
    shapes = {name: (batch, tokens, layer.heads_of(name), layer.head_dim) for name in names}
    states = {name: (1.5 * generator.normal(size=shape)).astype(layer.dtype) for name, shape in shapes.items()}
    first = layer.operator.state_names[0]
    states[first] = layer.decided(torch.from_numpy(states[first])).numpy()
    return {**states, layer.operator.mask: kinds}


def by_definition(
    feeds: Mapping[str, np.ndarray], dtype: torch.dtype, layer: SparseLayer, **changes: Any
) -> np.ndarray:
    tensors = {name: torch.from_numpy(feed) for name, feed in feeds.items()}
    return layer.by_definition(
        [tensors[name].to(dtype) for name in layer.operator.state_names], tensors, **changes
    ).numpy()


def exact_and_allowed(feeds: Mapping[str, np.ndarray], layer: SparseLayer) -> tuple[np.ndarray, float]:
    """The answer in float64, and twice PyTorch's error in the dtype, plus one rounding of the largest value."""
    exact = by_definition(feeds, torch.float64, layer)
    error = max(error_of_pytorch(feeds, layer, exact), usual_error_of_pytorch(layer))
    return exact, float(2 * error + np.abs(exact).max() * np.finfo(layer.dtype).eps)


def pytorchs_answer(feeds: Mapping[str, np.ndarray], layer: SparseLayer) -> np.ndarray:
    return by_definition(feeds, getattr(torch, layer.dtype), layer)


def error_of_pytorch(feeds: Mapping[str, np.ndarray], layer: SparseLayer, exact: np.ndarray) -> float:
    return float(np.abs(pytorchs_answer(feeds, layer) - exact).max())


@functools.cache
def usual_error_of_pytorch(layer: SparseLayer) -> float:
    """A text of one or two tokens has too few values to show the effect of rounding."""
    feeds = feeds_of(layer, token_kinds("none", 211, globals_="scattered", bound=layer.bound))
    return error_of_pytorch(feeds, layer, by_definition(feeds, torch.float64, layer))


@functools.cache
def session_of(layers: tuple[SparseLayer, ...], variant: BodyVariant) -> onnxruntime.InferenceSession:
    return new_session(chain_of(layers, variant))


@functools.lru_cache(maxsize=256)
def question_of(
    layer: SparseLayer, globals_: str, padding: str, tokens: int, batch: int
) -> tuple[dict[str, np.ndarray], np.ndarray, float]:
    """The feeds, the answer and the error allowed: worked out once for both orders of blocks."""
    feeds = feeds_of(layer, token_kinds(padding, tokens, globals_=globals_, bound=layer.bound, batch=batch))
    return (feeds, *exact_and_allowed(feeds, layer))


def assert_right(
    layer: SparseLayer, variant: BodyVariant, padding: str, tokens: int, *, globals_: str = "scattered", batch: int = 3
) -> None:
    feeds, exact, allowed = question_of(layer, globals_, padding, tokens, batch)
    got = run(session_of((layer,), variant), feeds)
    with named_case(layer, f"{tokens} tokens", f"padding {padding}", f"globals {globals_}", f"batch {batch}"):
        assert (got[feeds[layer.operator.mask] == 0] == 0).all()
        assert_close(got, exact, atol=allowed)


def test_every_sparse_operator_is_described() -> None:
    assert set(DESCRIPTIONS) == set(OPERATORS) - {
        "ClippedDistanceAttention",
        "DisentangledAttention",
        "DenseAttention",
        "FavorAttention",
        "LocalGlobalAttention",
        "RelativeAttention",
    }
    assert all(layer.operator is OPERATORS[name] for name, which in DESCRIPTIONS.items() for layer in which.layers)


# The definition.


@each_operator
def test_the_definition_is_a_softmax_over_the_keys_in_view_as_often_as_they_count(described: Description) -> None:
    for layer, kinds in described.by_hand:
        feeds = feeds_of(replace(layer, dtype="float64"), kinds)
        got = by_definition(feeds, torch.float64, layer)
        for batch, i, head in np.ndindex(got.shape[:3]):
            vectors = feeds[layer.operator.state_names[0]][batch, :, head]
            seen = layer.keys_by_hand(kinds[batch], vectors, head, i)
            expected = np.zeros(layer.head_dim)
            if kinds[batch, i] and seen:
                own = head // (layer.heads // layer.heads_of("value"))
                scores = layer.keys_of(feeds)[batch, seen, own] @ vectors[i] * layer.head_dim**-0.5
                weights = np.exp(scores - scores.max())
                expected = weights @ feeds["value"][batch, seen, own] / weights.sum()
            with named_case(layer, kinds[batch].tolist(), head, i):
                assert_close(got[batch, i, head], expected, atol=1e-12)


@pytest.mark.parametrize(
    ("layer", "tokens"), [described.dense for described in DESCRIPTIONS.values() if described.dense], ids=str
)
def test_a_text_that_is_short_enough_is_attended_to_densely(layer: SparseLayer, tokens: int) -> None:
    for padding in PADDINGS:
        kinds = token_kinds(padding, tokens, globals_="scattered", bound=layer.bound)
        feeds = feeds_of(replace(layer, dtype="float64"), kinds)
        got, real = by_definition(feeds, torch.float64, layer), kinds != 0
        states = (torch.from_numpy(feeds[name]) for name in layer.operator.state_names)
        dense = dense_attention(*states, torch.from_numpy(real), scale=32**-0.5).numpy()
        with named_case(padding):
            assert_close(got[real], dense[real], atol=1e-12)
            assert (got[~real] == 0).all()


@each_variant
def test_queries_of_unseen_tokens_see_their_window_and_nothing_beyond_it(variant: BodyVariant) -> None:
    """At lengths at which none, some and most of them see no key, which is 0."""
    for place, layer in enumerate(WINDOWS.layers):
        lengths = layer.lengths
        for number, tokens in enumerate((4, lengths[1 + place % 3], lengths[-1 - place % 2])):
            globals_ = ("none", "none", "scattered")[number % 3] if layer.bound else "none"
            assert_right(layer, variant, "unseen", tokens, globals_=globals_, batch=3 - 2 * (number % 2))
        if layer.bound == 0 and max(layer.left, layer.right) * max(layer.dilation) < 50:  # type: ignore[attr-defined]
            feeds, exact, _ = question_of(layer, "none", "unseen", 211, 1)
            nothing = (exact == 0).all(axis=(2, 3))
            assert nothing.sum() > (feeds[layer.operator.mask] == 0).sum(), str(layer)
            got = run(session_of((layer,), variant), feeds)
            assert (got[nothing] == 0).all(), str(layer)


@each_variant
def test_texts_that_end_by_row_do_not_see_padding_behind_them(variant: BodyVariant) -> None:
    """Of blocks, the shorter text is dense, the longer one is not; padded, both are as they are alone."""
    for layer in (
        BLOCKS.layers[1],
        BLOCKS.layers[3],
        LSH.layers[3],
        LSH.layers[4],
    ):
        session = session_of((layer,), variant)
        for tokens in (70, 87):
            padded = feeds_of(layer, token_kinds("none", 130, batch=2))
            padded["token_mask"][0, tokens:] = 0
            alone = {name: feed[:1, :tokens] for name, feed in padded.items()}
            _, allowed = exact_and_allowed(alone, layer)
            own = run(session, alone)
            with named_case(layer, tokens):
                assert_close(run(session, padded)[:1, :tokens], own.astype(np.float64), atol=allowed)


@each_operator
def test_what_an_operator_does_not_define_is_refused(described: Description) -> None:
    for layer, changes, message in described.undefined:
        feeds = feeds_of(layer, token_kinds("none", 9, globals_="all", bound=layer.bound))
        with named_case(changes), pytest.raises(ValueError, match=message):
            by_definition(feeds, torch.float32, layer, **changes)


# The bodies against the definition.


@each_variant
@each_operator
def test_a_body_matches_the_definition_at_every_length(described: Description, variant: BodyVariant) -> None:
    """Globals, padding and batch alternate: each length meets several of them, and each layer all."""
    for place, layer in enumerate(described.layers):
        for number, tokens in enumerate(layer.lengths, place):
            globals_ = GLOBALS[number % 4] if layer.bound else "none"
            assert_right(layer, variant, PADDINGS[number % 5], tokens, globals_=globals_, batch=(3, 1, 3)[number % 3])


@each_variant
@each_operator
def test_short_and_long_texts_globals_and_padding_mix(described: Description, variant: BodyVariant) -> None:
    """Every padding meets every choice of globals, and every length every padding."""
    for place, (layer, tokens) in enumerate(described.mixed):
        for number, padding in enumerate(PADDINGS, place):
            for globals_ in (GLOBALS[number % 4], GLOBALS[(number + 2) % 4]) if layer.bound else ("none",):
                assert_right(layer, variant, padding, tokens, globals_=globals_)


@each_variant
@pytest.mark.parametrize(
    ("layer", "tokens", "padding", "batch"),
    [
        nightly_unless(not is_nightly, *case)
        for described in DESCRIPTIONS.values()
        for *case, is_nightly in described.long
    ],
    ids=str,
)
def test_a_body_matches_the_definition_on_long_texts(
    layer: SparseLayer, tokens: int, padding: str, batch: int, variant: BodyVariant
) -> None:
    assert_right(layer, variant, padding, tokens, batch=batch)


@st.composite
def block_layers(draw: st.DrawFn) -> Blocks:
    first, last, window = draw(st.integers(0, 3)), draw(st.integers(0, 1)), draw(st.integers(-1, 3))
    heads = draw(st.integers(1, 3))
    rows = st.tuples(st.sampled_from([1, heads]), st.integers(0, 7), st.integers(1, 3))
    least = 0 if first or last or window >= 0 else 1
    return Blocks(
        block=draw(st.integers(1, 9)),
        first=first,
        last=last,
        window=window,
        repeats=draw(st.integers(least, 3)),
        dense=draw(st.sampled_from([0, 1, 11, 20])),
        by_row=draw(st.integers(0, 1)),
        listed=draw(st.none() | rows),
        heads=heads,
        head_dim=8,
    )


@settings(max_examples=12)
@given(layer=block_layers(), tokens=st.integers(1, 45), variant=st.sampled_from(BodyVariant), data=st.data())
def test_any_body_of_blocks_matches_the_definition_under_any_mask(
    layer: Blocks, tokens: int, variant: BodyVariant, data: st.DataObject
) -> None:
    real = data.draw(st.lists(st.lists(st.integers(0, 1), min_size=tokens, max_size=tokens), min_size=1, max_size=3))
    feeds = feeds_of(layer, np.array(real, np.int32))
    exact = by_definition(feeds, torch.float64, layer)
    # Measured 1.3e-6; values reach 6.
    assert_close(run(new_session(chain_of([layer], variant)), feeds), exact, atol=4e-6)


@each_operator
def test_the_measures_of_bodies_and_kernels_refuse_wrong_answers(described: Description) -> None:
    for layer in described.measured:
        kinds = token_kinds("right", 211, globals_="scattered", bound=layer.bound)
        feeds = feeds_of(layer, kinds)
        exact, allowed = exact_and_allowed(feeds, layer)
        assert_close(exact.astype(layer.dtype), exact, atol=allowed)
        wrong = {str(other): by_definition(feeds, torch.float64, other) for other in described.wrong(layer)}
        wrong["scale"] = by_definition(feeds, torch.float64, layer, scale=1.01 * layer.head_dim**-0.5)
        # Global tokens that count as local, and padding that counts as a token.
        for before, after in ((2, 1), (0, 1)) if layer.bound else ((0, 1),):
            changed = {**feeds, layer.operator.mask: np.where(kinds == before, after, kinds).astype(np.int32)}
            wrong[f"kind {before} as {after}"] = by_definition(changed, torch.float64, layer)
        kernels = {"right": torch.from_numpy(exact), "pytorch": torch.from_numpy(pytorchs_answer(feeds, layer))}
        assert_as_accurate(torch.from_numpy(exact.astype(layer.dtype)), **kernels)
        for name, answer in wrong.items():
            with named_case(layer, name):
                with pytest.raises(AssertionError):
                    assert_close(answer, exact, atol=allowed)
                with pytest.raises(AssertionError):
                    assert_as_accurate(torch.from_numpy(answer.astype(layer.dtype)), **kernels)


def test_the_measure_of_a_body_refuses_a_global_key_that_counts_twice() -> None:
    layer = Window(left=16, right=16, bound=1)
    kinds = np.ones((1, 64), np.int32)
    kinds[0, 40] = 2
    feeds = feeds_of(layer, kinds)
    exact, allowed = exact_and_allowed(feeds, layer)
    # The global key again, behind the text and where no window reaches: queries near the first copy see both.
    far = {name: np.concatenate([feeds[name], feeds[name][:, 40:41]], axis=1) for name in layer.operator.state_names}
    twice = np.concatenate([kinds, [[2]]], axis=1).astype(np.int32)
    wrong = by_definition({**far, "token_kind": twice}, torch.float64, replace(layer, bound=2))[:, :64]
    with pytest.raises(AssertionError):
        assert_close(wrong, exact, atol=allowed)


@each_variant
@each_operator
def test_content_of_padding_does_not_change_the_answer(described: Description, variant: BodyVariant) -> None:
    for layer, padding in ((described.mixed[-1][0], "right"), (described.repeated, "holes")):
        kinds = token_kinds(padding, 97, globals_="scattered", bound=layer.bound)
        feeds = feeds_of(layer, kinds)
        session = session_of((layer,), variant)
        before = run(session, feeds)
        for name in layer.operator.state_names:
            feeds[name][kinds == 0] = 50.0
        np.testing.assert_array_equal(before, run(session, feeds), err_msg=f"{layer}, {padding}")


@each_variant
@each_operator
def test_large_scores_overflow_in_no_dtype(described: Description, variant: BodyVariant) -> None:
    """Scaled after the product, 60 x 60 x 64 would be outside float16. Of blocks, 40 tokens are dense, 97 sparse."""
    layer = replace(described.chain[0][0], head_dim=64, dtype="float16")
    for tokens in (40, 97):
        feeds = feeds_of(layer, token_kinds("right", tokens, globals_="scattered", bound=layer.bound))
        for name in layer.operator.state_names[:-1]:
            feeds[name][:] = 60.0
        exact = by_definition(feeds, torch.float64, layer)
        # All scores are equal: what is left is the rounding of weights and values.
        assert_close(run(session_of((layer,), variant), feeds), exact, atol=4e-3)


# The nodes of a body.


@each_variant
@each_operator
def test_a_body_is_of_standard_operators_that_tensorrt_takes(described: Description, variant: BodyVariant) -> None:
    for layer in described.layers:
        operators = operators_of(layer.body(variant))
        assert not {"NonZero", "ScatterND", "Compress", "Unique"} & set(operators), str(layer)
        counts = {"TopK": 0, "ScatterElements": 0, **described.counts(layer, variant)}
        assert {name: operators[name] for name in counts} == counts, str(layer)


@each_operator
def test_bodies_that_differ_have_names_that_differ(described: Description) -> None:
    bodies: dict[str, bytes] = {}
    for layer in (*described.layers, *described.names):
        body = layer.body()
        assert body.name == layer.name
        assert bodies.setdefault(body.name, body.SerializeToString()) == body.SerializeToString()
    assert len(bodies) == len(set(bodies.values())) > 8
    assert {layer: layer.name for layer in described.names} == described.names


@each_operator
def test_a_body_of_nonsense_is_refused(described: Description) -> None:
    for layer, message in described.bodiless:
        with named_case(layer), pytest.raises(ValueError, match=message):
            layer.body()


@each_variant
@each_operator
def test_layers_that_differ_share_a_model(described: Description, variant: BodyVariant) -> None:
    layers, atol = described.chain
    feeds = feeds_of(layers[0], token_kinds("right", 97, globals_="scattered", bound=layers[0].bound))
    got = run(session_of(tuple(layers), variant), feeds)
    exact = {
        name: feed.astype(np.float64) if name in layers[0].operator.state_names else feed
        for name, feed in feeds.items()
    }
    first = layers[0].operator.state_names[0]
    for layer in layers:
        exact[first] = by_definition(exact, torch.float64, layer)
    assert_close(got, exact[first], atol=atol)
    assert len(chain_of(layers, variant).functions) == 2


@pytest.mark.parametrize(
    ("described", "variant"),
    [(described, variant) for described in DESCRIPTIONS.values() for variant in described.once],
)
def test_layers_compute_their_tables_once(described: Description, variant: BodyVariant, tmp_path: Path) -> None:
    counts = []
    for layers in (1, 3):
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.optimized_model_filepath = str(tmp_path / f"{layers}.onnx")
        model = chain_of([described.repeated] * layers, variant)
        onnxruntime.InferenceSession(model.SerializeToString(), options)
        counts.append(operators_of(onnx.load(options.optimized_model_filepath).graph))
    assert counts[1]["Softmax"] == 3 * counts[0]["Softmax"]
    for name, expected in described.once[variant].items():
        assert counts[1][name] == (expected or counts[0][name]) > 0
        assert counts[0][name] == counts[1][name]
    if variant is BodyVariant.BATCHED:
        # The mask is shared.
        assert counts[1]["Where"] == counts[0]["Where"] + 2 * described.choices


# Memory, measured in processes of their own.


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from /proc, which Linux has")
@pytest.mark.parametrize(
    "variant", [nightly_unless(variant is BodyVariant.BLOCKWISE, variant) for variant in BodyVariant]
)
@each_operator
def test_memory_is_linear_in_tokens(described: Description, variant: BodyVariant, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(chain_of([described.wide], variant), path)
    short, long = growths_bytes(path, 4096, 8192)
    output_bytes = 4 * 4096 * 64 * 4
    assert short > output_bytes, "less than the output: nothing was measured"
    assert long <= 2.2 * short
    if variant is BodyVariant.BLOCKWISE:
        # Eight times the output of 4 MB; in the batched variant the scores alone are eight times that, or ten.
        assert short <= 8 * output_bytes


BUILT = [(described, *built) for described in DESCRIPTIONS.values() for built in described.built]


def scores_bytes(described: Description, layer: SparseLayer, tokens: int) -> int:
    """The bytes of the scores of two texts, with the keys that a query of the batched body sees."""
    return 2 * layer.heads * tokens * described.span(layer) * 4


@pytest.mark.parametrize(
    ("described", "layer"),
    [pytest.param(described, layer, id=str(layer)) for described, layer, is_nightly in BUILT if not is_nightly],
)
def test_tensorrt_rtx_builds_a_body_and_plans_the_memory_of_the_keys_in_view(
    described: Description, layer: SparseLayer, tmp_path: Path
) -> None:
    """TensorRT-RTX builds for its kOPT alone; tests above compare the bodies at other lengths."""
    model = chain_of([layer], BodyVariant.BATCHED)
    (planned,) = planned_bytes(model, tmp_path, 8192, profiles=1)
    assert 0 < planned <= 4 * scores_bytes(described, layer, 8192)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("described", "layer"), [pytest.param(described, layer, id=str(layer)) for described, layer, _ in BUILT]
)
def test_tensorrt_rtx_plans_memory_linear_in_tokens_for_every_body(
    described: Description, layer: SparseLayer, tmp_path: Path
) -> None:
    model = chain_of([layer], BodyVariant.BATCHED)
    short_bytes, long_bytes = planned_bytes(model, tmp_path, 8192, 16384)
    assert 0 < short_bytes <= 4 * scores_bytes(described, layer, 8192)
    assert long_bytes <= 2.1 * short_bytes
