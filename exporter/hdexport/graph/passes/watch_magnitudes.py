"""Turn a float16 graph into a graph that outputs the maximum magnitude of each float16 value, computed in float32."""

from __future__ import annotations

import functools
import itertools
import logging
from typing import NamedTuple

import onnx_ir as ir
from onnx_ir import Value
from onnx_ir.passes.common import InlinePass, RemoveUnusedFunctionsPass, RemoveUnusedNodesPass

from hdexport.attention.registry import lowering_of
from hdexport.graph.passes.graph_pass import run_passes
from hdexport.graph.passes.module_names import module_names
from hdexport.graph.passes.upcast_to_float32 import UpcastToFloat32
from hdexport.lowering.lowering import SharedParts
from hdexport.lowering.multi_head_attention import CONTRIB_DOMAIN
from hdexport.lowering.nodes import add_function, operator_nodes, operator_of
from hdplugins import ONNX_DOMAIN
from hdplugins.attention.function_parts import transpose_heads_and_tokens
from hdplugins.op_builder import OpBuilder, build_function, float_attribute, scan

logger = logging.getLogger(__name__)

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
"""Operators whose outputs are no larger than 1 or their inputs, which are weights or watched themselves."""

_NODE, _OPERATOR, _MODULE = "hdexport.node", "hdexport.operator", "hdexport.module"
"""Metadata of nodes, which inlining copies from a node to its body."""

_SCORES_DOMAIN, _SCORES = "hdexport.range", "LargestScore"

_MAX_QUERIES = 512
"""Number of queries of a sequence whose scores are watched, evenly spread: all scores of a long sequence take longer
than the model."""


class Watched(NamedTuple):
    """A float16 value of the portable graph, or the values within one attention.

    Attributes:
        output: name of the output that holds the maximum magnitude, float32 []. It shows infinity; it may not show NaN,
            since ONNX Runtime takes the maximum of the other values.
        node: name of the portable graph's node that computes the value.
        operator: operator of that node, such as ``MatMul``; for an attention, whose matmuls are watched, its name.
        module: PyTorch module, as in `hdexport.graph.passes.module_names`.
    """

    output: str
    node: str
    operator: str
    module: str


class WatchMagnitudes(ir.passes.InPlacePass):
    """Rewrite a portable float16 graph with its functions, for ONNX Runtime on a CPU.

    1. Attentions but dense attention are inlined. Inlining copies the metadata that name each node's origin.
    2. Each float16 value gets an output with its maximum magnitude, except values that cannot be larger than a watched
       value (`_NO_LARGER`): moved values, outputs of an activation function, and the averages of attention.
    3. Within an attention the scores are watched, which are matmuls of two activations. In sequences of more than
       `_MAX_QUERIES` tokens, the scores of some queries with all keys are watched.
    4. Each output of the graph is replaced by the sum of its magnitudes, which is NaN where the output has a NaN.
    5. The graph computes in float32, with the fused attention of ONNX Runtime.

    Attributes:
        watched: the watched values, in graph order.
        sums: names of the outputs with the sums of magnitudes, one per output of the graph.
    """

    def __init__(self) -> None:
        self.watched: list[Watched] = []
        self.sums: list[str] = []

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        half = {output for node in graph for output in node.outputs if output.dtype is ir.DataType.FLOAT16}
        _label(graph)
        run_passes(model, [InlinePass(criteria=lambda function: not function.name.startswith(_DENSE))])  # 1
        watcher = _Watcher(half)
        magnitudes = watcher.watch(graph)  # 2, 3
        sums = [watcher.sum_of_magnitudes(graph, output) for output in graph.outputs]  # 4
        graph.outputs[:] = [*(value for value, _ in magnitudes), *sums]
        run_passes(model, [UpcastToFloat32()])  # 5
        add_function(model, build_function(_largest_score, domain=_SCORES_DOMAIN, name=_SCORES, attributes=["scale"]))
        parts = SharedParts(model)
        for node in operator_nodes(model, _DENSE):
            lowering_of(node).for_onnxruntime_cpu(node, parts)
        graph.opset_imports.update({_SCORES_DOMAIN: 1, CONTRIB_DOMAIN: 1})
        run_passes(model, [RemoveUnusedNodesPass(), RemoveUnusedFunctionsPass()])
        for value, node in magnitudes:
            origin = node.metadata_props
            names = {"node": origin[_NODE], "operator": origin[_OPERATOR], "module": origin[_MODULE]}
            self.watched.append(Watched(output=str(value.name), **names))
        self.sums = [str(value.name) for value in sums]
        logger.debug("%d float16 values are watched", len(self.watched))
        return ir.passes.PassResult(model, modified=True)


def _largest_score(op: OpBuilder, query: Value, key: Value) -> Value:
    """The maximum magnitude of the scores of some queries.

    One head of keys after another, so that little is in memory. The query is scaled, as in the body of dense attention:
    these are the scores that a runtime without a fused attention writes in float16.
    """
    tokens_1d = op.Shape(query, start=1, end=2)
    step_1d = op.Div(op.Add(tokens_1d, [_MAX_QUERIES - 1]), [_MAX_QUERIES])
    some_queries = op.Mul(op.Slice(query, [0], tokens_1d, [1], step_1d), float_attribute(op, "scale"))
    queries, keys = (transpose_heads_and_tokens(op, state) for state in (some_queries, key))
    grouped = op.Reshape(queries, op.Concat([0], op.Shape(keys, start=1, end=2), [-1, 0], axis=0))

    def of_head(op: OpBuilder, head_query: Value, head_key: Value) -> Value:
        scores = op.MatMul(head_query, op.Transpose(head_key, perm=[0, 2, 1]))
        return op.Max(op.ReduceMax(scores, keepdims=0), op.Neg(op.ReduceMin(scores, keepdims=0)))

    by_head = [op.Transpose(states, perm=[1, 0, 2, 3]) for states in (grouped, keys)]
    return op.ReduceMax(scan(op, of_head, *by_head, shapes=[()]), keepdims=0)


def _label(graph: ir.Graph) -> None:
    """Write the name, operator and module of each node into its metadata, which inlining copies."""
    for node, module in module_names(graph).items():
        operator = operator_of(node).name if node.domain == ONNX_DOMAIN else node.op_type
        node.metadata_props.update({_NODE: node.name or "", _OPERATOR: operator, _MODULE: module})


class _Watcher:
    """Inserts magnitudes into a model; `half` are the float16 values of its main graph."""

    def __init__(self, half: set[Value]) -> None:
        self._half = half
        self._numbers = itertools.count()
        self._after = functools.partial(OpBuilder.after, name_value=self._name)

    def _name(self, _: str = "") -> str:
        # Branches share their names with the whole graph.
        return f"magnitude_{next(self._numbers)}"

    def watch(self, graph: ir.Graph) -> list[tuple[Value, ir.Node]]:
        """Magnitudes, in the order of the main graph's nodes, each with the watched node."""
        magnitudes = []
        for node in list(graph):
            if node.domain == ONNX_DOMAIN:
                magnitudes.append((self._scores(node), node))
            elif node.metadata_props[_OPERATOR] != node.op_type:
                magnitudes += [(magnitude, node) for magnitude in self._in_body(node)]
            elif node.op_type not in _NO_LARGER:
                magnitudes += [(self._magnitude(value), node) for value in node.outputs if value in self._half]
        return magnitudes

    def sum_of_magnitudes(self, graph: ir.Graph, value: Value) -> Value:
        return _scalar(self._after(graph[-1]).ReduceL1(value, keepdims=0))

    def _scores(self, node: ir.Node) -> Value:
        query, key, *_ = node.inputs
        scale = node.attributes["scale"].as_float()
        return _scalar(self._after(node).call(_SCORES, query, key, scale=scale, _domain=_SCORES_DOMAIN))

    def _in_body(self, node: ir.Node) -> list[Value]:
        """Magnitudes in an attention's body: only matmuls have large values in the query's type."""
        if node.op_type == "If":
            return [self._in_branches(node)]
        return [self._magnitude(node.outputs[0])] if node.op_type == "MatMul" else []

    def _in_branches(self, node: ir.Node) -> Value:
        """The maximum magnitude in the branch that runs, as one more output of the node."""
        for name in ("then_branch", "else_branch"):
            branch = node.attributes[name].as_graph()
            inside = [magnitude for inner in list(branch) for magnitude in self._in_body(inner)]
            branch.outputs.append(_scalar(self._after(branch[-1]).Max(0.0, *inside)))
        node.resize_outputs(len(node.outputs) + 1)
        output = _scalar(node.outputs[-1])
        output.name = self._name()
        return output

    def _magnitude(self, value: Value) -> Value:
        # Two passes that allocate nothing, where the maximum of Abs would write a second value of that size.
        producer = value.producer()
        assert producer is not None
        op = self._after(producer)
        depth = op.Neg(op.ReduceMin(value, keepdims=0))
        return _scalar(op.Max(op.ReduceMax(value, keepdims=0), depth))


def _scalar(value: Value) -> Value:
    value.dtype, value.shape = ir.DataType.FLOAT, ir.Shape([])
    return value
