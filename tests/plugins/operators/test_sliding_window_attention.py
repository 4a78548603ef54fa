"""Sliding-window attention: its definition, and its ONNX bodies against it, at lengths around the edges of a window."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

from hdplugins import ONNX_DOMAIN, ONNX_DOMAIN_VERSION, ONNX_OPSET
from hdplugins.operators.dense_attention.reference import dense_attention
from hdplugins.operators.onnx_text import BlockOrder
from hdplugins.operators.sliding_window_attention import OPERATOR
from hdplugins.operators.sliding_window_attention.onnx_function import function_for, function_name
from hdplugins.operators.sliding_window_attention.reference import sliding_window_attention
from support.comparators import assert_close
from support.function_bodies import growth_bytes, new_session, operators_of, planned_bytes, run

PROTO = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
STATES = ("query", "key", "value")
BATCH = 3


@dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration of the operator; a session of it runs at many lengths."""

    left: int
    right: int
    dilation: tuple[int, ...] = (1,)
    bound: int = 0
    heads: int = 2
    head_dim: int = 32
    dtype: str = "float32"

    @property
    def attributes(self) -> dict[str, object]:
        """Of the definition; `scale` is such that the softmax is far from uniform."""
        return {
            "left": self.left,
            "right": self.right,
            "dilation": list(self.dilation),
            "global_bound": self.bound,
            "scale": self.head_dim**-0.5,
        }

    def __str__(self) -> str:
        steps = "x".join(map(str, self.dilation))
        return f"{self.left}+{self.right} step {steps} globals {self.bound} {self.heads}x{self.head_dim} {self.dtype}"


CASES = (
    Case(left=1, right=1, bound=4, head_dim=64),
    Case(left=1, right=1, dtype="float16"),
    Case(left=16, right=16, bound=40, heads=1, dtype="float16"),
    Case(left=16, right=16, head_dim=80),
    Case(left=0, right=0, bound=3),
    Case(left=16, right=0, bound=5, dtype="float16"),
    Case(left=0, right=16),
    Case(left=7, right=64, bound=9, head_dim=80, dtype="float16"),
    Case(left=64, right=64, bound=64, head_dim=64),
    Case(left=64, right=64, dilation=(2,), bound=5),
    Case(left=16, right=16, dilation=(1, 3, 1, 2), heads=4, bound=5, dtype="float16"),
    Case(left=5, right=16, dilation=(4, 1), head_dim=64),
    Case(left=256, right=256, bound=5, heads=1, head_dim=64),
    Case(left=256, right=256, heads=1, dtype="float16"),
    Case(left=5000, right=5000, bound=5, heads=1),
)
GLOBALS = ("none", "first", "scattered", "all")
PADDINGS = ("none", "right", "left", "all")

each_order = pytest.mark.parametrize("order", BlockOrder, ids=lambda order: order.value)


def lengths_of(case: Case) -> list[int]:
    """1, the window's reach in tokens and twice that, one less and one more, two primes."""
    window = min(max(case.left, case.right, 1), 256) * max(case.dilation)
    around = {window - 1, window, window + 1, 2 * window, 2 * window + 1}
    return sorted({1, 31, 211, *around} - {0})


def kinds_of(globals_: str, padding: str, tokens: int, *, bound: int, batch: int = BATCH) -> np.ndarray:
    """[batch, tokens], int32; the first text has the padding, all have globals, differently many where scattered."""
    kinds = np.ones((batch, tokens), np.int32)
    if padding == "right":
        kinds[0, (tokens + 1) // 2 :] = 0
    elif padding == "left":
        kinds[0, : tokens // 2] = 0
    elif padding == "all":
        kinds[0] = 0
    generator = np.random.default_rng(tokens)
    for number, row in enumerate(kinds):
        (real,) = row.nonzero()
        most = min(bound, len(real))
        if globals_ == "first":
            row[real[: min(1, most)]] = 2
        elif globals_ == "scattered":
            row[generator.permutation(real)[: max(most - number, 0)]] = 2
        elif globals_ == "all":
            row[real[:most]] = 2
    return kinds


def feeds_of(case: Case, kinds: np.ndarray) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(kinds.shape[1])
    shape = (kinds.shape[0], case.heads, kinds.shape[1], case.head_dim)
    states = {name: (1.5 * generator.normal(size=shape)).astype(case.dtype) for name in STATES}
    return {**states, "token_kind": kinds}


def by_definition(feeds: Mapping[str, np.ndarray], dtype: torch.dtype, attributes: Mapping[str, object]) -> np.ndarray:
    states = (torch.from_numpy(feeds[name]).to(dtype) for name in STATES)
    return sliding_window_attention(*states, torch.from_numpy(feeds["token_kind"]), **attributes).numpy()  # type: ignore[arg-type]


def exact_and_allowed(feeds: Mapping[str, np.ndarray], case: Case) -> tuple[np.ndarray, float]:
    """The answer in float64, and twice PyTorch's error in the dtype, plus one rounding of the largest value."""
    exact = by_definition(feeds, torch.float64, case.attributes)
    error = max(error_of_pytorch(feeds, case, exact), usual_error_of_pytorch(case))
    return exact, float(2 * error + np.abs(exact).max() * np.finfo(case.dtype).eps)


def error_of_pytorch(feeds: Mapping[str, np.ndarray], case: Case, exact: np.ndarray) -> float:
    return float(np.abs(by_definition(feeds, getattr(torch, case.dtype), case.attributes) - exact).max())


@functools.cache
def usual_error_of_pytorch(case: Case) -> float:
    """A text of one or two tokens has too few values to show what rounding does to one."""
    feeds = feeds_of(case, kinds_of("scattered", "none", 211, bound=case.bound))
    return error_of_pytorch(feeds, case, by_definition(feeds, torch.float64, case.attributes))


def model_of(cases: Sequence[Case], order: BlockOrder) -> onnx.ModelProto:
    """A chain of nodes, each taking its query from the one before."""
    state = ["batch", cases[0].heads, "tokens", cases[0].head_dim]
    inputs = [helper.make_tensor_value_info(name, PROTO[cases[0].dtype], state) for name in STATES]
    inputs.append(helper.make_tensor_value_info("token_kind", TensorProto.INT32, ["batch", "tokens"]))
    bodies = {
        function_name(dilation=case.dilation, global_bound=case.bound): function_for(
            dilation=case.dilation, global_bound=case.bound, order=order
        )
        for case in cases
    }
    nodes = []
    for number, case in enumerate(cases):
        name = function_name(dilation=case.dilation, global_bound=case.bound)
        query = f"attended_{number - 1}" if number else "query"
        rest = ["key", "value", "token_kind"]
        nodes.append(
            helper.make_node(name, [query, *rest], [f"attended_{number}"], domain=ONNX_DOMAIN, **case.attributes)
        )
    output = helper.make_tensor_value_info(nodes[-1].output[0], PROTO[cases[0].dtype], state)
    return helper.make_model(
        helper.make_graph(nodes, "attention", inputs, [output]),
        functions=list(bodies.values()),
        opset_imports=[helper.make_opsetid("", ONNX_OPSET), helper.make_opsetid(ONNX_DOMAIN, ONNX_DOMAIN_VERSION)],
        ir_version=10,
    )


@functools.cache
def session_of(cases: tuple[Case, ...], order: BlockOrder) -> onnxruntime.InferenceSession:
    return new_session(model_of(cases, order))


@functools.lru_cache(maxsize=32)
def question_of(
    case: Case, globals_: str, padding: str, tokens: int, batch: int
) -> tuple[dict[str, np.ndarray], np.ndarray, float]:
    """The feeds, the answer and the error allowed: worked out once for both orders of blocks."""
    feeds = feeds_of(case, kinds_of(globals_, padding, tokens, bound=case.bound, batch=batch))
    return (feeds, *exact_and_allowed(feeds, case))


def assert_right(case: Case, order: BlockOrder, globals_: str, padding: str, tokens: int, batch: int = BATCH) -> None:
    feeds, exact, allowed = question_of(case, globals_, padding, tokens, batch)
    got = run(session_of((case,), order), feeds)
    assert (got.swapaxes(1, 2)[feeds["token_kind"] == 0] == 0).all()
    assert_close(got, exact, atol=allowed)


# The definition.


@pytest.mark.parametrize("dilation", [(1,), (2, 1), (3,)])
@pytest.mark.parametrize(("left", "right"), [(0, 0), (2, 1), (0, 3), (20, 20)])
def test_the_definition_is_a_softmax_over_the_keys_in_view(left: int, right: int, dilation: tuple[int, ...]) -> None:
    case = Case(left=left, right=right, dilation=dilation, bound=4, dtype="float64")
    kinds = kinds_of("scattered", "left", 13, bound=4)
    feeds = feeds_of(case, kinds)
    got = by_definition(feeds, torch.float64, case.attributes)
    for batch, head, i in np.ndindex(got.shape[:3]):
        step = dilation[head % len(dilation)]
        in_window = {i + step * offset for offset in range(-left, right + 1)}
        seen = [j for j in range(13) if kinds[batch, j] == 2 or (kinds[batch, j] == 1 and j in in_window)]
        expected = np.zeros(32)
        if kinds[batch, i]:
            scores = feeds["key"][batch, head, seen] @ feeds["query"][batch, head, i] * 32**-0.5
            weights = np.exp(scores - scores.max())
            expected = weights @ feeds["value"][batch, head, seen] / weights.sum()
        assert_close(got[batch, head, i], expected, atol=1e-12)


@pytest.mark.parametrize("padding", PADDINGS)
def test_a_window_wider_than_the_text_is_dense_attention(padding: str) -> None:
    case = Case(left=64, right=64, bound=5, dtype="float64")
    kinds = kinds_of("scattered", padding, 61, bound=5)
    feeds = feeds_of(case, kinds)
    got = by_definition(feeds, torch.float64, case.attributes)
    states = (torch.from_numpy(feeds[name]) for name in STATES)
    dense = dense_attention(*states, torch.from_numpy(kinds != 0), scale=32**-0.5).numpy()
    real = kinds != 0
    assert_close(got.swapaxes(1, 2)[real], dense.swapaxes(1, 2)[real], atol=1e-12)
    assert (got.swapaxes(1, 2)[~real] == 0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"left": -1}, "-1 left and 2 right"),
        ({"right": -3}, "2 left and -3 right"),
        ({"dilation": [0]}, r"\[0\] does not fit 2 heads"),
        ({"dilation": []}, r"\[\] does not fit 2 heads"),
        ({"dilation": [1, 2, 3]}, r"\[1, 2, 3\] does not fit 2 heads"),
        ({"global_bound": 3}, "4 global tokens; the bound is 3"),
    ],
)
def test_what_the_operator_does_not_define_is_refused(change: dict[str, object], message: str) -> None:
    case = Case(left=2, right=2, bound=4)
    feeds = feeds_of(case, kinds_of("all", "none", 9, bound=4))
    with pytest.raises(ValueError, match=message):
        by_definition(feeds, torch.float64, {**case.attributes, **change})


# The bodies against the definition.


@each_order
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_body_matches_the_definition_at_every_length(case: Case, order: BlockOrder) -> None:
    """Globals and padding take turns, so that each length meets several pairs, and each pair several lengths."""
    for number, tokens in enumerate(lengths_of(case)):
        for turn in range(2):
            globals_ = GLOBALS[(number + turn) % 4] if case.bound else "none"
            padding = PADDINGS[(number // 2 + 3 * turn) % 4]
            assert_right(case, order, globals_, padding, tokens)


@each_order
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("globals_", GLOBALS)
@pytest.mark.parametrize("tokens", [1, 4, 33, 97])
def test_globals_and_padding_mix(tokens: int, globals_: str, padding: str, order: BlockOrder) -> None:
    """With 40 globals in 33 tokens, a text is shorter than its bound; with 97, it is not."""
    assert_right(CASES[2], order, globals_, padding, tokens)


@each_order
@pytest.mark.parametrize("case", [CASES[8], CASES[10], CASES[12], CASES[14]], ids=str)
def test_a_body_matches_the_definition_at_a_thousand_tokens(case: Case, order: BlockOrder) -> None:
    assert_right(case, order, "scattered" if case.bound else "none", "right", 1000, batch=1)


@each_order
@pytest.mark.parametrize("tokens", [4095, pytest.param(4096, marks=pytest.mark.nightly)])
def test_a_body_matches_the_definition_at_4096_tokens(tokens: int, order: BlockOrder) -> None:
    case = Case(left=256, right=256, bound=40, heads=1)
    assert_right(case, order, "scattered", "left", tokens, batch=1)


@pytest.mark.parametrize("case", [CASES[0], CASES[8], CASES[11]], ids=str)
def test_the_measure_of_a_body_refuses_wrong_answers(case: Case) -> None:
    kinds = kinds_of("scattered", "right", 211, bound=case.bound)
    feeds = feeds_of(case, kinds)
    exact, allowed = exact_and_allowed(feeds, case)
    assert_close(exact.astype(case.dtype), exact, atol=allowed)
    wrong = [
        {**case.attributes, "left": case.left - 1},
        {**case.attributes, "left": case.left + 1},
        {**case.attributes, "right": case.right - 1},
        {**case.attributes, "right": case.right + 1},
        {**case.attributes, "dilation": [step + 1 for step in case.dilation]},
        {**case.attributes, "scale": case.head_dim**-0.5 * 1.01},
    ]
    for attributes in wrong:
        with pytest.raises(AssertionError):
            assert_close(by_definition(feeds, torch.float64, attributes), exact, atol=allowed)
    # What is seen as local instead of global, as global instead of local, or in spite of being padding.
    for before, after in ((2, 1), (0, 1)) if case.bound else ((0, 1),):
        changed = {**feeds, "token_kind": np.where(kinds == before, after, kinds).astype(np.int32)}
        with pytest.raises(AssertionError):
            assert_close(by_definition(changed, torch.float64, case.attributes), exact, atol=allowed)


def test_the_measure_of_a_body_refuses_a_global_key_that_counts_twice() -> None:
    case = Case(left=16, right=16, bound=1)
    kinds = np.ones((1, 64), np.int32)
    kinds[0, 40] = 2
    feeds = feeds_of(case, kinds)
    exact, allowed = exact_and_allowed(feeds, case)
    # The global key again, behind the text and where no window reaches: queries near the first copy see both.
    far = {name: np.concatenate([feeds[name], feeds[name][:, :, 40:41]], axis=2) for name in STATES}
    twice = np.concatenate([kinds, [[2]]], axis=1).astype(np.int32)
    attributes = {**case.attributes, "global_bound": 2}
    wrong = by_definition({**far, "token_kind": twice}, torch.float64, attributes)[:, :, :64]
    with pytest.raises(AssertionError):
        assert_close(wrong, exact, atol=allowed)


@each_order
@pytest.mark.parametrize("case", [CASES[2], CASES[8]], ids=str)
def test_content_of_padding_does_not_change_the_answer(case: Case, order: BlockOrder) -> None:
    kinds = kinds_of("scattered", "right", 97, bound=case.bound)
    feeds = feeds_of(case, kinds)
    session = session_of((case,), order)
    before = run(session, feeds)
    for name in STATES:
        feeds[name].swapaxes(1, 2)[kinds == 0] = 50.0
    np.testing.assert_array_equal(before, run(session, feeds))


@each_order
def test_large_scores_overflow_in_no_dtype(order: BlockOrder) -> None:
    """Scaled after the product, 60 x 60 x 64 would be outside float16."""
    case = Case(left=16, right=16, bound=5, head_dim=64, dtype="float16")
    feeds = feeds_of(case, kinds_of("scattered", "right", 97, bound=5))
    feeds["query"][:], feeds["key"][:] = 60.0, 60.0
    exact = by_definition(feeds, torch.float64, case.attributes)
    # All scores are equal: what is left is the rounding of weights and values.
    assert_close(run(session_of((case,), order), feeds), exact, atol=4e-3)


# What a body is made of.


@each_order
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_body_is_of_standard_operators_that_tensorrt_takes(case: Case, order: BlockOrder) -> None:
    body = function_for(dilation=case.dilation, global_bound=case.bound, order=order)
    assert tuple(body.input) == OPERATOR.inputs
    assert tuple(body.attribute) == OPERATOR.attributes
    assert [(opset.domain, opset.version) for opset in body.opset_import] == [("", ONNX_OPSET)]
    operators = operators_of(body)
    assert not {"NonZero", "ScatterND", "ScatterElements", "Compress", "Unique"} & set(operators)
    assert all(onnx.defs.has(name) for name in operators)
    assert operators["TopK"] == (case.bound > 0)
    assert operators["Scan"] == (len(set(case.dilation)) if order is BlockOrder.SEQUENTIAL else 0)


@pytest.mark.parametrize(
    ("dilation", "bound", "suffix"),
    [
        ((1,), 0, ""),
        ((1, 1), 0, ""),
        ((1,), 64, "_global64"),
        ((2, 2), 0, "_dilation2"),
        ((1, 3), 5, "_global5_dilation1_3"),
    ],
)
def test_bodies_that_differ_have_names_that_differ(dilation: tuple[int, ...], bound: int, suffix: str) -> None:
    assert function_name(dilation=dilation, global_bound=bound) == OPERATOR.name + suffix
    assert function_for(dilation=dilation, global_bound=bound).name == OPERATOR.name + suffix


@pytest.mark.parametrize(("dilation", "bound"), [((), 0), ((0,), 0), ((1, -2), 0), ((1,), -1)])
def test_a_body_of_nonsense_is_refused(dilation: tuple[int, ...], bound: int) -> None:
    with pytest.raises(ValueError, match=r"is none: one value|is negative"):
        function_for(dilation=dilation, global_bound=bound)


@each_order
def test_layers_of_different_windows_and_dilations_share_a_model(order: BlockOrder) -> None:
    layers = (
        Case(left=3, right=3, bound=5),
        Case(left=16, right=9, bound=5),
        Case(left=4, right=4, dilation=(2, 3), bound=5),
    )
    feeds = feeds_of(layers[0], kinds_of("scattered", "right", 97, bound=5))
    got = run(session_of(layers, order), feeds)
    exact = {name: feed.astype(np.float64) if name in STATES else feed for name, feed in feeds.items()}
    for layer in layers:
        exact["query"] = by_definition(exact, torch.float64, layer.attributes)
    # Measured 1.7e-6: three layers hold what one holds.
    assert_close(got, exact["query"], atol=4e-6)
    assert len(model_of(layers, order).functions) == 2


@each_order
def test_layers_compute_their_tables_once(order: BlockOrder, tmp_path: Path) -> None:
    counts = []
    for layers in (1, 3):
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.optimized_model_filepath = str(tmp_path / f"{layers}.onnx")
        model = model_of([CASES[8]] * layers, order)
        onnxruntime.InferenceSession(model.SerializeToString(), options)
        counts.append(operators_of(onnx.load(options.optimized_model_filepath).graph))
    assert counts[1]["Softmax"] == 3 * counts[0]["Softmax"]
    assert counts[1]["TopK"] == 1
    if order is BlockOrder.PARALLEL:
        assert counts[1]["Range"] == counts[0]["Range"] > 0
        assert counts[1]["Where"] == counts[0]["Where"] + 2  # the padded rows of each layer; the mask is shared
    else:
        assert counts[1]["Tile"] == counts[0]["Tile"] == 2  # a Scan takes each table as often as there are texts


# Memory, measured in processes of their own.


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from /proc, which Linux has")
@each_order
def test_memory_is_linear_in_tokens(order: BlockOrder, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(model_of([Case(left=256, right=256, bound=40, heads=4, head_dim=64)], order), path)
    short, long = (growth_bytes(path, tokens=tokens) for tokens in (8192, 16384))
    output_bytes = 4 * 8192 * 64 * 4
    assert short > output_bytes, "less than the output: nothing was measured"
    assert long <= 2.2 * short
    if order is BlockOrder.SEQUENTIAL:
        # Eight times the output of 8 MB; in parallel the scores alone are ten times that.
        assert short <= 8 * output_bytes


# TensorRT-RTX builds the parallel body by itself.


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(left=256, right=256, heads=4, head_dim=64, dtype="float16"), marks=pytest.mark.nightly),
        pytest.param(
            Case(left=256, right=256, bound=64, heads=4, head_dim=64, dtype="float16"), marks=pytest.mark.nightly
        ),
        Case(left=256, right=0, bound=64, heads=4, head_dim=80, dtype="bfloat16"),
        pytest.param(
            Case(left=64, right=64, bound=5, heads=4, head_dim=64, dtype="float32"), marks=pytest.mark.nightly
        ),
        pytest.param(
            Case(left=64, right=64, dilation=(1, 1, 2, 3), bound=5, heads=4, head_dim=64, dtype="float16"),
            marks=pytest.mark.nightly,
        ),
        Case(left=64, right=64, dilation=(1, 3), bound=5, heads=2, head_dim=64, dtype="float32"),
    ],
    ids=str,
)
def test_tensorrt_rtx_builds_a_body_and_plans_memory_linear_in_tokens(case: Case, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX builds engines without a GPU; not installed")
    path = tmp_path / "model.onnx"
    onnx.save(model_of([case], BlockOrder.PARALLEL), path)
    short_bytes, long_bytes = planned_bytes(path, 8192, 16384)
    span = 128 + case.left + case.right + case.bound
    scores_bytes = 2 * case.heads * 8192 * span * 4  # two texts
    assert 0 < short_bytes <= 4 * scores_bytes
    assert long_bytes <= 2.1 * short_bytes
