"""The library's attention interface is mapped to our operators: nodes while a graph is made, else their definition."""

from __future__ import annotations

import pytest
import torch

from hdexport.attention.dense.node import dense_attention_node
from hdexport.families import SUPPORTED_MODEL_TYPES
from hdplugins.operators.dense_attention.reference import dense_attention

SPARSE_BY_DESIGN = ("big_bird", "bigbird_pegasus", "led", "longformer", "modernbert", "reformer", "transfo-xl", "xlnet")
"""Model types with nodes of another kind; each has tests of its own."""


@pytest.mark.parametrize("model_type", [name for name in SUPPORTED_MODEL_TYPES if name not in SPARSE_BY_DESIGN])
def test_every_layers_attention_is_one_node_of_ours(tiny_bundles, model_type: str) -> None:
    bundle = tiny_bundles(model_type)
    assert bundle.manifest.operators == {"hdexport::DenseAttention": 2}
    operators = {node.op_type for node in bundle.graph.graph.all_nodes()}
    assert "Softmax" not in operators
    for node in bundle.graph.graph:
        if node.op_type == "DenseAttention":
            assert node.attributes["scale"].as_float() == pytest.approx(8**-0.5)
            assert len(node.inputs) == (5 if model_type == "mpnet" else 4)
            assert len(node.inputs[3].shape) == 2


@pytest.mark.parametrize("bias", [False, True])
def test_outside_an_export_the_node_is_its_definition(bias: bool) -> None:
    query, key, value = torch.randn(3, 2, 4, 9, 8, generator=torch.Generator().manual_seed(1))
    key_mask = torch.ones(2, 9, dtype=torch.bool)
    key_mask[0, 5:] = False
    scores = torch.randn(1, 4, 9, 9) if bias else None
    got = dense_attention_node(query, key, value, key_mask, bias=scores, scale=0.3)
    assert torch.equal(got, dense_attention(query, key, value, key_mask, scores, scale=0.3))
