"""Compute feed-forward networks in chunks of tokens: their wide values grow with a chunk, not with the sequence.

For ONNX Runtime only: `hdexport.graph.targets.tensorrt.lowering` says why engines do not use the pass.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import NamedTuple

import onnx_ir as ir

from hdexport.graph.weights import initializer_of
from hdplugins.op_builder import OpBuilder
from hdruntime.errors import ExportError, Setting

logger = logging.getLogger(__name__)

_ACTIVATIONS = frozenset({
    "Celu", "Clip", "Elu", "Erf", "Exp", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Mish", "Pow", "Relu", "Selu",
    "Sigmoid", "Softplus", "Softsign", "Sqrt", "Swish", "Tanh",
})  # fmt: skip
"""Operators one of which is between the two linear layers of every network."""

_ELEMENTWISE = _ACTIVATIONS | {"Abs", "Add", "Cast", "Div", "Identity", "Max", "Min", "Mul", "Neg", "Sub"}

_PARTS = frozenset({"Slice", "Split"})
"""Operators that take the wide values of a gated network apart."""

_WIDE_AXIS = 2
"""The last axis of [batch, tokens, width]."""


class FeedForward(NamedTuple):
    """A feed-forward network in a graph: its nodes, in order; `source`, [batch, tokens, hidden], all that they read
    beside constants; and `result`, [batch, tokens, hidden], all that other nodes read of them."""

    nodes: Sequence[ir.Node]
    source: ir.Value
    result: ir.Value

    @property
    def hidden(self) -> int:
        """Size of the last axis of source and result."""
        assert self.source.shape is not None
        return int(self.source.shape[_WIDE_AXIS])

    @property
    def graph(self) -> ir.Graph | ir.Function:
        """The graph or function that holds the nodes."""
        graph = self.nodes[0].graph
        assert graph is not None
        return graph


def feed_forward_networks(graph: ir.Graph, *, layers: int) -> list[FeedForward]:
    """The feed-forward networks of a portable graph, in its order.

    Each is two linear layers, [batch, tokens, hidden] to [batch, tokens, width] and back, with an activation and
    elementwise operators between them. Fewer networks than the model has layers are an ExportError.
    """
    networks: list[FeedForward] = []
    misses: list[_NoNetworkError] = []
    for node in graph:
        if _is_linear(node):
            try:
                networks.append(_network_before(node))
            except _NoNetworkError as miss:
                misses.append(miss)
    if len(networks) < layers:
        # The last of equals: a model ends with a network rather than with attention.
        nearest = max(reversed(misses), key=lambda miss: miss.nodes, default="there is no linear layer")
        raise ExportError(
            Setting("ffn_chunk"),
            f" found {len(networks)} feed-forward networks in {layers} layers. A network is two linear layers, [batch, "
            "tokens, hidden] to [batch, tokens, width] and back, with an activation and elementwise operators between "
            f"them. The nearest miss: {nearest}.",
            hint=(
                "Build without ",
                Setting("ffn_chunk"),
                ", and please report the model and the versions that `hdexport doctor` prints.",
            ),
        )
    return networks


class ChunkFeedForward(ir.passes.InPlacePass):
    """Replace the feed-forward networks of a portable graph by loops over chunks of tokens.

    1. The tokens of a batch are divided into as few chunks of at most `tokens` tokens as possible, all of one length:
       there are fewer tokens of padding than chunks, and a batch of up to `tokens` tokens is one chunk without any.
    2. Networks of one shape share the nodes that compute the sizes.

    Args:
        tokens: maximum number of tokens of a chunk.
        layers: number of the model's layers. Fewer networks than layers raise an ExportError with the nearest miss.
    """

    def __init__(self, tokens: int, *, layers: int) -> None:
        self._tokens, self._layers = tokens, layers

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        networks = feed_forward_networks(model.graph, layers=self._layers)
        sizes: dict[tuple[object, ...], _Sizes] = {}
        for number, network in enumerate(networks):
            axes = tuple(network.source.shape or ())
            if axes not in sizes:
                sizes[axes] = _Sizes(network, self._tokens)
            _replace_by_loop(network, sizes[axes], name=f"feed_forward_{number}")
        logger.info("%d feed-forward networks compute chunks of %d tokens", len(networks), self._tokens)
        return ir.passes.PassResult(model, modified=bool(networks))


class _NoNetworkError(Exception):
    """A linear layer is not the second one of a network, for a reason in a few words; `nodes` is the number of nodes
    that could be of a network."""

    def __init__(self, last: ir.Node, nodes: int, reason: str) -> None:
        super().__init__(f"{_described(last)} ends none, because {reason}")
        self.nodes = nodes


def _described(node: ir.Node) -> str:
    weights = [f"of {weight.name}" for weight in map(initializer_of, node.inputs) if weight is not None]
    return " ".join([node.op_type, *filter(None, [node.name]), *weights[:1]])


def _network_before(last: ir.Node) -> FeedForward:
    """The network whose second linear layer is `last`."""
    bias = _bias_after(last)
    ends = [last] if bias is None else [last, bias]
    inside, sources = set(ends), set()
    pending = _variables(last)
    while pending:
        value = pending.pop()
        node = value.producer()
        if node in inside:
            continue
        if node is None or not (_is_linear(node) or _is_elementwise(node)):
            producer = f"the input {value.name}" if node is None else _described(node)
            raise _NoNetworkError(last, len(inside), f"{producer} is before it")
        inside.add(node)
        if _is_linear(node):
            sources |= {*_variables(node)}
        else:
            pending += _variables(node)
    result = ends[-1].outputs[0]
    reason = _mismatch(inside, sources, result)
    if reason is not None:
        raise _NoNetworkError(last, len(inside), reason)
    (source,) = sources
    assert last.graph is not None
    return FeedForward(nodes=[node for node in last.graph if node in inside], source=source, result=result)


def _is_linear(node: ir.Node) -> bool:
    """Whether a node is the product of [batch, tokens, width] and a weight."""
    if node.op_type != "MatMul" or node.domain:
        return False
    states, weight = node.inputs
    assert states is not None
    assert weight is not None
    return initializer_of(weight) is not None and states.shape is not None and len(states.shape) == _WIDE_AXIS + 1


def _is_elementwise(node: ir.Node) -> bool:
    """Whether a token's result depends on that token alone."""
    if node.domain:
        return False
    return node.op_type in _ELEMENTWISE or (node.op_type in _PARTS and _axes(node) <= {_WIDE_AXIS, -1})


def _axes(node: ir.Node) -> set[int]:
    """Axes along which a Slice or a Split takes values apart."""
    if node.op_type == "Split":
        return {node.attributes.get_int("axis", 0)}
    axes = ir.convenience.get_const_tensor(node.inputs[3]) if len(node.inputs) > 3 else None
    return {0} if axes is None else set(axes.numpy().tolist())


def _variables(node: ir.Node) -> list[ir.Value]:
    return [value for value in node.inputs if value is not None and not _is_constant(value)]


def _is_constant(value: ir.Value) -> bool:
    return initializer_of(value) is not None or value.const_value is not None


def _bias_after(last: ir.Node) -> ir.Node | None:
    """The node that adds a constant to a linear layer, if nothing else reads it."""
    users = [use.node for use in last.outputs[0].uses()]
    if len(users) != 1 or users[0].op_type != "Add":
        return None
    others = [value for value in users[0].inputs if value is not last.outputs[0]]
    return users[0] if all(value is not None and _is_constant(value) for value in others) else None


def _mismatch(nodes: Collection[ir.Node], sources: Collection[ir.Value], result: ir.Value) -> str | None:
    if len(sources) != 1:
        return f"{len(sources)} values enter the linear layers before it"
    if not any(node.op_type in _ACTIVATIONS for node in nodes):
        return "there is no activation before it"
    (source,) = sources
    assert source.shape is not None
    if result.shape is None or result.shape[_WIDE_AXIS] != source.shape[_WIDE_AXIS]:
        return f"it makes {result.shape} of {source.shape}"
    for value in (output for node in nodes for output in node.outputs if output is not result):
        if value.is_graph_output() or any(use.node not in nodes for use in value.uses()):
            return f"something else reads {value.name}"
    return None


class _Sizes:
    """The values that all loops over values of one shape share.

    Attributes:
        whole: [3], int64, the sizes of the network's source: batch, tokens and hidden.
        rows: [1], int64, tokens of the batch.
        flat: [-1, hidden].
        chunked: [4], int64, chunks, 1, rows of a chunk and hidden.
        missing: [1], int64, rows of padding in the last chunk.
    """

    def __init__(self, network: FeedForward, tokens: int) -> None:
        op = OpBuilder.before(network.nodes[-1])

        def divide_up(dividend: ir.Value, divisor: ir.Value | list[int]) -> ir.Value:
            return op.Div(op.Sub(op.Add(dividend, divisor), [1]), divisor)

        self.flat = [-1, network.hidden]
        self.whole = op.Shape(network.source)
        batch, length = (op.Shape(network.source, start=axis, end=axis + 1) for axis in range(_WIDE_AXIS))
        self.rows = op.Mul(batch, length)
        chunks = divide_up(self.rows, [tokens])
        rows_of_chunk = divide_up(self.rows, chunks)
        self.missing = op.Sub(op.Mul(chunks, rows_of_chunk), self.rows)
        self.chunked = op.Concat(chunks, [1], rows_of_chunk, [network.hidden], axis=0)


def _replace_by_loop(network: FeedForward, sizes: _Sizes, *, name: str) -> None:
    source, result = network.source, network.result
    whole = ir.Value(name=f"{name}_whole", type=result.type, shape=result.shape)
    ir.convenience.replace_all_uses_with(result, whole, replace_graph_outputs=True)
    op = OpBuilder.before(network.nodes[-1])
    flat = op.Reshape(source, sizes.flat)
    # The sequence's first tokens again: ONNX Runtime's Pad has no bfloat16.
    padding = op.Slice(flat, [0], sizes.missing)
    chunks = op.Reshape(op.Concat(flat, padding, axis=0), sizes.chunked)
    results = op.Scan(chunks, num_scan_inputs=1)
    rows = op.Slice(op.Reshape(results, sizes.flat), [0], sizes.rows)
    op.Reshape(rows, sizes.whole, _outputs=[whole])
    scan = results.producer()
    assert scan is not None
    scan.attributes["body"] = ir.AttrGraph("body", _moved(network, name))


def _moved(network: FeedForward, name: str) -> ir.Graph:
    """The network's nodes in a graph of their own, from [1, rows, hidden] to that shape."""
    source, nodes = network.source, network.nodes
    chunk = ir.Value(name="chunk", type=source.type, shape=source.shape)
    for node in nodes:
        for index, value in enumerate(node.inputs):
            if value is source:
                node.replace_input_with(index, chunk)
    for value in (chunk, *(output for node in nodes for output in node.outputs)):
        # Later passes give out names that are free in the outer graph, which the loop shares.
        value.name = f"{name}_{value.name}"
        assert value.shape is not None
        value.shape = ir.Shape([1, None, value.shape[_WIDE_AXIS]])
    network.graph.remove(nodes)
    return ir.Graph([chunk], [network.result], nodes=nodes, name=name)
