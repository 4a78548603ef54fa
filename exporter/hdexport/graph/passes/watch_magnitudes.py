"""Turn a float16 graph into one that gives the largest magnitude of each of its float16 values, computed in float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from hdexport.attention.registry import lowering_of
from hdexport.graph.passes.module_names import module_names
from hdexport.lowering.lowering import SharedParts
from hdexport.lowering.nodes import add_function, operator_nodes, operator_of
from hdplugins import ONNX_DOMAIN

if TYPE_CHECKING:
    import onnx_ir
    from onnx_ir import Value

    from hdplugins.op_builder import OpBuilder

_DENSE = "DenseAttention"

_NO_LARGER = frozenset({
    "Concat",
    "Expand",
    "Flatten",
    "Gather",
    "GatherElements",
    "GatherND",
    "Gelu",
    "Identity",
    "Pad",
    "Relu",
    "Reshape",
    "ScatterElements",
    "ScatterND",
    "Sigmoid",
    "Slice",
    "Softmax",
    "Split",
    "Squeeze",
    "Tanh",
    "Tile",
    "Transpose",
    "Unsqueeze",
    "Where",
})  # fmt: skip
"""Operators whose results are no larger than their inputs, which are weights or were watched where computed, or 1."""

_NODE, _OPERATOR, _MODULE = "hdexport.node", "hdexport.operator", "hdexport.module"
"""Metadata of nodes, which inlining copies from a node to its body."""

_SCORES_DOMAIN, _SCORES = "hdexport.range", "LargestScore"

_MOST_QUERIES = 512
"""Queries of a text whose scores are looked at, evenly spread: all scores of a long text take longer than the model."""


class Watched(NamedTuple):
    """A float16 value of the portable graph, or the values within one attention.

    Attributes:
        output: name of the output that holds the largest magnitude, float32 []. Infinity shows in it; NaN may not, for
            ONNX Runtime takes the largest of the others.
        node: name of the portable graph's node that computes the value.
        operator: operator of that node, ``MatMul``; for an attention, whose products are watched, its name.
        module: of PyTorch's model, as `hdexport.graph.passes.module_names` has it.
    """

    output: str
    node: str
    operator: str
    module: str


def watch_magnitudes(model: onnx_ir.Model) -> tuple[list[Watched], list[str]]:
    """Rewrite a portable graph, in place, for ONNX Runtime on a CPU.

    Left out are values that cannot be larger than a watched one: moved values, an activation function's results, and an
    attention's, which are averages of its values. Within an attention its scores are looked at, which are products of
    two activations; in texts of more than `_MOST_QUERIES` tokens, some queries' scores with all keys.

    Args:
        model: a portable float16 graph, with the bodies of its functions.

    Returns:
        The watched values, in graph order, and the names of outputs that hold, for each of the graph's own, the sum of
        its magnitudes: NaN where there is NaN in it.
    """
    import onnx_ir as ir
    from onnx_ir.passes.common import InlinePass, RemoveUnusedFunctionsPass, RemoveUnusedNodesPass

    from hdexport.graph.passes.widen_to_float32 import widen_to_float32
    from hdexport.lowering.multi_head_attention import CONTRIB_DOMAIN
    from hdplugins.op_builder import build_function

    graph = model.graph
    half = {output for node in graph for output in node.outputs if output.dtype is ir.DataType.FLOAT16}
    _label(graph)
    InlinePass(criteria=lambda function: not function.name.startswith(_DENSE))(model)
    watcher = _Watcher(half)
    magnitudes = watcher.watch(graph)
    sums = [watcher.sum_of_magnitudes(graph, output) for output in graph.outputs]
    graph.outputs[:] = [*(value for value, _ in magnitudes), *sums]
    widen_to_float32(model)
    body = build_function(_largest_score, domain=_SCORES_DOMAIN, name=_SCORES, attributes=["scale"])
    add_function(model, body)
    parts = SharedParts(model)
    for node in operator_nodes(model, _DENSE):
        lowering_of(node).for_onnxruntime_cpu(node, parts)
    graph.opset_imports.update({_SCORES_DOMAIN: 1, CONTRIB_DOMAIN: 1})
    RemoveUnusedNodesPass()(model)
    RemoveUnusedFunctionsPass()(model)
    watched = []
    for value, node in magnitudes:
        of_node = node.metadata_props
        names = {"node": of_node[_NODE], "operator": of_node[_OPERATOR], "module": of_node[_MODULE]}
        watched.append(Watched(output=str(value.name), **names))
    return watched, [str(value.name) for value in sums]


def _largest_score(op: OpBuilder, query: Value, key: Value) -> Value:
    """The largest magnitude of some queries' scores.

    One head of keys after another, so that little is held. The query is scaled, as in the body of dense attention:
    these are the products that a runtime without a fused attention writes out in float16.
    """
    from hdplugins.attention.function_parts import transpose_heads_and_tokens
    from hdplugins.op_builder import float_attribute, scan

    tokens_1d = op.Shape(query, start=1, end=2)
    step_1d = op.Div(op.Add(tokens_1d, [_MOST_QUERIES - 1]), [_MOST_QUERIES])
    some_queries = op.Mul(op.Slice(query, [0], tokens_1d, [1], step_1d), float_attribute(op, "scale"))
    queries, keys = (transpose_heads_and_tokens(op, state) for state in (some_queries, key))
    grouped = op.Reshape(queries, op.Concat([0], op.Shape(keys, start=1, end=2), [-1, 0], axis=0))

    def of_head(op: OpBuilder, head_query: Value, head_key: Value) -> Value:
        products = op.MatMul(head_query, op.Transpose(head_key, perm=[0, 2, 1]))
        largest: Value = op.Max(op.ReduceMax(products, keepdims=0), op.Neg(op.ReduceMin(products, keepdims=0)))
        return largest

    heads_first = [op.Transpose(states, perm=[1, 0, 2, 3]) for states in (grouped, keys)]
    largest: Value = op.ReduceMax(scan(op, of_head, *heads_first, shapes=[()]), keepdims=0)
    return largest


def _label(graph: onnx_ir.Graph) -> None:
    """Write into each node its name, operator and module, for inlining to copy."""
    for node, module in module_names(graph).items():
        operator = operator_of(node).name if node.domain == ONNX_DOMAIN else node.op_type
        node.metadata_props.update({_NODE: node.name or "", _OPERATOR: operator, _MODULE: module})


class _Watcher:
    """Puts magnitudes into one model; `half` are the values of its main graph that are float16."""

    def __init__(self, half: set[onnx_ir.Value]) -> None:
        self._half = half
        self._count = 0

    def watch(self, graph: onnx_ir.Graph) -> list[tuple[onnx_ir.Value, onnx_ir.Node]]:
        """Magnitudes, in the order of the main graph's nodes, and the node that each is about."""
        found = []
        for node in list(graph):
            if node.domain == ONNX_DOMAIN:
                found.append((self._scores(graph, node), node))
            elif node.metadata_props[_OPERATOR] != node.op_type:
                found += [(magnitude, node) for magnitude in self._in_body(graph, node)]
            elif node.op_type not in _NO_LARGER:
                found += [(self._magnitude(graph, value), node) for value in node.outputs if value in self._half]
        return found

    def sum_of_magnitudes(self, graph: onnx_ir.Graph, value: onnx_ir.Value) -> onnx_ir.Value:
        """A value's, at the end of the graph."""
        return self._op(graph, graph[-1], "ReduceL1", [value], {"keepdims": 0})

    def _scores(self, graph: onnx_ir.Graph, node: onnx_ir.Node) -> onnx_ir.Value:
        attributes = {"scale": node.attributes["scale"].as_float()}
        return self._op(graph, node, _SCORES, node.inputs[:2], attributes, domain=_SCORES_DOMAIN)

    def _in_body(self, graph: onnx_ir.Graph, node: onnx_ir.Node) -> list[onnx_ir.Value]:
        """Magnitudes in an attention's body: products have the query's type, and no other large value has it."""
        if node.op_type == "If":
            return [self._in_branches(node)]
        return [self._magnitude(graph, node.outputs[0])] if node.op_type == "MatMul" else []

    def _in_branches(self, node: onnx_ir.Node) -> onnx_ir.Value:
        """The largest magnitude in the branch that is taken, as one more output of the node."""
        import onnx_ir as ir

        for name in ("then_branch", "else_branch"):
            branch = node.attributes[name].as_graph()
            inside = [magnitude for inner in list(branch) for magnitude in self._in_body(branch, inner)]
            nothing = self._op(branch, branch[-1], "Constant", [], {"value": ir.tensor(0.0)})
            branch.outputs.append(self._op(branch, branch[-1], "Max", [nothing, *inside]))
        node.resize_outputs(len(node.outputs) + 1)
        return self._named(node.outputs[-1])

    def _magnitude(self, graph: onnx_ir.Graph, value: onnx_ir.Value) -> onnx_ir.Value:
        # Two passes that make nothing, where the largest of Abs would write a second value of that size.
        producer = value.producer()
        assert producer is not None
        highest = self._op(graph, producer, "ReduceMax", [value], {"keepdims": 0})
        lowest = self._op(graph, highest.producer(), "ReduceMin", [value], {"keepdims": 0})
        depth = self._op(graph, lowest.producer(), "Neg", [lowest])
        return self._op(graph, depth.producer(), "Max", [highest, depth])

    def _op(
        self,
        graph: onnx_ir.Graph,
        after: onnx_ir.Node | None,
        op_type: str,
        inputs: Sequence[onnx_ir.Value | None],
        attributes: dict[str, object] | None = None,
        *,
        domain: str = "",
    ) -> onnx_ir.Value:
        """The output [] of a new node."""
        import onnx_ir as ir

        assert after is not None
        node = ir.node(op_type, inputs, attributes, domain=domain)
        graph.insert_after(after, node)
        return self._named(node.outputs[0])

    def _named(self, value: onnx_ir.Value) -> onnx_ir.Value:
        import onnx_ir as ir

        # Branches share their names with the whole graph.
        value.name, value.dtype, value.shape = f"magnitude_{self._count}", ir.DataType.FLOAT, ir.Shape([])
        self._count += 1
        return value
