"""Composite operators of an exported program become operators that ONNX has, without a second trace of the model."""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

logger = logging.getLogger(__name__)

aten = torch.ops.aten

_WHOLE_AXIS = 2**62
"""An end of a slice from which on it is the end of the axis; PyTorch writes the largest int64."""


class _UnknownCompositeError(Exception):
    """A program holds an operator that only PyTorch's own decomposition, a second trace, takes apart."""


@contextlib.contextmanager
def composites_rewritten() -> Iterator[None]:
    """While this holds, decomposing an exported program rewrites the program's graph, where rules for that are known.

    `torch.onnx.export` calls `ExportedProgram.run_decompositions`, which traces the whole model again. Encoders hold
    few composite operators. A rule for each composite operator gives the nodes of a second trace in a tenth of the
    time. A program with an operator that no rule covers is traced again.
    """
    traced_again = ExportedProgram.run_decompositions

    @functools.wraps(traced_again)
    def rewritten(program: ExportedProgram, decompositions: Any = None, **options: Any) -> ExportedProgram:
        try:
            _rewrite(program, decompositions or {})
        except _UnknownCompositeError as unknown:
            logger.info("PyTorch traces the model a second time: the graph holds %s.", unknown)
            return traced_again(program, decompositions, **options)
        return program

    ExportedProgram.run_decompositions = rewritten  # type: ignore[method-assign]
    try:
        yield
    finally:
        ExportedProgram.run_decompositions = traced_again  # type: ignore[method-assign]


def _rewrite(program: ExportedProgram, decompositions: Mapping[Any, Any]) -> None:
    """Replace composites in place, in a model in evaluation mode. Every replacement alone leaves a valid program.

    `decompositions` has the operators that ONNX lacks, and how PyTorch takes each apart. A node that must be taken
    apart and that no rule covers raises _UnknownCompositeError.
    """
    signature = program.graph_signature
    if signature.buffers_to_mutate or signature.user_inputs_to_mutate:
        raise _UnknownCompositeError("inputs or buffers that change")
    graph = program.graph_module.graph
    calls = [(node, _rule_of(node, decompositions)) for node in graph.nodes if node.op == "call_function"]
    for node, rule in calls:
        if rule is not None:
            with graph.inserting_before(node):
                replacement = rule(node)
            if replacement is node:
                continue
            node.replace_all_uses_with(replacement)
            signature.replace_all_uses(node.name, replacement.name)
        if rule is not None or _is_check(node):
            graph.erase_node(node)
    graph.eliminate_dead_code()
    program.graph_module.recompile()


def _rule_of(node: Node, decompositions: Mapping[Any, Any]) -> Callable[[Node], Node] | None:
    """The rule that replaces a node; None where the node stays. One that may not stay raises _UnknownCompositeError."""
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        raise _UnknownCompositeError(str(target))
    if not isinstance(target, torch._ops.OpOverload) or _is_check(node):
        return None
    rule = _RULES.get(target)
    if rule is not None:
        return rule
    if target._schema.is_mutable:
        return _out_of_place
    if target in decompositions or _is_composite_view(target):
        raise _UnknownCompositeError(str(target))
    return None


def _is_check(node: Node) -> bool:
    """Whether a node only asserts a claim of the model's code: an operator without results."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and not target._schema.returns and not target._schema.is_mutable


def _is_composite_view(target: torch._ops.OpOverload) -> bool:
    """Whether a trace takes an operator apart although ONNX has it: a composite whose result may share its input."""
    is_composite = target.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    return is_composite and any(argument.alias_info is not None for argument in target._schema.arguments)


def _call(node: Node, target: Any, *arguments: Any, **options: Any) -> Node:
    """A node in front of another, with the known facts of the other's value."""
    made = node.graph.call_function(target, arguments, options)
    made.meta = dict(node.meta)
    return made


def _as_view(node: Node) -> Node:
    """A change of shape whose sizes PyTorch has computed: flattening, or taking an axis apart."""
    return _call(node, aten.view.default, _in_one_piece(node), [_size(node, size) for size in node.meta["val"].shape])


def _expanded(node: Node) -> Node:
    return _call(node, aten.expand.default, node.args[0], [_size(node, size) for size in node.meta["val"].shape])


def _reshaped(node: Node) -> Node:
    return _call(node, aten.view.default, _in_one_piece(node), *node.args[1:])


def _in_one_piece(node: Node) -> Node:
    """The input of a node, copied: PyTorch refuses a view of values that lie in another order. ONNX drops the copy."""
    value = node.args[0]
    assert isinstance(value, Node)
    copied = _call(node, aten.clone.default, value, memory_format=torch.contiguous_format)
    copied.meta["val"] = value.meta["val"]
    return copied


def _size(node: Node, size: Any) -> int | Node:
    """A size of an axis, as a number or as a node in front of another; as a trace does, sizes come from the inputs. One
    that no input and no node before has raises _UnknownCompositeError."""
    if isinstance(size, int) or size.node.expr.is_number:
        return int(size)
    inputs = [other for other in node.graph.nodes if other.op == "placeholder"]
    for given in reversed(inputs):
        value = given.meta.get("val")
        shape: Any = value.shape if isinstance(value, torch.Tensor) else ()
        for axis, length in enumerate(shape):
            if isinstance(length, torch.SymInt) and length.node.expr == size.node.expr:
                made = node.graph.call_function(aten.sym_size.int, (given, axis))
                return _with_size(made, size, node)
    for other in node.graph.nodes:
        if other is node:
            break
        value = other.meta.get("val")
        if isinstance(value, torch.SymInt) and value.node.expr == size.node.expr:
            return other
    raise _UnknownCompositeError(f"the size {size}, which no node has computed")


def _sized(node: Node) -> Node:
    """The size of an axis; the node stays where it is the first to know the size: a slice whose ends are computed."""
    try:
        size = _size(node, node.meta["val"])
    except _UnknownCompositeError:
        return node
    return node if isinstance(size, int) else size


def _cast(node: Node) -> Node:
    value, dtype = node.args[0], node.meta["val"].dtype
    assert isinstance(value, Node)
    return (
        _unchanged(node) if value.meta["val"].dtype == dtype else _call(node, aten._to_copy.default, value, dtype=dtype)
    )


def _unchanged(node: Node) -> Node:
    """A node's input in place of its result. An _UnknownCompositeError says that another node changes the result in
    place: it would then change the input, too."""
    for user in node.users:
        if isinstance(user.target, torch._ops.OpOverload) and user.target._schema.is_mutable:
            raise _UnknownCompositeError(f"{node.target}, whose result {user.target} changes")
    assert isinstance(node.args[0], Node)
    return node.args[0]


def _transposed(node: Node) -> Node:
    axes = range(node.meta["val"].dim())
    return _call(node, aten.permute.default, node.args[0], [*reversed(axes)])


def _squared(node: Node) -> Node:
    return _call(node, aten.pow.Tensor_Scalar, node.args[0], 2)


def _narrowed(node: Node) -> Node:
    value, axis, start, length = node.args
    return _call(node, aten.slice.Tensor, value, axis, start, _sum(node, start, length))


def _sum(node: Node, *terms: Any) -> int | Node:
    """A sum of sizes, which a trace simplifies."""
    total = sum(term.meta["val"] if isinstance(term, Node) else term for term in terms)
    try:
        return _size(node, total)
    except _UnknownCompositeError:
        return _with_size(node.graph.call_function(operator.add, terms), total, node)


def _with_size(made: Node, size: Any, node: Node) -> Node:
    """A node that gives a size, in the module of the node that needs the size."""
    made.meta = {"val": size, "nn_module_stack": node.meta.get("nn_module_stack", {})}
    return made


def _split(node: Node) -> Node:
    value, chunks, axis = (*node.args, 0)[:3]
    assert isinstance(value, Node)
    size = value.meta["val"].shape[axis]
    if not isinstance(size, int) or not isinstance(chunks, int):
        raise _UnknownCompositeError("parts of an axis whose size is not fixed")
    return _call(node, aten.split.Tensor, value, -(-size // chunks), axis)


def _sliced(node: Node) -> Node:
    """The input of a slice that is all of it; another slice stays."""
    _, _, start, end, step = (*node.args, *(None,) * 4)[:5]
    reaches_end = end is None or (isinstance(end, int) and end >= _WHOLE_AXIS)
    is_whole = start in (0, None) and reaches_end and step in (1, None)
    return _unchanged(node) if is_whole else node


def _out_of_place(node: Node) -> Node:
    """An operator that changes its input becomes the one that does not, where nothing else looks at the input's memory.

    It raises _UnknownCompositeError where the input may share its memory, where more than the first argument changes,
    or where an argument has another dtype, which would be the result's.
    """
    target, (changed, *_) = node.target, node.args
    assert isinstance(target, torch._ops.OpOverload)
    written = [argument.name for argument in target._schema.arguments if argument.alias_info is not None]
    name = target._schema.name.removeprefix("aten::").removesuffix("_")
    packet = getattr(aten, name, None)
    if (
        written != [target._schema.arguments[0].name]
        or not isinstance(changed, Node)
        or _may_share_memory(changed)
        or any(_may_share_memory(user) for user in changed.users if user is not node)
        or any(other.meta["val"].dtype != changed.meta["val"].dtype for other in _tensors(node))
        or packet is None
        or target._overloadname not in packet.overloads()
    ):
        raise _UnknownCompositeError(str(target))
    made = _call(node, getattr(packet, target._overloadname), *node.args, **node.kwargs)
    changed.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made and user > node)
    return made


def _tensors(node: Node) -> list[Node]:
    """The inputs of a node that are tensors."""
    return [given for given in node.all_input_nodes if isinstance(given.meta.get("val"), torch.Tensor)]


def _may_share_memory(node: Node) -> bool:
    """Whether a node's result may be, or be a part of, its input or of a value from outside the graph."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return True
    return any(result.alias_info is not None for result in node.target._schema.returns)


_RULES: Mapping[Any, Callable[[Node], Node]] = {
    aten.__and__.Tensor: lambda node: _call(node, aten.bitwise_and.Tensor, *node.args),
    aten.__or__.Tensor: lambda node: _call(node, aten.bitwise_or.Tensor, *node.args),
    aten.chunk.default: _split,
    aten.contiguous.default: _unchanged,
    aten.expand_as.default: _expanded,
    aten.flatten.using_ints: _as_view,
    aten.narrow.default: _narrowed,
    aten.numpy_T.default: _transposed,
    aten.reshape.default: _reshaped,
    aten.slice.Tensor: _sliced,
    aten.square.default: _squared,
    aten.sym_size.int: _sized,
    aten.to.device: _cast,
    aten.to.dtype: _cast,
    aten.to.dtype_layout: _cast,
    aten.unflatten.int: _as_view,
}
