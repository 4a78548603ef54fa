"""Attention by clipped distance as ONNX Runtime computes it on a CPU: fused for short texts, in blocks for others."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from hdexport.graph.targets.onnxruntime.cpu import lower_for_onnxruntime_cpu
from support.attention_graphs import answer_by_definition, chain_of, portable_graph, session_of, states_of
from support.attention_layers import PADDINGS, Layer, token_kinds
from support.comparators import assert_close, named_case
from support.exact_answers import exact_answer
from support.function_bodies import growths_bytes
from support.operators.distance import Clipped, Shared, inputs_of

ALONE, TWICE, WITH_VALUES = (Shared(reach=9),), (Shared(reach=140), Shared(reach=140)), (Shared(values=True),)
BY_QUERY = Clipped(by_query=True, values=True, reach=9)
ATOL = 1.2e-5
"""Measured 6.1e-6; values reach 7.8."""

each_chain = pytest.mark.parametrize("layers", [ALONE, TWICE, WITH_VALUES], ids=["alone", "twice", "with values"])


def lowered(*layers: Layer) -> ir.Model:
    return lower_for_onnxruntime_cpu(portable_graph(*layers))


@functools.cache
def session_for(*layers: Layer) -> onnxruntime.InferenceSession:
    return session_of(lowered(*layers))


@functools.cache
def session_by_query() -> onnxruntime.InferenceSession:
    return session_of(lower_for_onnxruntime_cpu(ir.serde.deserialize_model(chain_of([BY_QUERY]))))


def feeds_of(kinds: np.ndarray) -> dict[str, np.ndarray]:
    return states_of(*kinds.shape) | {"key_mask": kinds != 0}


def assert_right(session: onnxruntime.InferenceSession, kinds: np.ndarray, *layers: Layer) -> None:
    feeds = feeds_of(kinds)
    (got,) = session.run(None, feeds)
    assert_close(got, answer_by_definition(layers, feeds), atol=ATOL)
    assert (got[(kinds == 0).all(axis=1)] == 0).all()


def operators_of(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.all_nodes())


@each_chain
def test_lowered_attention_matches_the_definition_at_every_length(layers: Sequence[Layer]) -> None:
    paddings = itertools.cycle(PADDINGS)
    for tokens in (1, 2, 9, 10, 64, 127, 128, 129, 255, 256, 257, 385):
        for batch in (1, 3):
            padding = next(paddings)
            with named_case(tokens, padding, batch):
                assert_right(session_for(*layers), token_kinds(padding, tokens, batch=batch), *layers)


def test_numbers_of_each_query_go_through_blocks() -> None:
    for padding, (tokens, batch) in itertools.product(PADDINGS, ((1, 1), (5, 3), (128, 1), (131, 3), (257, 1))):
        inputs = inputs_of(BY_QUERY, token_kinds(padding, tokens, batch=batch))
        (got,) = session_by_query().run(None, inputs)
        with named_case(padding, tokens, batch):
            assert_close(got, exact_answer(BY_QUERY, inputs), atol=ATOL)


@pytest.mark.parametrize(
    ("layers", "longest"),
    [pytest.param(ALONE, 256, id="alone"), pytest.param(TWICE, 2048, id="twice", marks=pytest.mark.nightly)],
)
def test_a_bias_is_made_for_short_texts_only(layers: Sequence[Layer], longest: int) -> None:
    """Attentions whose scale is wrong show which texts they answer; longer ones are worth it where layers share it."""
    model = lowered(*layers)
    for node in model.graph.all_nodes():
        if node.op_type == "MultiHeadAttention":
            node.attributes["scale"] = ir.AttrFloat32("scale", 7.0)
    session = session_of(model)
    for tokens, padding in ((1, "all"), (longest, "none"), (longest, "right"), (longest + 1, "none")):
        feeds = feeds_of(token_kinds(padding, tokens, batch=1))
        (got,) = session.run(None, feeds)
        is_right = np.allclose(got, answer_by_definition(layers, feeds), atol=ATOL)
        # A text of padding is 0 by any scale.
        assert is_right is (tokens > longest or padding == "all"), (tokens, padding)


def test_layers_share_one_bias_and_ask_about_the_text_once() -> None:
    layers = (*TWICE, Shared(reach=9))
    model = lowered(*layers)
    counts = operators_of(model)
    assert (counts["ClippedDistanceAttention_bias"], counts["MultiHeadAttention"]) == (2, 6)
    assert (counts["ReduceMin"], counts["LessOrEqual"], counts["Transpose"]) == (1, 2, 0)
    assert_right(session_of(model), token_kinds("right", 131), *layers)


def test_where_a_fused_attention_cannot_do_it_there_is_none() -> None:
    by_query = lower_for_onnxruntime_cpu(ir.serde.deserialize_model(chain_of([BY_QUERY])))
    for model in (by_query, lowered(*WITH_VALUES)):
        assert not {"If", "MultiHeadAttention", "ClippedDistanceAttention_bias"} & set(operators_of(model))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from /proc, which Linux has")
@pytest.mark.parametrize("layers", [TWICE, WITH_VALUES], ids=["twice", "with values"])
def test_memory_of_long_texts_is_linear_in_tokens(layers: Sequence[Layer], tmp_path: Path) -> None:
    """The scores of a head of 4096 tokens take 67 MB, the states 1 MB each."""
    path = tmp_path / "model.onnx"
    ir.save(lowered(*layers), path)
    short, long = growths_bytes(path, 2560, 5120)
    assert short > 2560 * 64 * 4, "less than the result: nothing was measured"
    assert long <= 2.2 * short
