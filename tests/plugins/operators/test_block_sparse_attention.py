"""Block-sparse attention: its definition, and its ONNX bodies against it, at lengths around the edges of a block."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from hdplugins import ONNX_DOMAIN, ONNX_DOMAIN_VERSION, ONNX_OPSET
from hdplugins.operators.block_sparse_attention import OPERATOR
from hdplugins.operators.block_sparse_attention.onnx_function import function_for, function_name
from hdplugins.operators.block_sparse_attention.reference import block_sparse_attention
from hdplugins.operators.dense_attention.reference import dense_attention
from hdplugins.operators.onnx_text import BlockOrder
from support.comparators import assert_close
from support.function_bodies import growth_bytes, new_session, operators_of, planned_bytes, run

PROTO = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
STATES = ("query", "key", "value")
PADDINGS = ("none", "right", "left", "holes", "all")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration of the operator; a session of it runs at many lengths.

    `listed` is the shape of a table with repeats and with entries that are no block of any text.
    """

    block: int = 8
    first: int = 1
    last: int = 1
    window: int = 1
    repeats: int = 0
    dense: int = 0
    by_row: int = 0
    listed: tuple[int, int, int] | None = None
    heads: int = 2
    head_dim: int = 32
    dtype: str = "float32"

    @property
    def attributes(self) -> dict[str, Any]:
        """Of the definition; `scale` is such that the softmax is far from uniform."""
        return {
            "block_size": self.block,
            "first_global": self.first,
            "last_global": self.last,
            "window": self.window,
            "first_repeats": self.repeats,
            "dense_tokens": self.dense,
            "ends_by_row": self.by_row,
            "scale": self.head_dim**-0.5,
        }

    @property
    def table(self) -> np.ndarray | None:
        """[1 or heads, rows, listed], int32."""
        if self.listed is None:
            return None
        return np.random.default_rng(7).integers(-2, self.listed[1] + 4, self.listed).astype(np.int32)

    def __str__(self) -> str:
        return f"{function_name(attributes=self.attributes, listed=self.listed is not None)} {self.block} {self.dtype}"


BIGBIRD = Case(repeats=2, dense=72)
LISTED = Case(dense=72, listed=(2, 14, 2))
CASES = (
    BIGBIRD,
    replace(BIGBIRD, by_row=1, dtype="float16"),
    LISTED,
    replace(LISTED, by_row=1, repeats=1, listed=(1, 5, 3), heads=3),
    Case(last=0, first=3),  # ETC
    Case(last=0, first=2, window=0, listed=(2, 9, 1), dtype="float16"),
    Case(first=0, last=0, window=-1, listed=(2, 11, 3)),  # any list of blocks
    Case(first=0, last=0, window=-1, listed=(1, 11, 3), dense=20, by_row=1),
    Case(first=3, window=2, block=5, repeats=1, by_row=1, head_dim=80, dtype="float16"),
    Case(first=0, window=0, repeats=3, block=1),
    Case(window=-1, dense=9, heads=1),
    Case(first=0, last=0, window=3, block=16, heads=1),
)

each_order = pytest.mark.parametrize("order", BlockOrder, ids=lambda order: order.value)


def lengths_of(case: Case) -> list[int]:
    """1 token, a few blocks, the longest dense text and the blocks of the window, one less and one more, a prime."""
    edges = {case.block, 2 * case.block, case.dense, case.block * (case.first + case.last + 2 * case.window + 1)}
    around = {edge + shift for edge in edges for shift in (-1, 0, 1)}
    return sorted({1, 113, *around} - {-case.block - 1, -case.block, 1 - case.block, -1, 0})


def mask_of(padding: str, tokens: int, *, batch: int) -> np.ndarray:
    """[batch, tokens], int32; the first text has the padding."""
    mask = np.ones((batch, tokens), np.int32)
    if padding == "right":
        mask[0, (tokens + 1) // 2 :] = 0
    elif padding == "left":
        mask[0, : tokens // 2] = 0
    elif padding == "holes":
        mask[0] = np.random.default_rng(tokens).random(tokens) < 0.6
    elif padding == "all":
        mask[0] = 0
    return mask


def feeds_of(case: Case, mask: np.ndarray) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(mask.shape[1])
    shape = (mask.shape[0], case.heads, mask.shape[1], case.head_dim)
    states = {name: (1.5 * generator.normal(size=shape)).astype(case.dtype) for name in STATES}
    return {**states, "token_mask": mask}


def by_definition(feeds: Mapping[str, np.ndarray], dtype: torch.dtype, case: Case) -> np.ndarray:
    states = (torch.from_numpy(feeds[name]).to(dtype) for name in STATES)
    table = None if case.table is None else torch.from_numpy(case.table)
    return block_sparse_attention(*states, torch.from_numpy(feeds["token_mask"]), table, **case.attributes).numpy()


def exact_and_allowed(feeds: Mapping[str, np.ndarray], case: Case) -> tuple[np.ndarray, float]:
    """The answer in float64, and twice PyTorch's error in the dtype, plus one rounding of the largest value."""
    exact = by_definition(feeds, torch.float64, case)
    error = max(error_of_pytorch(feeds, case, exact), usual_error_of_pytorch(case))
    return exact, float(2 * error + np.abs(exact).max() * np.finfo(case.dtype).eps)


def error_of_pytorch(feeds: Mapping[str, np.ndarray], case: Case, exact: np.ndarray) -> float:
    return float(np.abs(by_definition(feeds, getattr(torch, case.dtype), case) - exact).max())


@functools.cache
def usual_error_of_pytorch(case: Case) -> float:
    """A text of one or two tokens has too few values to show what rounding does to one."""
    feeds = feeds_of(case, mask_of("none", 211, batch=3))
    return error_of_pytorch(feeds, case, by_definition(feeds, torch.float64, case))


def model_of(cases: Sequence[Case], order: BlockOrder) -> onnx.ModelProto:
    """A chain of nodes, each taking its query from the one before."""
    state = ["batch", cases[0].heads, "tokens", cases[0].head_dim]
    inputs = [helper.make_tensor_value_info(name, PROTO[cases[0].dtype], state) for name in STATES]
    inputs.append(helper.make_tensor_value_info("token_mask", TensorProto.INT32, ["batch", "tokens"]))
    bodies, nodes, tables = {}, [], []
    for number, case in enumerate(cases):
        listed = case.table is not None
        body = function_for(attributes=case.attributes, listed=listed, order=order)
        bodies[body.name] = body
        given = [f"attended_{number - 1}" if number else "query", "key", "value", "token_mask"]
        if case.table is not None:
            tables.append(numpy_helper.from_array(case.table, f"table_{number}"))
            given.append(tables[-1].name)
        output = f"attended_{number}"
        nodes.append(helper.make_node(body.name, given, [output], domain=ONNX_DOMAIN, **case.attributes))
    outputs = [helper.make_tensor_value_info(nodes[-1].output[0], PROTO[cases[0].dtype], state)]
    return helper.make_model(
        helper.make_graph(nodes, "attention", inputs, outputs, tables),
        functions=list(bodies.values()),
        opset_imports=[helper.make_opsetid("", ONNX_OPSET), helper.make_opsetid(ONNX_DOMAIN, ONNX_DOMAIN_VERSION)],
        ir_version=10,
    )


@functools.cache
def session_of(cases: tuple[Case, ...], order: BlockOrder) -> onnxruntime.InferenceSession:
    return new_session(model_of(cases, order))


@functools.lru_cache(maxsize=64)
def question_of(case: Case, padding: str, tokens: int, batch: int) -> tuple[dict[str, np.ndarray], np.ndarray, float]:
    """The feeds, the answer and the error allowed: worked out once for both orders of blocks."""
    feeds = feeds_of(case, mask_of(padding, tokens, batch=batch))
    return (feeds, *exact_and_allowed(feeds, case))


def assert_right(case: Case, order: BlockOrder, padding: str, tokens: int, batch: int = 3) -> None:
    feeds, exact, allowed = question_of(case, padding, tokens, batch)
    got = run(session_of((case,), order), feeds)
    assert (got.swapaxes(1, 2)[feeds["token_mask"] == 0] == 0).all()
    assert_close(got, exact, atol=allowed)


# The definition.


def keys_by_hand(case: Case, mask: np.ndarray, head: int, query: int) -> list[int]:
    """The keys of a query in one text, [tokens], each as often as it counts."""
    tokens, size = len(mask), case.block
    end = 1 + max((i for i in range(tokens) if mask[i]), default=-1) if case.by_row else tokens
    last, own = math.ceil(end / size) - 1, query // size
    if end <= case.dense or own < case.first or (case.last and own == last):
        blocks = list(range(tokens // size + 1))
    else:
        blocks = sorted(
            {*range(case.first), *([last] if case.last else []), *range(own - case.window, own + case.window + 1)}
        )
        blocks += [0] * case.repeats
        if case.table is not None and own - case.first < case.table.shape[1]:
            blocks += case.table[head % len(case.table), own - case.first].tolist()
    return [key for block in blocks for key in range(tokens) if key // size == block and mask[key]]


@pytest.mark.parametrize("padding", ["right", "holes"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_definition_is_a_softmax_over_the_keys_in_view_as_often_as_they_count(case: Case, padding: str) -> None:
    tokens = case.dense + 3 * case.block + 1
    mask = mask_of(padding, tokens, batch=2)
    feeds = feeds_of(replace(case, dtype="float64"), mask)
    got = by_definition(feeds, torch.float64, case)
    for batch, head, i in np.ndindex(got.shape[:3]):
        seen = keys_by_hand(case, mask[batch], head, i)
        expected = np.zeros(case.head_dim)
        if mask[batch, i] and seen:
            scores = feeds["key"][batch, head, seen] @ feeds["query"][batch, head, i] * case.head_dim**-0.5
            weights = np.exp(scores - scores.max())
            expected = weights @ feeds["value"][batch, head, seen] / weights.sum()
        assert_close(got[batch, head, i], expected, atol=1e-12)


@pytest.mark.parametrize("padding", PADDINGS)
def test_a_short_text_is_attended_to_densely(padding: str) -> None:
    mask = mask_of(padding, 72, batch=2)
    feeds = feeds_of(replace(BIGBIRD, dtype="float64"), mask)
    states = (torch.from_numpy(feeds[name]) for name in STATES)
    dense = dense_attention(*states, torch.from_numpy(mask != 0), scale=32**-0.5).numpy()
    got, real = by_definition(feeds, torch.float64, BIGBIRD), mask != 0
    assert_close(got.swapaxes(1, 2)[real], dense.swapaxes(1, 2)[real], atol=1e-12)
    assert (got.swapaxes(1, 2)[~real] == 0).all()


@each_order
@pytest.mark.parametrize("case", [CASES[1], CASES[3]], ids=str)
def test_texts_that_end_by_row_do_not_see_padding_behind_them(case: Case, order: BlockOrder) -> None:
    """The shorter text is dense, the longer one is not; padded, both are as they are alone."""
    session = session_of((case,), order)
    for tokens in (70, 87):
        padded = feeds_of(case, mask_of("none", 130, batch=2))
        padded["token_mask"][0, tokens:] = 0
        alone = {name: feed[:1, :, :tokens] if name in STATES else feed[:1, :tokens] for name, feed in padded.items()}
        _, allowed = exact_and_allowed(alone, case)
        own = {name: np.ascontiguousarray(feed) for name, feed in alone.items()}
        assert_close(run(session, padded)[:1, :, :tokens], run(session, own).astype(np.float64), atol=allowed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 0}, "block_size is 0; it is 1 or more"),
        ({"window": -2}, "window is -2; it is -1 or more"),
        ({"dense_tokens": -1}, "dense_tokens is -1; it is 0 or more"),
    ],
)
def test_what_the_operator_does_not_define_is_refused(change: dict[str, int], message: str) -> None:
    feeds = feeds_of(LISTED, mask_of("none", 9, batch=1))
    states = [torch.from_numpy(feed) for feed in feeds.values()]
    with pytest.raises(ValueError, match=message):
        block_sparse_attention(*states, **{**LISTED.attributes, **change})
    with pytest.raises(ValueError, match=r"listed_blocks is \[3, 4, 2\]; with 2 heads it is \[1 or 2, rows, listed\]"):
        block_sparse_attention(*states, torch.zeros(3, 4, 2, dtype=torch.int32), **LISTED.attributes)


# The bodies against the definition.


@each_order
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_body_matches_the_definition_at_every_length(case: Case, order: BlockOrder) -> None:
    """One session runs all lengths; paddings and batches take turns."""
    for number, tokens in enumerate(lengths_of(case)):
        for turn in range(2):
            assert_right(case, order, PADDINGS[(number + 2 * turn) % 5], tokens, batch=1 if (number + turn) % 3 else 3)


@each_order
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("case", [CASES[1], CASES[2], CASES[3], CASES[7]], ids=str)
def test_short_and_long_texts_mix(case: Case, padding: str, order: BlockOrder) -> None:
    """Of 131 tokens half are 66: dense where texts end by row, and the table is one for blocks of longer texts."""
    assert_right(case, order, padding, 131)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    first, last, window = draw(st.integers(0, 3)), draw(st.integers(0, 1)), draw(st.integers(-1, 3))
    heads = draw(st.integers(1, 3))
    rows = st.tuples(st.sampled_from([1, heads]), st.integers(0, 7), st.integers(1, 3))
    least = 0 if first or last or window >= 0 else 1
    return Case(
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


@settings(max_examples=30, deadline=None)
@given(case=cases(), tokens=st.integers(1, 45), order=st.sampled_from(BlockOrder), data=st.data())
def test_any_body_matches_the_definition_under_any_mask(
    case: Case, tokens: int, order: BlockOrder, data: st.DataObject
) -> None:
    real = data.draw(st.lists(st.lists(st.integers(0, 1), min_size=tokens, max_size=tokens), min_size=1, max_size=3))
    feeds = feeds_of(case, np.array(real, np.int32))
    exact = by_definition(feeds, torch.float64, case)
    # Measured 1.3e-6; values reach 6.
    assert_close(run(new_session(model_of([case], order)), feeds), exact, atol=4e-6)


@each_order
def test_a_body_matches_the_definition_at_1025_tokens(order: BlockOrder) -> None:
    case = Case(block=64, repeats=3, dense=704, listed=(1, 12, 2), heads=1, head_dim=64, by_row=1)
    assert_right(case, order, "right", 1025, batch=2)


@pytest.mark.parametrize("case", [BIGBIRD, CASES[1], LISTED], ids=str)
def test_the_measure_of_a_body_refuses_wrong_answers(case: Case) -> None:
    feeds = feeds_of(case, mask_of("right", 150, batch=3))
    exact, allowed = exact_and_allowed(feeds, case)
    assert_close(exact.astype(case.dtype), exact, atol=allowed)
    wrong = [
        replace(case, repeats=case.repeats + 1),
        replace(case, first=0),
        replace(case, first=2),
        replace(case, last=0),
        replace(case, window=0),
        replace(case, window=2),
        replace(case, block=case.block + 1),
        replace(case, by_row=1 - case.by_row),
        replace(case, dense=150),
        replace(case, listed=(1, 5, 3)),
    ]
    for other in wrong:
        with pytest.raises(AssertionError):
            assert_close(by_definition(feeds, torch.float64, other), exact, atol=allowed)
    seen = {**feeds, "token_mask": np.ones_like(feeds["token_mask"])}
    with pytest.raises(AssertionError):
        assert_close(by_definition(seen, torch.float64, case), exact, atol=allowed)


@each_order
@pytest.mark.parametrize("case", [BIGBIRD, CASES[3]], ids=str)
def test_content_of_padding_does_not_change_the_answer(case: Case, order: BlockOrder) -> None:
    mask = mask_of("holes", 97, batch=3)
    feeds = feeds_of(case, mask)
    session = session_of((case,), order)
    before = run(session, feeds)
    for name in STATES:
        feeds[name].swapaxes(1, 2)[mask == 0] = 50.0
    np.testing.assert_array_equal(before, run(session, feeds))


@each_order
def test_large_scores_overflow_in_no_dtype(order: BlockOrder) -> None:
    """Scaled after the product, 60 x 60 x 64 would be outside float16."""
    case = replace(BIGBIRD, head_dim=64, dtype="float16")
    for tokens in (40, 97):  # dense, and sparse
        feeds = feeds_of(case, mask_of("right", tokens, batch=3))
        feeds["query"][:], feeds["key"][:] = 60.0, 60.0
        exact = by_definition(feeds, torch.float64, case)
        # All scores are equal: what is left is the rounding of weights and values.
        assert_close(run(session_of((case,), order), feeds), exact, atol=4e-3)


# What a body is made of.


@each_order
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_body_is_of_standard_operators_that_tensorrt_takes(case: Case, order: BlockOrder) -> None:
    body = function_for(attributes=case.attributes, listed=case.listed is not None, order=order)
    assert tuple(body.input) == OPERATOR.inputs[: len(body.input)]
    assert tuple(body.attribute) == OPERATOR.attributes
    assert [(opset.domain, opset.version) for opset in body.opset_import] == [("", ONNX_OPSET)]
    operators = operators_of(body)
    assert not {"NonZero", "ScatterND", "ScatterElements", "Compress", "Unique", "TopK"} & set(operators)
    assert all(onnx.defs.has(name) for name in operators)
    is_sequential = order is BlockOrder.SEQUENTIAL
    assert operators["Scan"] == is_sequential * (1 + (case.first + case.last > 0))


def test_bodies_that_differ_have_names_that_differ() -> None:
    bodies: dict[str, bytes] = {}
    for case in CASES:
        body = function_for(attributes=case.attributes, listed=case.listed is not None)
        assert body.name == function_name(attributes=case.attributes, listed=case.listed is not None)
        assert bodies.setdefault(body.name, body.SerializeToString()) == body.SerializeToString()
    assert len(bodies) == len({bytes(body) for body in bodies.values()}) > 8
    assert function_name(attributes=BIGBIRD.attributes, listed=False) == "BlockSparseAttention_first_last_window1_dense"


def test_a_body_whose_queries_would_see_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="its queries see nothing"):
        function_for(attributes=Case(first=0, last=0, window=-1).attributes, listed=False)


@each_order
def test_layers_that_differ_share_a_model(order: BlockOrder) -> None:
    layers = (BIGBIRD, LISTED, replace(BIGBIRD, block=16, dense=100), replace(LISTED, listed=(1, 5, 3)), BIGBIRD)
    feeds = feeds_of(BIGBIRD, mask_of("right", 97, batch=3))
    got = run(session_of(layers, order), feeds)
    exact = {name: feed.astype(np.float64) if name in STATES else feed for name, feed in feeds.items()}
    for layer in layers:
        exact["query"] = by_definition(exact, torch.float64, layer)
    # Measured 5.2e-7; values reach 1.6.
    assert_close(got, exact["query"], atol=2e-6)
    assert len(model_of(layers, order).functions) == 2


def test_sequential_layers_compute_their_tables_once(tmp_path: Path) -> None:
    counts = []
    for layers in (1, 3):
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.optimized_model_filepath = str(tmp_path / f"{layers}.onnx")
        model = model_of([replace(BIGBIRD, by_row=1)] * layers, BlockOrder.SEQUENTIAL)
        onnxruntime.InferenceSession(model.SerializeToString(), options)
        counts.append(operators_of(onnx.load(options.optimized_model_filepath).graph))
    assert counts[1]["Softmax"] == 3 * counts[0]["Softmax"]
    for name in ("ReduceMax", "Log", "Mod", "Equal", "Pad"):
        assert counts[1][name] == counts[0][name] > 0


# Memory, measured in processes of their own.


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from /proc, which Linux has")
@each_order
def test_memory_is_linear_in_tokens(order: BlockOrder, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    case = Case(block=64, dense=704, listed=(4, 200, 3), heads=4, head_dim=64)
    onnx.save(model_of([case], order), path)
    short, long = (growth_bytes(path, tokens=tokens) for tokens in (8192, 16384))
    output_bytes = 4 * 8192 * 64 * 4
    assert short > output_bytes, "less than the output: nothing was measured"
    assert long <= 2.2 * short
    if order is BlockOrder.SEQUENTIAL:
        # Eight times the output of 8 MB; in parallel the scores alone are eight times that.
        assert short <= 8 * output_bytes


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            Case(block=64, repeats=3, dense=704, by_row=1, heads=4, head_dim=64, dtype="float16"),
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            Case(block=64, dense=704, listed=(4, 254, 3), heads=4, head_dim=64, dtype="float32"),
            marks=pytest.mark.nightly,
        ),
        Case(block=64, first=2, last=0, heads=4, head_dim=80, dtype="bfloat16"),
        Case(block=64, first=0, last=0, window=-1, listed=(1, 256, 5), heads=4, head_dim=64, dtype="float16"),
    ],
    ids=str,
)
def test_tensorrt_rtx_builds_a_body_and_plans_memory_linear_in_tokens(case: Case, tmp_path: Path) -> None:
    """What it builds at its kOPT alone, the bodies show at other lengths above."""
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX builds engines without a GPU; not installed")
    path = tmp_path / "model.onnx"
    onnx.save(model_of([case], BlockOrder.PARALLEL), path)
    short_bytes, long_bytes = planned_bytes(path, 8192, 16384)
    span = max(64 * (case.first + case.last + 2 * case.window + 1 + (case.listed or (0, 0, 0))[2]), case.dense)
    scores_bytes = 2 * case.heads * 8192 * span * 4  # two texts
    assert 0 < short_bytes <= 4 * scores_bytes
    assert long_bytes <= 2.1 * short_bytes
