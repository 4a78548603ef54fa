"""Fold the constants of a traced graph, and simplify it by onnxscript's rewrite rules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx_ir

_MOST_ROUNDS = 2
"""Rounds of folding and rewriting, as many as `torch.onnx.ONNXProgram.optimize` makes."""


def optimize(model: onnx_ir.Model) -> None:
    """Optimize a model in place, by the steps of `torch.onnx.ONNXProgram.optimize` and the rules that encoders need.

    `_add_zero` takes the place of onnxscript's `add_0_rule`, which takes 1e-8, the epsilon of some normalizations, for
    0: a row of zeros would become NaN. The rules for convolutions, batch normalization, clips and scattering are left
    out because each rule is tried at each node.
    """
    from onnx_ir.passes import common
    from onnxscript import optimizer
    from onnxscript.rewriter import RewritePass, RewriteRule
    from onnxscript.rewriter.rules import common as rules

    rewrite = RewritePass([
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
    unused = (common.RemoveUnusedNodesPass(), common.RemoveUnusedFunctionsPass(), common.RemoveUnusedOpsetsPass())
    common.InlinePass()(model)
    for _ in range(_MOST_ROUNDS):
        results = [optimizer.fold_constants_ir(model, onnx_shape_inference=True)]
        results += [step(model) for step in (rewrite, *unused)]
        if not any(result.modified for result in results):
            break
    for step in (
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.LiftSubgraphInitializersToMainGraphPass(),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.OutputFixPass(),
        common.NameFixPass(),
    ):
        step(model)


def _add_zero(op: Any, x: Any, zero: Any) -> Any:
    return op.Add(x, zero)


def _identity(op: Any, x: Any, **_: Any) -> Any:
    return op.Identity(x)


def _is_zero(_: Any, zero: onnx_ir.Value, **__: Any) -> bool:
    """Whether a value is the scalar 0, exactly; a larger array of zeros may broadcast the other term."""
    import onnx_ir as ir

    constant = ir.convenience.get_const_tensor(zero)
    return constant is not None and constant.shape.rank() == 0 and not constant.numpy().any()
