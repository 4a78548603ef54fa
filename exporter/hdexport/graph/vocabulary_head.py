"""Logits over a vocabulary at a few tokens only, in PyTorch and in a graph: all of a long text's take gigabytes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir
    import torch
    from transformers import PreTrainedModel

HEAD_INPUT = "head_input"
"""Name of the last projection's input, [batch, tokens, width]: it is an output where logits are sampled."""

SAMPLED_TOKENS = "sampled_tokens"
"""Input of a sampled graph: [samples], int64, the tokens whose logits are wanted, the same ones in each row."""


@contextlib.contextmanager
def sampled_head(model: PreTrainedModel, tokens: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Make a model of PyTorch's give logits [batch, samples, vocabulary] at these tokens, [samples], while the block
    lasts.

    Gives the input of the projection to the vocabulary, [batch, tokens, width], once the model has run: a list of one.
    """
    given: list[torch.Tensor] = []

    def cut(_: torch.nn.Module, arguments: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        given.append(arguments[0])
        return (arguments[0][:, tokens],)

    head = model.get_output_embeddings()
    assert head is not None
    handle = head.register_forward_pre_hook(cut)
    try:
        yield given
    finally:
        handle.remove()


def sampled_graph(model: ir.Model, output: str, vocab_size: int) -> bool:
    """Make a graph give logits [batch, samples, vocabulary], and their projection's input, in place.

    The output of that name is made of the graph's last projection by nothing but a bias and a cast. Returns whether the
    projection was found; the graph is unchanged where it was not.
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
    given, weight = node.inputs
    assert given is not None
    assert weight is not None
    if weight.shape is None or list(weight.shape)[1:] != [vocab_size]:
        return False
    tokens = ir.val(SAMPLED_TOKENS, ir.DataType.INT64, ["samples"])
    gather = ir.node("Gather", [given, tokens], attributes={"axis": 1})
    named = ir.node("Identity", [given])
    named.outputs[0].name = HEAD_INPUT
    named.outputs[0].type, named.outputs[0].shape = given.type, given.shape
    model.graph.insert_before(node, [gather, named])
    node.replace_input_with(0, gather.outputs[0])
    model.graph.inputs.append(tokens)
    model.graph.outputs.append(named.outputs[0])
    for result in logits:
        result.shape = ir.Shape(["batch", "samples", vocab_size])
    return True
