"""Tools that users run on bundles' graphs keep the answers of every operator, in both orders of its blocks.

GraphSurgeon 0.6.1, Polygraphy 0.53.6 and onnxslim 0.1.98 make a double of a Constant's attribute value_float, and no
runtime loads the result. `make test` puts onnxslim and onnxsim in a folder of their own.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx.inliner
import onnx_graphsurgeon
import onnxruntime
import pytest
from polygraphy.backend.onnx import fold_constants

from hdplugins.attention.local_global.reference import number_of_sides
from hdplugins.attention.operator import BodyVariant
from support.attention_graphs import chain_of
from support.attention_layers import Layer, token_kinds
from support.comparators import assert_close, named_case
from support.described_operators import NODES
from support.function_bodies import new_session, nodes_within
from support.grids import nightly_unless

# Older versions of the tools have other faults.
pytestmark = pytest.mark.pinned

ONNX_TOOLS = Path(sys.prefix) / "onnx-tools"

TOKENS = 37

ATOL = {"float32": 1e-5, "float16": 4e-3}
"""Ten times the error of one rounding: a tool may change the order of two sums."""

SIMPLIFY = """
import sys
from pathlib import Path
sys.path.append(sys.argv[1])
import onnx
import onnxsim
import onnxslim
for file in Path(sys.argv[2]).glob("*.onnx"):
    onnx.save(onnxslim.slim(onnx.load(file)), file.with_suffix(".onnxslim"))
    simplified, is_same = onnxsim.simplify(onnx.load(file))
    assert is_same, file
    onnx.save(simplified, file.with_suffix(".onnxsim"))
"""

Tool = Callable[[onnx.ModelProto], onnx.ModelProto]

each_node = pytest.mark.parametrize(
    "node",
    [nightly_unless(node == nodes[0], node) for nodes in NODES.values() for node in nodes],
    ids=lambda node: f"{node.operator.name} {node}",
)


def folded_by_graphsurgeon(model: onnx.ModelProto) -> onnx.ModelProto:
    graph = onnx_graphsurgeon.import_onnx(model)
    return onnx_graphsurgeon.export_onnx(graph.fold_constants().cleanup())


TOOLS: Mapping[str, Tool] = {
    "onnx's inliner": onnx.inliner.inline_local_functions,
    "GraphSurgeon": folded_by_graphsurgeon,
    "Polygraphy": fold_constants,
}


def models_of(node: Layer) -> Iterator[tuple[BodyVariant, onnx.ModelProto]]:
    return ((variant, chain_of([node], variant)) for variant in BodyVariant)


def feeds_of(model: onnx.ModelProto, node: Layer) -> dict[str, np.ndarray]:
    """Two texts, the first with padding, and a memory where the operator has one."""
    side = getattr(node, "side", 0)
    sizes = {"batch": 2, "tokens": TOKENS, "keys": TOKENS + 5, "distances": 2 * TOKENS + 5}
    sizes["sides"] = number_of_sides(TOKENS, side) if side else 0
    generator, feeds = np.random.default_rng(0), {}
    for value in model.graph.input:
        kind = value.type.tensor_type
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
        shape = [sizes[axis.dim_param] if axis.dim_param else axis.dim_value for axis in kind.shape.dim]
        is_state = dtype.kind == "f"
        feeds[value.name] = (
            generator.normal(size=shape) if is_state else token_kinds("right", shape[1], batch=2)
        ).astype(dtype)
    return feeds


def answer(session: onnxruntime.InferenceSession, feeds: Mapping[str, np.ndarray]) -> np.ndarray:
    return session.run(None, dict(feeds))[0]  # type: ignore[no-any-return]


def assert_kept(node: Layer, tools: Mapping[str, Tool]) -> None:
    for variant, model in models_of(node):
        feeds = feeds_of(model, node)
        wanted = answer(new_session(model), feeds)
        assert np.isfinite(wanted).all()
        for name, tool in tools.items():
            given = onnx.ModelProto()
            given.CopyFrom(model)
            with named_case(variant.value, name):
                assert_close(answer(new_session(tool(given)), feeds), wanted, atol=ATOL[node.dtype])


@each_node
def test_tools_that_fold_constants_keep_every_answer(node: Layer) -> None:
    assert_kept(node, TOOLS)


@pytest.mark.skipif(
    not (ONNX_TOOLS / "onnxsim").is_dir(), reason=f"{ONNX_TOOLS} lacks onnxsim: `make test` installs it where it can"
)
@pytest.mark.parametrize(
    "nodes",
    [
        pytest.param([nodes[0] for nodes in NODES.values()], id="a node of each operator"),
        *(nightly_unless(False, nodes) for nodes in NODES.values()),
    ],
)
def test_simplifiers_keep_every_answer(nodes: Sequence[Layer], tmp_path: Path) -> None:
    """In a process of its own: onnxsim 0.8.1 prints what it leaks when its process ends."""
    models = {
        f"{number}-{variant.value}": (node, model)
        for number, node in enumerate(nodes)
        for variant, model in models_of(node)
    }
    for name, (_, model) in models.items():
        onnx.save(model, tmp_path / f"{name}.onnx")
    command = [sys.executable, "-c", SIMPLIFY, str(ONNX_TOOLS), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name, (node, model) in models.items():
        feeds = feeds_of(model, node)
        wanted = answer(new_session(model), feeds)
        for tool in ("onnxslim", "onnxsim"):
            with named_case(str(node), name, tool):
                simplified = new_session(onnx.load(tmp_path / f"{name}.{tool}"))
                assert_close(answer(simplified, feeds), wanted, atol=ATOL[node.dtype])


@each_node
def test_no_number_of_a_body_that_is_inlined_and_folded_is_a_double(node: Layer) -> None:
    """An attribute of a node is a constant with value_float once a tool has inlined the body."""
    for variant, model in models_of(node):
        folded = folded_by_graphsurgeon(onnx.inliner.inline_local_functions(model))
        kinds = {value.data_type for value in folded.graph.initializer}
        kinds |= {
            attribute.t.data_type
            for each in nodes_within(folded.graph)
            for attribute in each.attribute
            if attribute.type == onnx.AttributeProto.TENSOR
        }
        with named_case(variant.value):
            assert onnx.TensorProto.DOUBLE not in kinds


def test_the_comparison_refuses_a_tool_that_makes_a_double() -> None:
    """As a graph with value_float became one."""
    nodes = NODES["DenseAttention"]

    def folded(model: onnx.ModelProto) -> onnx.ModelProto:
        (constant, *_) = [
            each
            for each in nodes_within(model.functions[0])
            if each.op_type == "Constant" and each.attribute[0].t.data_type == onnx.TensorProto.FLOAT
        ]
        number = float(onnx.numpy_helper.to_array(constant.attribute[0].t))
        del constant.attribute[:]
        constant.attribute.append(onnx.helper.make_attribute("value_float", number))
        return folded_by_graphsurgeon(model)

    with pytest.raises((RuntimeError, onnx.shape_inference.InferenceError)):
        assert_kept(nodes[0], {"GraphSurgeon": folded})
