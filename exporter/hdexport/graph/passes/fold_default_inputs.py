"""Compute in the graph, from ids and attention mask, the inputs that only hdexport's runtime feeds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import onnx_ir as ir

from hdplugins.op_builder import OpBuilder
from hdruntime.bundle.manifest import Fill, InputSpec, Manifest, Role

logger = logging.getLogger(__name__)


class FoldDefaultInputs(ir.passes.InPlacePass):
    """Replace inputs by the defaults of `hdruntime.inference.inputs` for a text that is run whole.

    1. A mask of global tokens is the first real token of each row, or no token.
    2. The masks of pooled and of attended tokens are the attention mask: the texts have no prompt that is not pooled,
       and no added tokens.
    3. Token types that the tokenizer does not give are 0, or 1 after the first token of an id.
    4. Recurrent states have their values before the first call; the outputs that feed them are removed.

    Args:
        manifest: manifest of the graph's bundle.
    """

    def __init__(self, manifest: Manifest) -> None:
        super().__init__()
        self._manifest = manifest

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph, manifest = model.graph, self._manifest
        values = {value.name: value for value in graph.inputs}
        folded = [spec for spec in manifest.inputs if folds(spec, manifest)]
        op = OpBuilder.before(graph[0])
        for spec in folded:
            value = values[spec.name]
            replacement = _FOLDS[spec.role](op, spec, values[manifest.ids], values[manifest.mask], manifest)
            replacement.type, replacement.shape = value.type, value.shape
            ir.convenience.replace_all_uses_with(value, replacement)
            graph.inputs.remove(value)
        carried = {spec.fed_from for spec in folded}
        graph.outputs[:] = [value for value in graph.outputs if value.name not in carried]  # 4
        if folded:
            logger.debug("computed in the graph: %s", ", ".join(spec.name for spec in folded))
        return ir.passes.PassResult(model, modified=bool(folded))


def folds(spec: InputSpec, manifest: Manifest) -> bool:
    """Whether an input is computed from the ids and the attention mask."""
    if spec.role is Role.TOKEN_TYPES:
        # The runtime feeds the default then, whatever types the post-processor of tokenizer.json gives.
        return manifest.tokenizer is not None and not manifest.tokenizer.token_types
    if spec.role is Role.GLOBAL_ATTENTION_MASK:
        return spec.default.fill in (Fill.FIRST_TOKEN, Fill.ZEROS)
    return spec.role in _FOLDS


def _global_mask(op: OpBuilder, spec: InputSpec, ids: ir.Value, mask: ir.Value, manifest: Manifest) -> ir.Value:
    """The first real token, also of a row that is padded on the left: [batch, tokens]."""
    if spec.default.fill is Fill.ZEROS:
        return op.Mul(mask, 0)
    is_first = op.Equal(op.CumSum(mask, 1), 1)
    return op.Mul(op.Cast(is_first, to=ir.DataType.INT64), mask)


def _attention_mask(op: OpBuilder, spec: InputSpec, ids: ir.Value, mask: ir.Value, manifest: Manifest) -> ir.Value:
    return op.Identity(mask)


def _token_types(op: OpBuilder, spec: InputSpec, ids: ir.Value, mask: ir.Value, manifest: Manifest) -> ir.Value:
    """0, or 1 after the first token of an id, in a row without one from its second token on: [batch, tokens]."""
    if spec.default.fill is Fill.ZEROS:
        return op.Mul(ids, 0)
    is_separator = op.Cast(op.Equal(ids, spec.default.token_id), to=ir.DataType.INT64)
    first = op.ArgMax(is_separator, axis=1, keepdims=1)
    places = op.Sub(op.CumSum(op.Add(op.Mul(ids, 0), 1), 1), 1)
    return op.Cast(op.Greater(places, first), to=ir.DataType.INT64)


def _state_at_start(op: OpBuilder, spec: InputSpec, ids: ir.Value, mask: ir.Value, manifest: Manifest) -> ir.Value:
    """The recurrent state that the runtime gives a text of one segment: [batch, ...]."""
    sizes = [manifest.min_memory if axis == "memory" else int(axis) for axis in spec.shape[1:]]
    shape = op.Concat(op.Shape(ids, start=0, end=1), sizes, axis=0)
    return op.Expand(float(spec.default.fill is Fill.ONES), shape)


_FOLDS: Mapping[Role, Callable[[OpBuilder, InputSpec, ir.Value, ir.Value, Manifest], ir.Value]] = {
    Role.GLOBAL_ATTENTION_MASK: _global_mask,  # 1
    Role.POOLED: _attention_mask,  # 2
    Role.ATTENDED: _attention_mask,
    Role.TOKEN_TYPES: _token_types,  # 3
    Role.RECURRENT_STATE: _state_at_start,  # 4
}
