"""Compute logits over a vocabulary at a few tokens, in PyTorch and in a graph: those of all tokens take gigabytes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hdplugins.op_builder import OpBuilder

if TYPE_CHECKING:
    import onnx_ir as ir
    import torch
    from transformers import PreTrainedModel

HEAD_INPUT = "head_input"
"""Name of the last projection's input, [batch, tokens, width]: it is an output where logits are sampled."""

SAMPLED_TOKENS = "sampled_tokens"
"""Input of a sampled graph: [samples], int64, indices of the tokens whose logits are computed, for all rows."""


@contextlib.contextmanager
def sampled_head(model: PreTrainedModel, tokens: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Make a PyTorch model return logits [batch, samples, vocabulary] at these tokens, [samples], in the context.

    Yields a list, which holds the input of the projection to the vocabulary, [batch, tokens, width], after the model
    has run.
    """
    inputs: list[torch.Tensor] = []

    def sample(_: torch.nn.Module, arguments: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        inputs.append(arguments[0])
        return (arguments[0][:, tokens],)

    head = model.get_output_embeddings()
    assert head is not None
    handle = head.register_forward_pre_hook(sample)
    try:
        yield inputs
    finally:
        handle.remove()


def sampled_graph(model: ir.Model, output: str, vocab_size: int) -> bool:
    """Change a graph in place to output logits [batch, samples, vocabulary] and the input of their projection.

    Only a bias and a cast are between the last projection and the output of that name. Returns whether the projection
    was found; otherwise the graph is unchanged.
    """
    import onnx_ir as ir

    value = next(value for value in model.graph.outputs if value.name == output)
    logits = [value]
    while (node := value.producer()) is not None and node.op_type in ("Add", "Cast"):
        # The exporter puts a bias second.
        assert node.inputs[0] is not None
        value = node.inputs[0]
        logits.append(value)
    if node is None or node.op_type != "MatMul":
        return False
    states, weight = node.inputs
    assert states is not None
    assert weight is not None
    if weight.shape is None or list(weight.shape)[1:] != [vocab_size]:
        return False
    tokens = ir.val(SAMPLED_TOKENS, ir.DataType.INT64, ["samples"])
    op = OpBuilder.before(node)
    node.replace_input_with(0, op.Gather(states, tokens, axis=1))
    head_input = op.Identity(states, _outputs=[ir.Value(name=HEAD_INPUT, type=states.type, shape=states.shape)])
    model.graph.inputs.append(tokens)
    model.graph.outputs.append(head_input)
    for result in logits:
        result.shape = ir.Shape(["batch", "samples", vocab_size])
    return True
