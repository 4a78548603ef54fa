"""Pool wide values of tokens in blocks of tokens: a text's values are never in memory all at once.

SPLADE pools logits [batch, tokens, vocabulary], 500 MB for a text of 4096 tokens and a vocabulary of 30522. In a loop,
each turn makes one block's logits and keeps their maximum, [batch, vocabulary], or adds their sums, [batch, sums,
vocabulary].

Engines do not get it: `hdexport.graph.targets` says why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import onnx_ir

BLOCK_TOKENS = 256
"""Most tokens of a block, in all rows of a batch together. So many cost no time: 4096 tokens take as long as whole."""

_ELEMENTWISE = frozenset({
    "Add", "Cast", "Div", "Identity", "Log", "Max", "Min", "Mul", "Relu", "Sub", "Tanh", "Where",
})  # fmt: skip

_TOKENS_AXIS, _RANK = 1, 3
"""The tokens' axis, and the rank, of [batch, tokens, width]."""


class _Pooled(NamedTuple):
    """A product with a weight whose tokens are pooled.

    Attributes:
        nodes: in the order of the graph: the product, elementwise operators, the pool, and a Cast of its result.
        sequences: [batch, tokens, ...], all that they read beside constants and `factors`.
        pool: the node that pools: a maximum, or a product from the left.
        factors: [batch, sums, tokens], the product's; None for a maximum.
        result: [batch, width] or [batch, sums, width], all that other nodes read of them.
    """

    nodes: list[onnx_ir.Node]
    sequences: list[onnx_ir.Value]
    pool: onnx_ir.Node
    factors: onnx_ir.Value | None
    result: onnx_ir.Value


def pool_in_blocks(model: onnx_ir.Model) -> int:
    """Replace pools over the tokens of a product with a weight by loops over blocks of tokens, in place; returns how
    many.

    A pool is a maximum over the tokens, or a product with factors for each token, which sums. Between the product with
    the weight and the pool are elementwise operators alone, whose other inputs are constants and one value for each
    token. A batch of up to 256 tokens in all is one block.
    """
    pooled = _products(model)
    for number, each in enumerate(pooled):
        _replace_by_loop(each, name=f"pooled_{number}")
    return len(pooled)


def pools_products(model: onnx_ir.Model) -> bool:
    """Whether there is something that `pool_in_blocks` replaces."""
    return bool(_products(model))


def _products(model: onnx_ir.Model) -> list[_Pooled]:
    found = [_before(node) for node in model.graph if node.op_type in ("ReduceMax", "MatMul") and not node.domain]
    return [each for each in found if each is not None]


def _before(pool: onnx_ir.Node) -> _Pooled | None:
    """The product that a node pools; None where that is no product with a weight, or the axis is not the tokens'."""
    factors, pooled = _pooled_by(pool)
    if pooled is None:
        return None
    sequences: dict[onnx_ir.Value, None] = {}
    inside, pending, has_product = {pool}, [pooled], False
    while pending:
        value = pending.pop()
        if value is None or value.shape is None or value.is_initializer() or value.const_value is not None:
            continue
        node = value.producer()
        if len(value.shape) == _RANK and value.shape[-1] == 1:
            sequences[value] = None
        elif node is None or node.domain or len(value.shape) != _RANK:
            return None
        elif node.op_type == "MatMul" and _is_weight(node.inputs[1]) and _widens(node):
            inside.add(node)
            assert node.inputs[0] is not None
            sequences[node.inputs[0]] = None
            has_product = True
        elif node.op_type in _ELEMENTWISE:
            inside.add(node)
            pending += node.inputs
        else:
            return None
    result = pool.outputs[0]
    users = [use.node for use in result.uses()]
    if len(users) == 1 and users[0].op_type == "Cast":
        # Maxima of half precision are kept in the type that is wanted.
        inside.add(users[0])
        result = users[0].outputs[0]
    others = (output for node in inside for output in node.outputs if output is not result)
    if not has_product or any(
        value.is_graph_output() or any(use.node not in inside for use in value.uses()) for value in others
    ):
        return None
    assert pool.graph is not None
    nodes = [node for node in pool.graph if node in inside]
    return _Pooled(nodes=nodes, sequences=list(sequences), pool=pool, factors=factors, result=result)


def _pooled_by(pool: onnx_ir.Node) -> tuple[onnx_ir.Value | None, onnx_ir.Value | None]:
    """The factors of a pool, if any, and its input, [batch, tokens, width]; None for a node that is no pool."""
    import onnx_ir as ir

    first, second = pool.inputs[0], pool.inputs[1] if len(pool.inputs) > 1 else None
    if pool.op_type == "ReduceMax":
        axes = ir.convenience.get_const_tensor(second)
        is_of_tokens = axes is not None and axes.numpy().tolist() == [_TOKENS_AXIS]
        return None, first if is_of_tokens and not pool.attributes.get_int("keepdims", 1) else None
    has_factors = first is not None and first.shape is not None and len(first.shape) == _RANK
    return (first, second) if has_factors and not _is_weight(second) else (None, None)


def _is_weight(value: onnx_ir.Value | None) -> bool:
    """Whether a value is an initializer, or one transposed, as a weight that is the table of tokens' vectors, too."""
    node = None if value is None else value.producer()
    if node is not None and node.op_type == "Transpose":
        value = node.inputs[0]
    return value is not None and value.is_initializer()


def _widens(product: onnx_ir.Node) -> bool:
    """Whether a product makes more values of a token than it reads; others are small enough."""
    read, made = product.inputs[0], product.outputs[0]
    assert read is not None
    return read.shape is not None and made.shape is not None and int(made.shape[-1]) > int(read.shape[-1])


def _replace_by_loop(pooled: _Pooled, *, name: str) -> None:
    """Put a loop in the nodes' place; blocks are all of one size.

    The last block ends with the last token, and begins with tokens of the block before it, which change no maximum, and
    whose factors in a sum are 0.
    """
    import onnx_ir as ir

    graph, result, sequence = pooled.pool.graph, pooled.result, pooled.sequences[0]
    assert graph is not None
    assert result.shape is not None
    assert result.dtype is not None
    # An output of the graph keeps its name.
    whole = ir.Value(name=result.name, type=result.type, shape=result.shape)
    result.name = f"{result.name}_of_block"
    ir.convenience.replace_all_uses_with(result, whole, replace_graph_outputs=True)
    tape = ir.tape.Tape()
    one = tape.op("Constant", [], {"value_int": 1})
    most = tape.op("Constant", [], {"value_int": BLOCK_TOKENS})
    batch = tape.op("Shape", [sequence], {"start": 0, "end": 1})
    rows, tokens = (
        tape.op("Squeeze", [axis]) for axis in (batch, tape.op("Shape", [sequence], {"start": 1, "end": 2}))
    )
    size = tape.op("Min", [tape.op("Max", [tape.op("Div", [most, rows]), one]), tokens])
    last = tape.op("Sub", [tokens, size])
    blocks = tape.op("Div", [tape.op("Sub", [tape.op("Add", [tokens, size]), one]), size])
    width = tape.op("Constant", [], {"value_ints": [int(axis) for axis in result.shape[1:]]})
    nothing = result.dtype.min if pooled.factors is None else 0.0
    initial = tape.op("Constant", [], {"value": ir.tensor([nothing], dtype=result.dtype)})
    before = tape.op("Expand", [initial, tape.op("Concat", [batch, width], {"axis": 0})])
    loop = ir.node("Loop", [blocks, None, before], outputs=[whole])
    place = pooled.nodes[-1]
    graph.insert_before(place, [*tape.nodes, loop])
    loop.attributes["body"] = ir.AttrGraph("body", _body(pooled, size=size, last=last, name=name))


def _body(pooled: _Pooled, *, size: onnx_ir.Value, last: onnx_ir.Value, name: str) -> onnx_ir.Graph:
    """A block's turn: its number, whether to go on and the earlier blocks' pool -> the last two, after this block."""
    import onnx_ir as ir

    graph, result = pooled.pool.graph, pooled.result
    assert graph is not None
    scalar = ir.Shape([])
    number = ir.Value(name=f"{name}_number", type=ir.TensorType(ir.DataType.INT64), shape=scalar)
    goes_on = ir.Value(name=f"{name}_goes_on", type=ir.TensorType(ir.DataType.BOOL), shape=scalar)
    before = ir.Value(name=f"{name}_before", type=result.type, shape=result.shape)
    tape = ir.tape.Tape()
    zeros, ones = (tape.op("Constant", [], {"value_ints": [each]}) for each in (0, 1))
    wanted = tape.op("Mul", [number, size])
    start = tape.op("Min", [wanted, last])
    first, end = (tape.op("Unsqueeze", [value, zeros]) for value in (start, tape.op("Add", [start, size])))
    inside = set(pooled.nodes)
    for sequence in pooled.sequences:
        block = tape.op("Slice", [sequence, first, end, ones])
        block.type = sequence.type
        block.shape = None if sequence.shape is None else ir.Shape([sequence.shape[0], None, *sequence.shape[2:]])
        for use in [use for use in sequence.uses() if use.node in inside]:
            use.node.replace_input_with(use.idx, block)
    if pooled.factors is not None:
        pooled.pool.replace_input_with(0, _factors(tape, pooled.factors, first=first, end=end, wanted=wanted))
    after = ir.node("Max" if pooled.factors is None else "Add", [before, result])
    still = ir.node("Identity", [goes_on])
    graph.remove(pooled.nodes)
    nodes = [*tape.nodes, *pooled.nodes, after, still]
    for index, node in enumerate(nodes):
        for output in node.outputs:
            # Later passes give out names that are free in the outer graph, which the loop shares.
            output.name = f"{name}_{output.name or index}"
            if node in pooled.nodes and output.shape is not None and len(output.shape) == _RANK:
                output.shape = ir.Shape([output.shape[0], None, output.shape[2]])
    for node, given in ((after, before), (still, goes_on)):
        node.outputs[0].name = f"{given.name}_after"
        node.outputs[0].type, node.outputs[0].shape = given.type, given.shape
    return ir.Graph([number, goes_on, before], [still.outputs[0], after.outputs[0]], nodes=nodes, name=name)


def _factors(
    tape: onnx_ir.tape.Tape,
    factors: onnx_ir.Value,
    *,
    first: onnx_ir.Value,
    end: onnx_ir.Value,
    wanted: onnx_ir.Value,
) -> onnx_ir.Value:
    """[batch, sums, size], the factors of the tokens from `first` to `end`; 0 before `wanted`."""
    import onnx_ir as ir

    assert factors.dtype is not None
    last_axis, one = (tape.op("Constant", [], {"value_ints": [each]}) for each in (2, 1))
    of_block = tape.op("Slice", [factors, first, end, last_axis, one])
    step = tape.op("Constant", [], {"value_int": 1})
    tokens = tape.op("Range", [tape.op("Squeeze", [first]), tape.op("Squeeze", [end]), step])
    nothing = tape.op("Constant", [], {"value": ir.tensor([0.0], dtype=factors.dtype)})
    return tape.op("Where", [tape.op("GreaterOrEqual", [tokens, wanted]), of_block, nothing])
