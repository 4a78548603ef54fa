"""Swaps of heads and tokens are gone where nodes between them can compute tokens first; answers stay bit for bit."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from hdexport.graph.passes.remove_transposes import RemoveTransposes
from support.onnx_models import parsed_model

STATES = "float[batch, tokens, 4, 8]"

SWAP = "<perm = [0, 2, 1, 3]>"

CONSTANTS = {
    "pairs": np.array([4]),
    "first": np.array([0]),
    "last": np.array([3]),
    "ends": np.array([2**62]),
    "axes": np.array([0, 1]),
    "two": np.array(2.0, np.float32),
    "tokens_axis": np.array([2]),
    "by_head": np.linspace(1, 2, 4, dtype=np.float32).reshape(4, 1, 1),
}

ROTATION = f"""
    cosine = Unsqueeze (cosines, axes)
    sine = Unsqueeze (sines, axes)
    given = Transpose {SWAP} (states)
    squares = Pow (given, two)
    mean = ReduceMean <keepdims = 1> (squares, last)
    root = Sqrt (mean)
    normal = Div (given, root)
    scaled = Mul (normal, by_head)
    front = Slice (scaled, first, pairs, last)
    back = Slice (scaled, pairs, ends, last)
    negative = Neg (back)
    moved = Concat <axis = -1> (negative, front)
    of_cosine = Mul (scaled, cosine)
    of_sine = Mul (moved, sine)
    turned = Add (of_cosine, of_sine)
"""
"""What a model does to queries or keys: normalises, scales by head, turns; all with heads first."""

MOVED = {
    "until another swap": (f"{ROTATION} out = Transpose {SWAP} (turned) result = Identity (out)", 2, []),
    "until a transposition of more axes": (
        f"{ROTATION} out = Transpose <perm = [0, 2, 3, 1]> (turned) result = Identity (out)",
        1,
        [(0, 1, 3, 2)],
    ),
    "but for a node that needs heads first": (
        f"{ROTATION} out = Transpose {SWAP} (turned)"
        f" products = MatMul (turned, turned_keys) again = Transpose {SWAP} (products) result = Add (out, again)",
        1,
        [(0, 2, 1, 3), (0, 2, 1, 3)],
    ),
}

LEFT_ALONE = {
    "a product needs heads first": f"given = Transpose {SWAP} (states) result = MatMul (given, turned_keys)",
    "sums are over tokens": (
        f"given = Transpose {SWAP} (states) sums = ReduceSum <keepdims = 1> (given, tokens_axis)"
        f" less = Sub (given, sums) out = Transpose {SWAP} (less) result = Identity (out)"
    ),
    "no fewer would transpose": (
        f"given = Transpose {SWAP} (states) turned = Neg (given) result = MatMul (turned, turned_keys)"
    ),
}


def model_of(nodes: str) -> ir.Model:
    tables = {"cosines": "float[tokens, 8]", "sines": "float[tokens, 8]", "turned_keys": "float[8, 8]"}
    proto = parsed_model({"states": STATES, **tables}, {"result": "float[a, b, c, d]"}, nodes, CONSTANTS)
    return ir.serde.deserialize_model(onnx.shape_inference.infer_shapes(proto))


def answer(model: ir.Model) -> np.ndarray:
    random = np.random.default_rng(0)
    shapes = {"states": (2, 5, 4, 8), "cosines": (5, 8), "sines": (5, 8), "turned_keys": (8, 8)}
    feeds = {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    (found,) = session.run(None, {value.name: feeds[value.name] for value in session.get_inputs()})
    return found


def saved_by(model: ir.Model) -> int:
    """Remove transposes, and return how many fewer there are."""
    removing = RemoveTransposes()
    removing(model)
    return removing.saved


def transposes(model: ir.Model) -> list[tuple[int, ...]]:
    return [tuple(node.attributes.get_ints("perm")) for node in model.graph if node.op_type == "Transpose"]


@pytest.mark.parametrize(("nodes", "saved", "left"), MOVED.values(), ids=MOVED)
def test_a_swap_moves(nodes: str, saved: int, left: list[tuple[int, ...]]) -> None:
    model = model_of(nodes)
    others, expected = len(list(model.graph)) - len(transposes(model)), answer(model)
    assert saved_by(model) == saved
    assert transposes(model) == left
    of_axes = sum(node.op_type == "Constant" for node in model.graph)
    assert len(list(model.graph)) - len(left) - of_axes == others
    np.testing.assert_array_equal(answer(model), expected)
    onnx.checker.check_model(ir.to_proto(model), full_check=True)


@pytest.mark.parametrize("nodes", LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_a_graph_is_left_alone_where(nodes: str) -> None:
    model = model_of(nodes)
    before = ir.to_proto(model)
    assert saved_by(model) == 0
    assert ir.to_proto(model) == before


def test_tables_are_laid_out_once_for_all_that_read_them() -> None:
    again = ROTATION.replace("cosine = Unsqueeze (cosines, axes)", "").replace("sine = Unsqueeze (sines, axes)", "")
    for name in ("given", "squares", "mean", "root", "normal", "scaled", "front", "back", "negative", "moved"):
        again = again.replace(name, f"{name}_2")
    again = again.replace("of_cosine", "c_2").replace("of_sine", "s_2").replace("turned", "turned_2")
    nodes = f"{ROTATION} {again} out = Transpose {SWAP} (turned) out_2 = Transpose {SWAP} (turned_2)"
    model = model_of(f"{nodes} result = Add (out, out_2)")
    expected = answer(model)
    assert saved_by(model) == 4
    assert not transposes(model)
    assert sum(node.op_type == "Unsqueeze" for node in model.graph) == 2
    np.testing.assert_array_equal(answer(model), expected)
