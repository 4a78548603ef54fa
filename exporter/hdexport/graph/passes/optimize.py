"""Fold the constants of a traced graph, and simplify it by onnxscript's rewrite rules."""

from __future__ import annotations

import logging
from typing import Any

import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript import optimizer
from onnxscript.rewriter import RewritePass, RewriteRule
from onnxscript.rewriter.rules import common as rules

from hdexport.graph.passes.graph_pass import run_passes

logger = logging.getLogger(__name__)

_MAX_ROUNDS = 2
"""Rounds of folding and rewriting, as many as `torch.onnx.ONNXProgram.optimize` makes."""


class OptimizeTrace(ir.passes.InPlacePass):
    """Simplify a traced graph by the steps of `torch.onnx.ONNXProgram.optimize` and the rules that encoders need.

    1. Inline functions.
    2. Fold constants, rewrite, and remove what is unused, up to `_MAX_ROUNDS` times. `_add_zero` replaces onnxscript's
       `add_0_rule`, which takes 1e-8, the epsilon of some normalizations, for 0: a row of zeros would become NaN. The
       rules for convolutions, batch normalization, clips and scattering are omitted since each rule is tried at each
       node.
    3. Lift constants to initializers, and merge equal initializers and nodes.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        before = len(model.graph)
        run_passes(model, [common.InlinePass()])  # 1
        unused = common.RemoveUnusedNodesPass, common.RemoveUnusedFunctionsPass, common.RemoveUnusedOpsetsPass
        rounds = [_FoldConstants(), _rewrite_rules(), *(remove() for remove in unused)]
        for _ in range(_MAX_ROUNDS):  # 2
            if not run_passes(model, rounds):
                break
        run_passes(  # 3
            model,
            [
                common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
                common.LiftSubgraphInitializersToMainGraphPass(),
                common.DeduplicateInitializersPass(),
                common.CommonSubexpressionEliminationPass(),
                common.OutputFixPass(),
                common.NameFixPass(),
            ],
        )
        logger.debug("%d nodes of the trace became %d", before, len(model.graph))
        return ir.passes.PassResult(model, modified=True)


class _FoldConstants(ir.passes.InPlacePass):
    def call(self, model: ir.Model) -> ir.passes.PassResult:
        return ir.passes.PassResult(model, optimizer.fold_constants_ir(model, onnx_shape_inference=True).modified)


def _rewrite_rules() -> ir.passes.PassBase:
    return RewritePass([
        *rules.mul_by_1_rule.commute(),
        *RewriteRule(_add_zero, _identity, _is_zero).commute(),
        rules.div_by_1_rule,
        rules.dropout_zero_rule,
        rules.dropout_inference_rule,
        rules.two_reshapes_matmul_reshape_rule,
        rules.one_reshape_matmul_reshape_rule,
        rules.cast_constant_of_shape_rule,
        rules.cast_constant_of_shape_without_value_rule,
        rules.collapse_slice_rule,
        rules.collapse_slice2_rule,
        rules.materialize_reshape_shape_rule,
        rules.cast_cast_rule,
        rules.no_op_cast_rule,
        rules.no_op_expand_rule,
        rules.flatten_to_reshape_rule,
        rules.reshape_reshape_rule,
        rules.slice_split_rule,
        rules.no_op_transpose_rule,
        rules.transpose_transpose_rule,
        rules.unsqueeze_unsqueeze_rule,
        rules.squeeze_reshape_1d_rule,
        rules.remove_optional_bias_from_gemm_rule,
    ])  # fmt: skip


def _add_zero(op: Any, x: Any, zero: Any) -> Any:
    return op.Add(x, zero)


def _identity(op: Any, x: Any, **_: Any) -> Any:
    return op.Identity(x)


def _is_zero(_: Any, zero: ir.Value, **__: Any) -> bool:
    """Whether a value is the scalar 0, exactly; a larger array of zeros may broadcast the other term."""
    constant = ir.convenience.get_const_tensor(zero)
    return constant is not None and constant.shape.rank() == 0 and not constant.numpy().any()
