"""Pool wide values of tokens in blocks of tokens: never are all values of a sequence in memory.

SPLADE pools logits [batch, tokens, vocabulary], 500 MB for a sequence of 4096 tokens and a vocabulary of 30522. In a
loop, each step computes the logits of one block and keeps their maximum, [batch, vocabulary], or adds their sums,
[batch, sums, vocabulary].

Engines do not use the pass: `hdexport.graph.targets.tensorrt.lowering` says why.
"""

from __future__ import annotations

import itertools
import logging
from typing import NamedTuple

import onnx_ir as ir

from hdexport.graph.weights import initializer_of
from hdplugins.op_builder import OpBuilder
from hdruntime.errors import ExportError

logger = logging.getLogger(__name__)

BLOCK_TOKENS = 256
"""Maximum number of tokens of a block, in all rows of a batch together. Such blocks cost no time: 4096 tokens take as
long as without blocks."""

_ELEMENTWISE = frozenset({
    "Add", "Cast", "Div", "Identity", "Log", "Max", "Min", "Mul", "Relu", "Sub", "Tanh", "Where",
})  # fmt: skip

_TOKENS_AXIS, _RANK = 1, 3
"""The tokens' axis, and the rank, of [batch, tokens, width]."""


class _Pool(NamedTuple):
    """A pool over the tokens of a linear layer's output.

    Attributes:
        nodes: nodes in the order of the graph: the linear layer, elementwise operators, the pool, and a Cast of the
            pool's output.
        sequences: [batch, tokens, ...], all that the nodes read beside constants and `factors`.
        pool: the node that pools: a maximum, or a matmul with factors on the left.
        factors: [batch, sums, tokens], the matmul's factors; None for a maximum.
        result: [batch, width] or [batch, sums, width], all that other nodes read of the nodes.
    """

    nodes: list[ir.Node]
    sequences: list[ir.Value]
    pool: ir.Node
    factors: ir.Value | None
    result: ir.Value


class PoolInBlocks(ir.passes.InPlacePass):
    """Replace pools over the tokens of a linear layer's output by loops over blocks of tokens.

    1. A pool is a maximum over the tokens, or a matmul with factors of each token, which sums (`_pooled_by`).
    2. The linear layer makes more values of a token than it reads. Between it and the pool there are only elementwise
       operators, whose other inputs are constants and one value per token. No other node reads a value in between
       (`_pool_of`).
    3. All blocks have one size. The last block ends with the last token. Where it starts with tokens of the block
       before it, their maximum changes nothing, and their factors in a sum are 0.
    4. A batch of up to `BLOCK_TOKENS` tokens in all is one block.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        pools, _ = _pools(model)
        for number, pool in enumerate(pools):
            _replace_by_loop(pool, name=f"pooled_{number}")
        if pools:
            logger.info("%d pools over tokens compute blocks of %d tokens", len(pools), BLOCK_TOKENS)
        return ir.passes.PassResult(model, modified=bool(pools))


def check_pools_logits(model: ir.Model, *, model_type: str) -> None:
    """Raise an ExportError with the nearest miss if `PoolInBlocks` finds nothing in a graph that pools logits."""
    pools, misses = _pools(model)
    if not pools:
        nearest = max(misses, key=lambda miss: miss.nodes, default="there is no maximum or sum over tokens")
        raise ExportError(
            f"The graph of a {model_type} pools no linear layer's output, so that logits of all tokens would be in "
            f"memory at once. The nearest miss: {nearest}.",
            hint="Please report the model and the versions that `hdexport doctor` prints.",
        )


class _NoPoolError(Exception):
    """A node pools no linear layer's output; `nodes` is the number of nodes that could belong to a pool."""

    def __init__(self, pool: ir.Node, nodes: int, reason: str) -> None:
        super().__init__(f"{pool.op_type} {pool.name or ''} pools no linear layer's output: {reason}")
        self.nodes = nodes


def _pools(model: ir.Model) -> tuple[list[_Pool], list[_NoPoolError]]:
    pools, misses = [], []
    for node in model.graph:
        factors, pooled = _pooled_by(node)
        if pooled is not None:
            try:
                pools.append(_pool_of(node, factors, pooled))
            except _NoPoolError as miss:
                misses.append(miss)
    return pools, misses


def _pooled_by(pool: ir.Node) -> tuple[ir.Value | None, ir.Value | None]:
    """The factors of a pool, if any, and its input, [batch, tokens, width]; None for a node that is no pool."""
    if pool.domain or pool.op_type not in ("ReduceMax", "MatMul"):
        return None, None
    first, second = pool.inputs[0], pool.inputs[1] if len(pool.inputs) > 1 else None
    if pool.op_type == "ReduceMax":
        axes = ir.convenience.get_const_tensor(second)
        is_over_tokens = axes is not None and axes.numpy().tolist() == [_TOKENS_AXIS]
        return None, first if is_over_tokens and not pool.attributes.get_int("keepdims", 1) else None
    has_factors = first is not None and first.shape is not None and len(first.shape) == _RANK
    return (first, second) if has_factors and not _is_weight(second) else (None, None)


def _pool_of(pool: ir.Node, factors: ir.Value | None, pooled: ir.Value) -> _Pool:
    """The pool whose last node is `pool`; rule 2."""
    sequences: dict[ir.Value, None] = {}
    inside, pending, has_linear = {pool}, [pooled], False
    while pending:
        value = pending.pop()
        if value is None or value.shape is None or initializer_of(value) or value.const_value is not None:
            continue
        node = value.producer()
        if len(value.shape) == _RANK and value.shape[-1] == 1:
            sequences[value] = None
        elif node is None or node.domain or len(value.shape) != _RANK:
            raise _NoPoolError(pool, len(inside), f"{value.name} has the shape {value.shape}")
        elif node.op_type == "MatMul" and _is_weight(node.inputs[1]) and _widens(node):
            inside.add(node)
            assert node.inputs[0] is not None
            sequences[node.inputs[0]] = None
            has_linear = True
        elif node.op_type in _ELEMENTWISE:
            inside.add(node)
            pending += node.inputs
        else:
            raise _NoPoolError(pool, len(inside), f"{node.op_type} {node.name or ''} is before it")
    result = pool.outputs[0]
    users = [use.node for use in result.uses()]
    if len(users) == 1 and users[0].op_type == "Cast":
        # Maxima of half precision are kept in the type of the Cast.
        inside.add(users[0])
        result = users[0].outputs[0]
    if not has_linear:
        raise _NoPoolError(pool, len(inside), "there is no linear layer before it")
    for value in (output for node in inside for output in node.outputs if output is not result):
        if value.is_graph_output() or any(use.node not in inside for use in value.uses()):
            raise _NoPoolError(pool, len(inside), f"another node reads {value.name}")
    assert pool.graph is not None
    nodes = [node for node in pool.graph if node in inside]
    return _Pool(nodes=nodes, sequences=list(sequences), pool=pool, factors=factors, result=result)


def _is_weight(value: ir.Value | None) -> bool:
    """Whether a value is a weight, or a transposed one, such as the embedding table that is also the weight."""
    node = None if value is None else value.producer()
    if node is not None and node.op_type == "Transpose":
        value = node.inputs[0]
    return initializer_of(value) is not None


def _widens(linear: ir.Node) -> bool:
    """Whether a linear layer makes more values of a token than it reads; other outputs are small enough."""
    source, output = linear.inputs[0], linear.outputs[0]
    assert source is not None
    return source.shape is not None and output.shape is not None and int(output.shape[-1]) > int(source.shape[-1])


def _replace_by_loop(pool: _Pool, *, name: str) -> None:
    graph, result, sequence = pool.pool.graph, pool.result, pool.sequences[0]
    assert graph is not None
    assert result.shape is not None
    assert result.dtype is not None
    # An output of the graph keeps its name.
    whole = ir.Value(name=result.name, type=result.type, shape=result.shape)
    result.name = f"{result.name}_of_block"
    ir.convenience.replace_all_uses_with(result, whole, replace_graph_outputs=True)
    op = OpBuilder.before(pool.nodes[-1])
    batch_1d, tokens_1d = (op.Shape(sequence, start=axis, end=axis + 1) for axis in (0, _TOKENS_AXIS))
    rows, tokens = op.Squeeze(batch_1d), op.Squeeze(tokens_1d)
    size = op.Min(op.Max(op.Div(BLOCK_TOKENS, rows), 1), tokens)  # 4
    last = op.Sub(tokens, size)
    blocks = op.Div(op.Sub(op.Add(tokens, size), 1), size)
    initial = op.Constant(value=ir.tensor([result.dtype.min if pool.factors is None else 0.0], dtype=result.dtype))
    shape = op.Concat(batch_1d, [int(axis) for axis in result.shape[1:]], axis=0)
    op.Loop(blocks, None, op.Expand(initial, shape), _outputs=[whole])
    loop = whole.producer()
    assert loop is not None
    loop.attributes["body"] = ir.AttrGraph("body", _body(pool, size=size, last=last, name=name))


def _body(pool: _Pool, *, size: ir.Value, last: ir.Value, name: str) -> ir.Graph:
    """A block's step: its number, whether to continue and the earlier blocks' pool -> the last two after this block."""
    graph, result = pool.pool.graph, pool.result
    assert graph is not None
    number = ir.val(f"{name}_number", ir.DataType.INT64, [])
    condition = ir.val(f"{name}_condition", ir.DataType.BOOL, [])
    before = ir.Value(name=f"{name}_before", type=result.type, shape=result.shape)
    body = ir.Graph([number, condition, before], [], nodes=[], name=name)
    numbers = itertools.count()
    op = OpBuilder.append(body, name_value=lambda op_type: f"block_{op_type}_{next(numbers)}")
    nominal = op.Mul(number, size)
    start = op.Min(nominal, last)
    first, end = op.Unsqueeze(start, [0]), op.Unsqueeze(op.Add(start, size), [0])
    inside = set(pool.nodes)
    for sequence in pool.sequences:
        block = op.Slice(sequence, first, end, [_TOKENS_AXIS])
        block.type = sequence.type
        block.shape = None if sequence.shape is None else ir.Shape([sequence.shape[0], None, *sequence.shape[2:]])
        for use in [use for use in sequence.uses() if use.node in inside]:
            use.node.replace_input_with(use.idx, block)
    if pool.factors is not None:
        pool.pool.replace_input_with(0, _factors(op, pool.factors, first=first, end=end, nominal=nominal))
    graph.remove(pool.nodes)
    body.extend(pool.nodes)
    after = op.call("Max" if pool.factors is None else "Add", before, result)
    outputs = [op.Identity(condition), after]
    for node in body:
        for output in node.outputs:
            # Later passes give out names that are free in the outer graph, which the loop shares.
            output.name = f"{name}_{output.name}"
            if node in inside and output.shape is not None and len(output.shape) == _RANK:
                output.shape = ir.Shape([output.shape[0], None, output.shape[2]])
    for output, source in zip(outputs, (condition, before), strict=True):
        output.name, output.type, output.shape = f"{source.name}_after", source.type, source.shape
    body.outputs.extend(outputs)
    return body


def _factors(op: OpBuilder, factors: ir.Value, *, first: ir.Value, end: ir.Value, nominal: ir.Value) -> ir.Value:
    """[batch, sums, size], the factors of the tokens from `first` to `end`; 0 before `nominal`."""
    assert factors.dtype is not None
    of_block = op.Slice(factors, first, end, [2])
    tokens = op.Range(op.Squeeze(first), op.Squeeze(end), 1)
    zero = op.Constant(value=ir.tensor([0.0], dtype=factors.dtype))
    return op.Where(op.GreaterOrEqual(tokens, nominal), of_block, zero)
