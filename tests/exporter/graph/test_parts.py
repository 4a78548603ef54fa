"""Parts of a graph, run one after another, compute what the graph computes."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from hdexport.graph.parts import Part, cut

ZEROS = f"{{{', '.join(['0'] * 16)}}}"

MODEL = f"""
<ir_version: 10, opset_import: ["" : 20, "local" : 1]>
network (float[n, 4] x, bool flag) => (float[n, 4] y, float[n, 4] early)
<float[4, 4] first = {ZEROS}, float16[4, 4] half = {ZEROS}, float[4, 4] last = {ZEROS}>
{{
    upcast = Cast<to = 1>(half)
    early = MatMul(x, first)
    squared = local.scaled_square(early)
    chosen = If(flag) <
        then_branch = yes () => (float[n, 4] then_result) {{ then_result = MatMul(squared, upcast) }},
        else_branch = no () => (float[n, 4] else_result) {{ else_result = Identity(x) }}
    >
    again = MatMul(chosen, upcast)
    shared = MatMul(again, first)
    y = MatMul(shared, last)
    unused = MatMul(y, first)
}}
<domain: "local", opset_import: ["" : 20]>
scaled_square (x) => (y)
{{
    two = Constant<value_float: float = 2.0>()
    scaled = Mul(x, two)
    y = Mul(scaled, x)
}}
"""


def model() -> ir.Model:
    made = ir.from_onnx_text(MODEL)
    numbers = np.random.default_rng(0)
    for name, dtype in (("first", "float32"), ("half", "float16"), ("last", "float32")):
        value = made.graph.initializers[name]
        value.const_value = ir.tensor(numbers.normal(size=(4, 4)).astype(dtype), name=name)
    return made


def run(each: ir.Model, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    onnx.checker.check_model(ir.to_proto(each))
    session = onnxruntime.InferenceSession(ir.to_proto(each).SerializeToString(), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    feeds = {value.name: values[value.name] for value in session.get_inputs()}
    return dict(zip(names, session.run(names, feeds), strict=True))


def run_parts(parts: list[Part], values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    values = dict(values)
    for part in parts:
        values |= run(part.model, values)
        for name in part.ended:
            del values[name]
    return values


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize(("max_weights", "count"), [(1, 5), (16, 4), (32, 3), (48, 1)])
def test_parts_compute_what_the_graph_computes(max_weights: int, count: int, flag: bool) -> None:
    feeds = {"x": np.random.default_rng(1).normal(size=(3, 4)).astype(np.float32), "flag": np.array(flag)}
    parts = cut(model(), max_weights)
    assert len(parts) == count
    found, wanted = run_parts(parts, feeds), run(model(), feeds)
    for name in ("y", "early"):
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-6)
    # What no later part reads is gone; the outputs of the graph stay.
    assert found.keys() == {"x", "flag", "y", "early"}


def test_a_part_has_the_functions_and_weights_that_it_reads() -> None:
    parts = cut(model(), 16)
    weights = [set(part.model.graph.initializers) for part in parts]
    assert weights == [{"first"}, {"half"}, {"first"}, {"last"}]
    assert [len(part.model.functions) for part in parts].count(1) == 1


def test_no_part_ends_where_a_value_is_not_of_numpys_types() -> None:
    narrow = ir.from_onnx_text("""
        <ir_version: 10, opset_import: ["" : 20]>
        network (float[2, 2] x) => (float[2, 2] y) <float[2, 2] first = {0, 0, 0, 0}, float[2, 2] second = {0, 0, 0, 0}>
        {
            product = MatMul(x, first)
            bfloat16 = Cast<to = 16>(product)
            upcast = Cast<to = 1>(bfloat16)
            y = MatMul(upcast, second)
        }
        """)
    for name in ("first", "second"):
        narrow.graph.initializers[name].const_value = ir.tensor(np.eye(2, dtype=np.float32), name=name)
    first, second = cut(narrow, 4)
    assert [value.name for value in first.model.graph.outputs] == ["upcast"]
    assert [value.name for value in second.model.graph.inputs] == ["upcast"]
