"""PyTorch's exporter and onnxscript's rewriter without the work that they do again and again, and in vain.

The graph is the same, which test_composites.py shows. A small model takes a third of the time less.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import onnx_ir as ir
import torch
import torch.fx.config
from onnxscript import TracedOnnxFunction
from onnxscript.rewriter import RewriteRule
from torch._subclasses import fake_tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental import proxy_tensor

try:
    from torch.onnx._internal.fx.passes import type_promotion
except ImportError:  # a later PyTorch may cast elsewhere
    type_promotion = None  # type: ignore[assignment]


@contextlib.contextmanager
def repetitions_left_out() -> Iterator[None]:
    """While this holds, `torch.onnx.export` and the optimiser of its program leave out steps that change no graph.

    Every setting is put back at the end. A version of PyTorch or onnxscript without a part that is replaced here keeps
    its own way, which takes longer and gives the same graph.
    """
    replacements: list[tuple[Any, str, Any]] = [
        # Nodes remember the lines of code that made them. PyTorch before 2.12 lacks the setting.
        (torch.fx.config, "do_not_emit_stack_traces", True),
        (TracedOnnxFunction, "function_ir", property(_Signature)),
        (getattr(type_promotion, "_TypePromotionInterpreter", None), "run_node", _run_node),
        (RewriteRule, "try_rewrite", _try_rewrite),
        (GraphModule, "recompile", _recompile),
        (GraphModule, "code", property(_code)),
        (fake_tensor, "get_fast_op_impls", _fake_operators),
        # Strides and memory format of every value, beside the value itself, which all steps of an export read.
        (proxy_tensor, "_extract_tensor_metadata", lambda *_: None),
    ]
    with contextlib.ExitStack() as stack:
        # Nearly every operator of a graph with dynamic axes is new to the cache, and a new entry is computed twice.
        stack.enter_context(torch._dynamo.config.patch(fake_tensor_cache_enabled=False))
        for owner, name, value in replacements:
            if hasattr(owner, name):
                stack.enter_context(_replaced(owner, name, value))
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


_recompiled = GraphModule.recompile


def _recompile(module: GraphModule) -> None:
    """Put off a module's Python code until it is called: an export changes its graph eight times and calls none."""
    trees = getattr(module.graph._codegen, "pytree_info", None)
    if trees is not None:
        module._in_spec, module._out_spec = trees.in_spec, trees.out_spec
    type(module).forward = _compiled_forward
    module._recompile_submodules()


def _compiled_forward(module: GraphModule, *args: Any, **kwargs: Any) -> Any:
    _recompiled(module)
    return type(module).forward(module, *args, **kwargs)


def _code(module: GraphModule) -> str:
    _recompiled(module)
    return module._code


def _like_states(mode: fake_tensor.FakeTensorMode, states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    with mode:
        return torch.empty_like(states)


def _product(mode: fake_tensor.FakeTensorMode, states: torch.Tensor, weight: torch.Tensor, *_: Any) -> torch.Tensor:
    with mode:
        return states.new_empty((*states.shape[:-1], *weight.shape[:-1]))


_given_operators = getattr(fake_tensor, "get_fast_op_impls", dict)


@functools.cache
def _fake_operators() -> dict[Any, Callable[..., Any]]:
    """How a trace finds the shape and type of a result. For these three, PyTorch goes through all steps that they are
    made of, a sixth of the time of an export."""
    aten = torch.ops.aten
    shapes = {aten.layer_norm.default: _like_states, aten.gelu.default: _like_states, aten.linear.default: _product}
    return {**_given_operators(), **shapes}


_parsed_signature = TracedOnnxFunction.function_ir.fget


class _Signature:
    """The signature of a function of onnxscript; the function is parsed when more than its domain is asked for.

    PyTorch asks each of the 500 functions that translate operators for its domain, once a model. A function answers
    with its signature, for which the function parses its source code: 0.5 of the 1.6 seconds that a small model takes.
    """

    def __init__(self, function: TracedOnnxFunction) -> None:
        self.domain = function.opset.domain
        self._parsed = functools.partial(_parsed_signature, function)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parsed(), name)


def _run_node(interpreter: type_promotion._TypePromotionInterpreter, node: Node) -> Any:
    """Make casts explicit in front of a node; the node's value is the one that the trace has written beside the node.

    PyTorch's own method computes the value of every node again, a quarter of the time of a trace. Only a node with a
    new cast needs a new value, and the rules write that value beside the node.
    """
    with interpreter._set_current_node(node):
        rule = type_promotion.get_type_promotion_rule(node, interpreter.type_promotion_table)
        if rule is not None:
            interpreter._maybe_promote_node(node, rule)
    if node.op == "call_function" and "val" in node.meta:
        return node.meta["val"]
    return Interpreter.run_node(interpreter, node)


_tried: Callable[..., Any] = RewriteRule.try_rewrite


def _try_rewrite(rule: RewriteRule, model: ir.Model, graph: Any, node: ir.Node, **options: Any) -> Any:
    """Try a rule at a node with the operator that the rule's pattern ends with, at one of a hundred nodes.

    The rewriter prepares a match for every rule at every node before it compares operators, for patterns of two
    outputs a list of all nodes.
    """
    pattern = getattr(rule, "_target_pattern", None)
    # A pattern of any operator has no value.
    operator = getattr(pattern.output_nodes[0].op, "value", None) if pattern is not None else None
    if operator is not None and operator() != node.op_type:
        return None
    return _tried(rule, model, graph, node, **options)
